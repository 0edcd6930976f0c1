"""Interprets an error of a rank: whether trying again helps, on which node, and what to change.

CUDA and NCCL report a failed device, a lost rank, a bug in a program and a lack of memory by the
same few types.
"""

import errno
import re

import torch
import torch.distributed as dist

from vapo_megatron.errors import RunFailed, TryAgain, VapoError
from vapo_megatron.monitoring.timers import phase_of

# cudaError_t. What a device, its links or its driver did: another node will do better.
_DEVICE_FAULTS = {3, 46, 100, 214, 220, 226, 300, 714, 802, 999}
# Errors of the program, whatever the device: assertions, arguments, kernels and drivers that do not
# fit.
_OF_THE_PROGRAM = {1, 9, 35, 98, 101, 200, 209, 218, 222, 223, 710, 801, 804}
_OUT_OF_MEMORY = 2
_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
_MISUSE_OF_NCCL = ("ncclinvalidusage", "ncclinvalidargument")
# gloo has no error types: its messages say that another rank is gone or silent.
_LOST = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "remote process exited",
)
_CUDA_FAILURE = re.compile(r"Cuda failure (\d+)")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ (?:[KMGT]iB|bytes))")
_FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


class DeviceFault(TryAgain):
    """A device of this node is broken: trying again makes sense on another one."""


class LostPeer(TryAgain):
    """Another rank is gone; its own end says why."""


def explain(error: BaseException, where: str) -> VapoError | None:
    """The one line for an error of a rank's work; None for one that has no known meaning and
    deserves its stack trace.
    where: the rank, its node and device, in words."""
    text = str(error)
    code = _cuda_code(error, text)
    if (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or code == _OUT_OF_MEMORY
        or "t allocate memory" in text
    ):
        return _out_of_memory(error, text, where)
    message = " ".join(text.split())[:200]
    if isinstance(error, OSError) and error.errno in _DISK_FAULTS:
        return TryAgain(
            f"{where}: the disk refused{phase_of(error)} ({message}): repair it, then resume with "
            "run.resume=auto"
        )
    if isinstance(error, torch.AcceleratorError) or code is not None:
        if code in _OF_THE_PROGRAM:
            return None
        if code in _DEVICE_FAULTS:
            return DeviceFault(
                f"{where}: the device failed{phase_of(error)} ({message}): start the same command "
                "again without this node, and look it over with `vapo-megatron doctor`"
            )
        return TryAgain(
            f"{where}: a computation broke off{phase_of(error)} ({message}): start the same "
            "command again; if it happens at the same place on another node, it is the program's "
            "fault and not the device's"
        )
    lost = isinstance(error, RuntimeError) and any(words in text.lower() for words in _LOST)
    if lost or (
        isinstance(error, dist.DistError)
        and not any(words in text.lower() for words in _MISUSE_OF_NCCL)
    ):
        return LostPeer(
            f"{where}: lost another rank, whose output says why{phase_of(error)} ({message})"
        )
    return None


def _cuda_code(error: BaseException, text: str) -> int | None:
    """The number of the CUDA error that was met, by torch itself or by NCCL on its behalf."""
    code = getattr(error, "error_code", None)
    if (
        code is None
        and isinstance(error, dist.DistBackendError)
        and (match := _CUDA_FAILURE.search(text))
    ):
        code = match[1]
    if code is None:
        return None
    return int(code)


def _out_of_memory(error: BaseException, text: str, where: str) -> RunFailed:
    asked = _ASKED.search(text)
    free = _FREE.search(text)
    amount = asked[1] if asked else "an unknown amount"
    if amount.endswith(" bytes"):
        amount = f"{int(amount.split()[0]) / 2**30:.2f} GiB"
    if free:
        room = f", {free[2]} of {free[1]} were free"
    else:
        room = ""
    return RunFailed(
        f"{where}: out of memory{phase_of(error)}: {amount} was requested{room}: lower "
        "actor.max_tokens_per_microbatch (critic likewise) or rollout.mem_fraction_static, or set "
        "actor.recompute.granularity=full; `vapo-megatron plan CONFIG` shows what fits"
    )

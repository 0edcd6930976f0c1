"""What NVML, the driver's library, says of a node's GPUs, and judgements of it. Judging is pure."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from vapo_megatron.config.hardware import HardwareConfig, Kind
from vapo_megatron.operations.doctor.report import Line
from vapo_megatron.operations.hardware import RATES, Hardware

_MIB = 2**20
Answer = TypeVar("Answer")
# MiB that an idle GPU may show as used.
_IDLE_MIB = 1500
# How the driver names the SXM modules whose number of links RATES has.
_SXM: dict[Kind, re.Pattern[str]] = {
    "a100-40g": re.compile(r"\bA100-SXM4"),
    "a100-80g": re.compile(r"\bA100-SXM4"),
    "h100-80g": re.compile(r"\bH100 80GB HBM3$"),
    "h200-141g": re.compile(r"\bH200$"),
    "b200-180g": re.compile(r"\bB200$"),
}


class Unreadable(Exception):
    """A tool or library is not there, failed, or said something unknown; the message names it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. None stands for what it does not tell."""

    index: int
    name: str
    memory_mib: float
    used_mib: float
    driver: str
    ecc: bool | None
    uncorrected: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    mig: bool | None
    compute_mode: str


_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "Default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "Exclusive_Thread",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "Prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "Exclusive_Process",
}


def read_gpus() -> list[Gpu]:
    """The node's GPUs; one that has fallen off the bus is left out. Raises Unreadable where NVML does not answer."""
    with _nvml():
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [_read_gpu(index, handle, driver) for index, handle in _handles()]


def read_links() -> dict[int, list[float | None]]:
    """GB/s of every NVLink in one direction by GPU: None for an inactive link, 0 where the driver tells no rate.

    Raises Unreadable where NVML does not answer.
    """
    with _nvml():
        return {index: list(_read_links(handle)) for index, handle in _handles()}


@contextmanager
def _nvml() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unreadable(f"NVML (libnvidia-ml.so.1, part of the driver) cannot be used: {error}") from None
    try:
        yield
    except pynvml.NVMLError as error:
        raise Unreadable(f"NVML failed: {error}; see what `nvidia-smi` says") from None
    finally:
        pynvml.nvmlShutdown()


def _handles() -> Iterator[tuple[int, Any]]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            yield index, pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError_GpuIsLost:
            continue


def _read_gpu(index: int, handle: Any, driver: str) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)  # what the driver reserves is not in use
    ecc = _told(lambda: pynvml.nvmlDeviceGetEccMode(handle))
    rows = _told(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    mig = _told(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    mode = pynvml.nvmlDeviceGetComputeMode(handle)
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        memory_mib=memory.total / _MIB,
        used_mib=memory.used / _MIB,
        driver=driver,
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected=_told(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        mig=None if mig is None else bool(mig[0]),
        compute_mode=_COMPUTE_MODES.get(mode, f"number {mode}"),
    )


def _read_links(handle: Any) -> Iterator[float | None]:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            return  # the GPU has no such link
        if not active:
            yield None
            continue
        (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)])
        yield field.value.uiVal / 1000 if field.nvmlReturn == pynvml.NVML_SUCCESS else 0.0


def _told(ask: Callable[[], Answer]) -> Answer | None:
    try:
        return ask()
    except pynvml.NVMLError_NotSupported:
        return None


def judge_gpus(gpus: Sequence[Gpu], hardware: HardwareConfig) -> list[Line]:
    """Whether as many GPUs are there as the config says, alike, free, whole and of the kind."""
    return list(_wrong_gpus(gpus, hardware)) or [
        Line("ok", f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver}, all free")
    ]


def _wrong_gpus(gpus: Sequence[Gpu], hardware: HardwareConfig) -> Iterator[Line]:
    if len(gpus) != hardware.gpus_per_node:
        found = f"{len(gpus)} GPUs answer, hardware.gpus_per_node={hardware.gpus_per_node}"
        remedy = "drain the node: a GPU has fallen off the bus (dmesg, Xid 79), or set hardware.gpus_per_node"
        yield Line("fault", found, remedy)
    kinds = Counter((gpu.name, gpu.memory_mib, gpu.driver) for gpu in gpus)
    if len(kinds) > 1:
        named = "; ".join(f"{count} x {name} ({memory:.0f} MiB)" for (name, memory, _), count in kinds.items())
        yield Line("fault", f"GPUs differ: {named}", "take nodes of one kind: the slowest sets the pace")
    stated = Hardware(hardware).device_memory / _MIB
    if small := [gpu for gpu in gpus if gpu.memory_mib < 0.97 * stated]:
        found = f"GPUs {_named(small)} have {small[0].memory_mib:.0f} MiB, a {hardware.kind} has {stated:.0f}"
        yield Line("warning", found, "set hardware.kind, and see what `vapo-megatron plan` then says")
    if used := [gpu for gpu in gpus if gpu.used_mib > _IDLE_MIB]:
        found = f"GPUs {_named(used)} are in use ({max(gpu.used_mib for gpu in used):.0f} MiB at most)"
        yield Line("fault", found, "end the processes that `nvidia-smi` lists, or take another node")
    if split := [gpu for gpu in gpus if gpu.mig]:
        yield Line("fault", f"GPUs {_named(split)} are in MIG mode", "have an administrator switch it off")
    if closed := [gpu for gpu in gpus if gpu.compute_mode.lower() != "default"]:
        found = f"GPUs {_named(closed)} are in compute mode {closed[0].compute_mode}"
        yield Line("fault", found, "trainer and engine share a GPU: set compute mode Default (nvidia-smi -c 0)")


def judge_ecc(gpus: Sequence[Gpu]) -> list[Line]:
    """Whether memory errors are corrected, and none was beyond correction."""
    lines = []
    for what, broken in (
        ("uncorrected memory errors since the driver was loaded", [gpu for gpu in gpus if gpu.uncorrected]),
        ("a row of memory waiting to be remapped", [gpu for gpu in gpus if gpu.remap_pending]),
        ("a row of memory that could not be remapped", [gpu for gpu in gpus if gpu.remap_failed]),
    ):
        if broken:
            remedy = "leave the node out and reset the GPU; if it comes back, have the GPU replaced"
            lines.append(Line("fault", f"GPUs {_named(broken)}: {what}", remedy))
    if off := [gpu for gpu in gpus if gpu.ecc is False]:
        lines.append(Line("warning", f"GPUs {_named(off)}: ECC is off", "switch it on: nvidia-smi -e 1, reboot"))
    if not lines and any(gpu.ecc is None for gpu in gpus):
        return [Line("warning", "the GPUs do not report ECC", "nothing, where their kind has none")]
    return lines or [Line("ok", "on, no errors")]


def judge_links(
    links: Mapping[int, Sequence[float | None]], names: Mapping[int, str], hardware: HardwareConfig
) -> list[Line]:
    """Whether all NVLinks are up, equally many on every GPU.

    Args:
        links: from read_links.
        names: of the GPUs by index. A missing link is a fault of an SXM module of the kind alone: cards (PCIe, NVL)
            and GPUs made for some markets have other numbers of links, and bridges that are not there are no fault.
        hardware: what the node is taken for.
    """
    if hardware.gpus_per_node == 1:
        return [Line("not applicable", "one GPU a node")]
    if not links:
        return [Line("warning", "NVML lists no GPU", "see whether `nvidia-smi nvlink --status` works")]
    wanted = RATES[hardware.kind].nvlinks
    up = {gpu: sum(rate is not None for rate in rates) for gpu, rates in links.items()}
    wrong = [gpu for gpu in links if up[gpu] < wanted] or [gpu for gpu, rates in links.items() if None in rates]
    if wrong:
        gpu, name = wrong[0], names.get(wrong[0], "of unknown name")
        found = f"GPUs {', '.join(map(str, wrong))}: {up[gpu]} of {wanted} links of GPU {gpu} ({name}) are up"
        if _SXM[hardware.kind].search(name):
            remedy = "leave the node out; see that nvidia-fabricmanager runs, with the driver's version"
            return [Line("fault", found, remedy)]
        remedy = f"nothing, if it has no more; {wanted} are those of an SXM module, hardware.kind={hardware.kind}"
        return [Line("warning", found, remedy)]
    rate = sum(rate for rate in links[min(links)] if rate is not None)
    together = f", {rate:.0f} GB/s together in one direction" if rate else ""
    return [Line("ok", f"{wanted} links per GPU{together}")]


def _named(gpus: Sequence[Gpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)

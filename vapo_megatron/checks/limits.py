"""The checks of what the system allows the processes of a run: open files, sizes of files, shared
memory."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from vapo_megatron.errors import BadInput

SHARED_MEMORY = Path("/dev/shm")
MIB = 1 << 20
_FEWEST_FILES = 256  # sockets, pipes and files of a small run
# Semaphores and locks of ranks, verifiers and an engine are files of a page there.
_SHARED_FILES = 64
_SHARED_BYTES = 4 * MIB
# Two queues of 6 messages of 4 MiB between the ranks of an engine
# (sglang/srt/distributed/parallel_state.py).
_QUEUE_BYTES = 48 * MIB


def check_open_files() -> None:
    """Raises BadInput where the system allows this process fewer open files than a run needs."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < _FEWEST_FILES:  # -1: any number
        raise BadInput(
            f"the system allows {hard} open files (ulimit -Hn), expected {_FEWEST_FILES} or more: "
            "raise the limit (/etc/security/limits.conf, or LimitNOFILE of slurmd)"
        )


def check_file_size(needed: Mapping[str, int]) -> None:
    """Raises BadInput where the system lets no file grow as large as one of these, in bytes by
    name."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    name = max(needed, key=needed.__getitem__)
    if 0 <= allowed < needed[name]:  # -1: any size
        raise BadInput(
            f"the system lets files grow to {allowed / MIB:.1f} MiB (ulimit -f), expected "
            f"{needed[name] / MIB:.1f} MiB or more for {name}: start from a shell with "
            "`ulimit -f unlimited`"
        )


def check_shared_memory(engines: int, tp: int) -> None:
    """Raises BadInput where /dev/shm has too little room or too few free files (inodes) for the
    ranks of a run and these engines of tp ranks each."""
    needed = _SHARED_BYTES
    if tp > 1:
        needed += engines * _QUEUE_BYTES
    files = _SHARED_FILES * (1 + engines)
    remedy = "make room there, or mount a larger one (docker: --shm-size)"
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        raise BadInput(
            f"{SHARED_MEMORY}: {error.strerror}, and a run shares memory there: {remedy}"
        ) from None
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        raise BadInput(
            f"{SHARED_MEMORY} cannot be written, and ranks and engines share memory there: mount "
            "it writable (mode 1777)"
        )
    free = state.f_bavail * state.f_frsize
    if state.f_blocks and free < needed:  # no blocks: any number
        raise BadInput(
            f"{SHARED_MEMORY} has {free / MIB:.1f} MiB free, the run needs at least "
            f"{needed / MIB:.0f} MiB: {remedy}"
        )
    if state.f_files and state.f_favail < files:
        raise BadInput(
            f"{SHARED_MEMORY} has room for {state.f_favail} more files (df -i), the run needs at "
            f"least {files}: remove leftover files there, or mount it with a larger nr_inodes"
        )

"""Whether the system killed a process for want of memory, and how much it held.

The kernel says neither to anybody: it counts kills for each control group (memory.events), and a process' own peak
(VmHWM) is gone with it. So whoever starts processes looks at both while they live.
"""

from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


class MemoryKills:
    """Looks at processes of this control group, which includes those that this process starts."""

    def __init__(self, groups: Path = _GROUPS) -> None:
        self._events = _events_files(groups)
        self._before = self._count()
        self._peaks: dict[int, int] = {}

    def look(self, pids: list[int]) -> None:
        """Remember the most that each process has held so far."""
        for pid in pids:
            peak = _peak(pid)
            if peak is not None:
                self._peaks[pid] = peak

    def explain(self, pid: int) -> str | None:
        """In words, of a process that was killed by SIGKILL: that it was for memory, and its peak; None where the
        system counted no such kill since this object was made."""
        if self._count() <= self._before:
            return None
        peak = self._peaks.get(pid)
        held = "" if peak is None else f", it held {peak / 2**30:.2f} GiB"
        return f"the system killed a process of this job for want of memory{held}"

    def _count(self) -> int:
        return sum(_oom_kills(path) for path in self._events)


def _events_files(groups: Path) -> list[Path]:
    """memory.events of this process' control group (version 2), or memory.oom_control (version 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            candidates = [groups / name.lstrip("/") / "memory.events", groups / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates = [groups / "memory" / name.lstrip("/") / "memory.oom_control"]
            candidates.append(groups / "memory" / "memory.oom_control")
        else:
            continue
        files += [path for path in candidates if path.is_file()][:1]
    return files


def _oom_kills(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[:1] == ["oom_kill"])


def _peak(pid: int) -> int | None:
    """The most bytes that a process had in memory (VmHWM); None where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")]
    return sizes[0] if sizes else None

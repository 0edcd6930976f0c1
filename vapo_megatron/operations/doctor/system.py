"""Limits, name and disk of a node."""

import os
import resource
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.config.run_directory import existing
from vapo_megatron.operations.doctor.report import Line

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Port:
    """One port: its adapter and number, the state's word ("ACTIVE"), the rate in Gb/s and the layer below."""

    name: str
    state: str
    rate: float
    layer: str


def read_ports(root: Path = SYSFS) -> list[Port]:
    """All ports of all adapters; none where the kernel has no such adapter. A port that cannot be read is "unknown"."""
    ports = []
    for folder in sorted(root.glob("*/ports/*")):
        state = _word(folder / "state").rpartition(":")[2].strip() or "unknown"
        rate = _word(folder / "rate").split()
        number = float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else 0.0
        ports.append(
            Port(f"{folder.parts[-3]}:{folder.name}", state, number, _word(folder / "link_layer") or "unknown")
        )
    return ports


def judge_ports(ports: Sequence[Port], nodes: int) -> list[Line]:
    """Whether the adapters are up, and as fast as each other."""
    if nodes == 1:
        return [Line("not applicable", f"one node; {len(ports)} ports")]
    if not ports:
        remedy = "load its driver; NCCL otherwise goes over TCP, which is many times slower"
        return [Line("warning", "the kernel shows no InfiniBand or RoCE adapter", remedy)]
    up = [port for port in ports if port.state == "ACTIVE"]
    down = [port for port in ports if port.state != "ACTIVE"]
    if not up:
        return [Line("fault", f"none of {len(ports)} ports is active", "leave the node out; see ibstat")]
    lines = []
    fastest = max(port.rate for port in up)
    slow = [port for port in up if port.rate < fastest and port.layer == "InfiniBand"]
    if slow:
        named = ", ".join(f"{port.name} ({port.rate:g} Gb/s)" for port in slow)
        remedy = "see that it trained at full width (ibstat, cable); a storage adapter belongs out of NCCL_IB_HCA"
        lines.append(Line("warning", f"slower than {fastest:g} Gb/s: {named}", remedy))
    if down:
        # Ports that nothing is plugged into are usual: other nodes tell whether this one is worse.
        named = ", ".join(f"{port.name} {port.state}" for port in down)
        lines.append(Line("warning", f"not active: {named}", "plug it in, or leave it out of NCCL_IB_HCA"))
    return lines or [Line("ok", f"{len(up)} ports active at {fastest:g} Gb/s")]


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_GIB, _MIB = 2**30, 2**20
_FILES = 65536
# Buffers that NCCL and the engines register with the adapters are partly in host memory.
_LOCKED = 4 * _GIB
_WRITE_BYTES, _PIECE = 512 * _MIB, 8 * _MIB
# Below this a checkpoint of hundreds of gigabytes takes longer than a job is warned of its end.
_LEAST_WRITE = 200e6


def judge_limits(files: int, locked: int, shared: int, gpus: bool, nodes: int, rdma: bool) -> list[Line]:
    """ulimit -Hn, ulimit -l and the size of /dev/shm, in files and bytes; resource.RLIM_INFINITY where unlimited.

    rdma: whether a network adapter is active that needs locked memory.
    """
    lines = []
    if files != resource.RLIM_INFINITY and files < _FILES:
        remedy = f"raise it to {_FILES} (ulimit -Hn; LimitNOFILE of slurmd)"
        lines.append(Line("fault" if files < 1024 else "warning", f"open files: {files}", remedy))
    if gpus and nodes > 1 and locked != resource.RLIM_INFINITY:
        remedy = "set it to unlimited (LimitMEMLOCK=infinity of slurmd): RDMA needs locked memory"
        too_little = rdma and locked < _LOCKED
        lines.append(Line("fault" if too_little else "warning", f"locked memory: {locked // 1024} KiB", remedy))
    if shared < 1 * _GIB:
        remedy = "give the container more (--ipc=host, --shm-size): NCCL and PyTorch put buffers there"
        lines.append(Line("fault" if gpus else "warning", f"/dev/shm: {shared / _GIB:.2f} GiB", remedy))
    said = f"open files {_limit(files)}, locked memory {_limit(locked)}, /dev/shm {shared / _GIB:.1f} GiB"
    return lines or [Line("ok", said)]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_limits(gpus: bool, nodes: int) -> list[Line]:
    """judge_limits of this process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # to which a run raises its own
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    rdma = any(port.state == "ACTIVE" for port in read_ports())
    return judge_limits(files, locked, shared, gpus, nodes, rdma)


def check_hostname(nodes: int) -> list[Line]:
    """Whether the node's name leads to an address that other nodes reach it by."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        found = f"{name} has no address ({error.strerror or error})"
        return [Line("fault" if nodes > 1 else "warning", found, "add it to DNS or /etc/hosts")]
    if nodes > 1 and all(address.startswith("127.") or address == "::1" for address in addresses):
        remedy = "remove it from the 127.x line of /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return [Line("warning", f"{name} leads to {', '.join(addresses)} alone", remedy)]
    return [Line("ok", f"{name}: {', '.join(addresses)}")]


def check_disk(root: Path, needed: int, write: bool) -> list[Line]:
    """Room and write speed of the disk that the run directory is on; a file is written, forced out and deleted.

    needed: bytes of a checkpoint. write: False leaves the speed out.
    """
    folder = existing(root.absolute())
    free = shutil.disk_usage(folder).free
    if free < needed:
        found = f"{folder}: {free / _GIB:.1f} GiB free, a checkpoint takes {needed / _GIB:.1f} GiB"
        return [Line("fault", found, "make room, or set run.root to another disk")]
    room = f"{folder}: {free / _GIB:.0f} GiB free, a checkpoint takes {needed / _GIB:.1f} GiB"
    if free < 3 * needed:
        return [Line("warning", room, "make room for three: the last one stays while the next is written")]
    if not write:
        return [Line("ok", room)]
    try:
        rate = write_rate(folder)
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror or error})"
        return [Line("fault", found, "choose a run.root that this user may write")]
    seconds = needed / rate
    said = f"{room}, written at {rate / 1e6:.0f} MB/s ({seconds:.0f} s)"
    if rate < _LEAST_WRITE and seconds > 120:
        return [Line("warning", said, "put run.root on a faster file system, or save less often")]
    return [Line("ok", said)]


def write_rate(folder: Path, size: int = _WRITE_BYTES) -> float:
    """Bytes a second of writing a new file of random bytes and forcing it out; the file is deleted."""
    path = folder / f".doctor.{socket.gethostname()}.{secrets.token_hex(4)}"
    piece = secrets.token_bytes(_PIECE)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(0, size, _PIECE):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return size / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)

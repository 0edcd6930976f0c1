"""Network adapters, limits, name and disk of a node."""

import ctypes
import os
import resource
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.config.run_directory import existing
from vapo_megatron.operations.doctor.report import Line

SYSFS = Path("/sys/class/infiniband")
_GIB = 2**30
_FILES = 65536
# Buffers that NCCL and the engines register with the adapters are partly in host memory.
_LOCKED = 4 * _GIB


@dataclass(frozen=True)
class Port:
    """One port: its adapter and number (mlx5_0:1), the state's word ("ACTIVE"), the rate in Gb/s."""

    name: str
    state: str
    rate: float


def read_ports(root: Path = SYSFS) -> list[Port]:
    """All ports of all adapters that the kernel knows. A port that cannot be read is "unknown"."""
    ports = []
    for folder in sorted(root.glob("*/ports/*")):
        state = _word(folder / "state").rpartition(":")[2].strip() or "unknown"
        rate = _word(folder / "rate").split()
        number = float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else 0.0
        ports.append(Port(f"{folder.parts[-3]}:{folder.name}", state, number))
    return ports


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def usable_adapters(library: str = "libibverbs.so.1") -> list[str]:
    """Adapters that this process can open, as `ibv_devices` and NCCL count them: those whose provider is installed."""
    try:
        verbs = ctypes.CDLL(library)
    except OSError:
        return []
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    verbs.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    count = ctypes.c_int(0)
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return []
    names = [verbs.ibv_get_device_name(devices[index]).decode() for index in range(count.value)]
    verbs.ibv_free_device_list(devices)
    return names


def chosen_by_nccl(ports: Sequence[Port], adapters: Sequence[str], environment: Mapping[str, str]) -> list[Port]:
    """Ports that NCCL would take: active, of an adapter that it can open, and as NCCL_IB_HCA asks. None: it goes by
    TCP."""
    if environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET", "").lower() == "socket":
        return []
    wanted = environment.get("NCCL_IB_HCA", "")
    leaves_out, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = [name for name in wanted.lstrip("^=").split(",") if name]

    def matches(port: Port) -> bool:
        adapter = port.name.partition(":")[0]
        return any(
            port.name == name if ":" in name else adapter == name or (not exact and adapter.startswith(name))
            for name in names
        )

    return [
        port
        for port in ports
        if port.state == "ACTIVE"
        and port.name.partition(":")[0] in adapters
        and (not names or matches(port) != leaves_out)
    ]


def judge_network(
    ports: Sequence[Port], adapters: Sequence[str], environment: Mapping[str, str], nodes: int
) -> list[Line]:
    """Whether NCCL can use the adapters that the kernel shows, and whether these are up and equally fast."""
    if nodes == 1:
        return [Line("not applicable", f"one node; {len(ports)} ports")]
    if not ports:
        remedy = "load its driver; NCCL otherwise goes over TCP, which is many times slower"
        return [Line("warning", "the kernel shows no InfiniBand or RoCE adapter", remedy)]
    active = [port for port in ports if port.state == "ACTIVE"]
    if not active:
        return [Line("fault", f"none of {len(ports)} ports is active", "leave the node out; see ibstat")]
    if not adapters:
        found = f"the kernel shows {len(active)} active ports, libibverbs opens none: NCCL would go over TCP"
        remedy = "apt-get install ibverbs-providers; in a container /dev/infiniband too (MELLANOX_VISIBLE_DEVICES=all)"
        return [Line("fault", found, remedy)]
    chosen = chosen_by_nccl(ports, adapters, environment)
    if not chosen:
        settings = " ".join(f"{name}={value}" for name, value in environment.items() if name.startswith("NCCL_"))
        found = f"NCCL would take none of {len(active)} active ports and go over TCP ({settings or 'no provider'})"
        return [Line("fault", found, "see NCCL_IB_HCA, NCCL_IB_DISABLE, NCCL_NET and `ibv_devices`")]
    lines, fastest = [], max(port.rate for port in chosen)
    if slow := [port for port in chosen if port.rate < fastest]:
        named = ", ".join(f"{port.name} ({port.rate:g} Gb/s)" for port in slow)
        remedy = "see that it trained at full width (ibstat, cable); a storage adapter belongs out of NCCL_IB_HCA"
        lines.append(Line("warning", f"slower than {fastest:g} Gb/s, and NCCL would take it: {named}", remedy))
    if down := [port for port in ports if port.state != "ACTIVE"]:
        # Ports that nothing is plugged into are usual: other nodes tell whether this one is worse.
        named = ", ".join(f"{port.name} {port.state}" for port in down)
        lines.append(Line("warning", f"not active: {named}", "plug it in, or leave it out of NCCL_IB_HCA"))
    return lines or [Line("ok", f"NCCL would take {len(chosen)} ports at {fastest:g} Gb/s")]


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
    return lines or [Line("ok", f"open files, locked memory and /dev/shm ({shared / _GIB:.0f} GiB) suffice")]


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


def check_disk(root: Path, needed: int) -> list[Line]:
    """Room on the disk that the run directory is on, and whether it can be written. needed: bytes of a checkpoint."""
    folder = existing(root.absolute())
    free = shutil.disk_usage(folder).free
    room = f"{folder}: {free / _GIB:.1f} GiB free, a checkpoint takes {needed / _GIB:.1f} GiB"
    if free < needed:
        return [Line("fault", room, "make room, or set run.root to another disk")]
    path = folder / f".doctor.{socket.gethostname()}.{secrets.token_hex(4)}"
    try:
        path.write_bytes(b"written")
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror or error})"
        return [Line("fault", found, "choose a run.root that this user may write")]
    finally:
        path.unlink(missing_ok=True)
    if free < 3 * needed:
        return [Line("warning", room, "make room for three: the last one stays while the next is written")]
    return [Line("ok", room)]

"""What one node shows by itself: GPUs, what kernels are compiled with, versions, network, limits, name and disk.

GPUs are asked through `nvidia-smi` and, where it is installed, `dcgmi`, their maker's own diagnosis; what links between
them are worth is measured (allreduce.py).
"""

import os
import platform as python_platform
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from packaging.specifiers import SpecifierSet

from vapo_megatron.config.plan import HardwareConfig
from vapo_megatron.config.run_directory import existing
from vapo_megatron.monitoring.facts import installed_version
from vapo_megatron.operations.doctor.nodes import Line, Status
from vapo_megatron.operations.hardware import GIB, Hardware

_SECONDS = 60.0
_DIAGNOSIS_SECONDS = 280.0
_IDLE_MIB = 1500  # that an idle GPU may show as used
_REPLACE = "leave the node out and reset the GPU; if it comes back, have the GPU replaced"
# What `nvidia-smi -q -x` says of a GPU that is unfit: path, words that say so, severity, what it means, what to do.
_SYMPTOMS: tuple[tuple[str, str, Status, str, str], ...] = (
    ("mig_mode/current_mig", "Enabled", "fault", "in MIG mode", "have an administrator switch it off"),
    (
        "compute_mode",
        "Exclusive_Process|Prohibited",
        "fault",
        "in an exclusive compute mode",
        "trainer and engine share a GPU: set compute mode Default (nvidia-smi -c 0)",
    ),
    (
        "ecc_errors/volatile/dram_uncorrectable",
        r"[1-9]\d*",
        "fault",
        "uncorrected memory errors since the driver came",
        _REPLACE,
    ),
    (
        "ecc_errors/volatile/sram_uncorrectable",
        r"[1-9]\d*",
        "fault",
        "uncorrected errors of caches since the driver came",
        _REPLACE,
    ),
    ("remapped_rows/remapped_row_pending", "Yes", "fault", "a row of memory waiting to be remapped", _REPLACE),
    ("remapped_rows/remapped_row_failure", "Yes", "fault", "a row of memory that could not be remapped", _REPLACE),
    ("ecc_mode/current_ecc", "Disabled", "warning", "ECC is off", "switch it on: nvidia-smi -e 1, reboot"),
)


SYSFS = Path("/sys/class/infiniband")
_FILES = 65536
# Buffers that NCCL and the engines register with the adapters are partly in host memory.
_LOCKED = 4 * GIB


class Unreadable(Exception):
    """A tool is not there, failed, or said something unknown; the message names it."""


def read_gpus() -> ElementTree.Element:
    """The log of `nvidia-smi -q -x`: its driver_version, and a `gpu` for each. Raises Unreadable where that fails."""
    command = ("nvidia-smi", "-q", "-x")
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
            raise Unreadable(f"`{' '.join(command)}` failed: {lines[-1]}")
        return ElementTree.fromstring(done.stdout)
    except OSError as error:
        raise Unreadable(f"nvidia-smi, part of the driver, cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise Unreadable(f"`{' '.join(command)}` says nothing for {_SECONDS:g} s") from None
    except ElementTree.ParseError as error:
        raise Unreadable(f"nvidia-smi -q -x says what is not understood: {error}") from None


def judge_gpus(log: ElementTree.Element, hardware: HardwareConfig, usable: int) -> list[Line]:
    """Whether as many GPUs are there as the config says, alike, free, sound and of the kind.

    usable: those that PyTorch sees.
    """
    gpus = [gpu for gpu in log.findall("gpu") if gpu.findtext("product_name") not in (None, "GPU is lost")]
    lines = [*_unlike(gpus, hardware), *_unsound(gpus)]
    if usable < len(gpus):
        remedy = "see CUDA_VISIBLE_DEVICES, --gpus-per-task, and that PyTorch is a CUDA build the driver can serve"
        lines.append(Line("fault", f"PyTorch can use {usable} of {len(gpus)} GPUs", remedy))
    name, driver = (gpus[0].findtext("product_name") if gpus else ""), log.findtext("driver_version")
    return lines or [Line("ok", f"{len(gpus)} x {name}, driver {driver}, free and without errors")]


def _mib(gpu: ElementTree.Element, name: str) -> float:
    number = gpu.findtext(f"fb_memory_usage/{name}", "").partition(" ")[0]
    return float(number) if number.isdigit() else 0.0


def _unlike(gpus: Sequence[ElementTree.Element], hardware: HardwareConfig) -> Iterator[Line]:
    if len(gpus) != hardware.gpus_per_node:
        finding = f"{len(gpus)} GPUs answer, hardware.gpus_per_node={hardware.gpus_per_node}"
        remedy = "drain the node: a GPU has fallen off the bus (dmesg, Xid 79), or set hardware.gpus_per_node"
        yield Line("fault", finding, remedy)
    kinds = Counter((gpu.findtext("product_name"), _mib(gpu, "total")) for gpu in gpus)
    if len(kinds) > 1:
        named = "; ".join(f"{count} x {name} ({memory:.0f} MiB)" for (name, memory), count in kinds.items())
        yield Line("fault", f"GPUs differ: {named}", "take nodes of one kind: the slowest sets the pace")
    stated = Hardware(hardware).device_memory / 2**20
    if small := [_mib(gpu, "total") for gpu in gpus if _mib(gpu, "total") < 0.97 * stated]:
        finding = f"{len(small)} GPUs have {small[0]:.0f} MiB, a {hardware.kind} has {stated:.0f}"
        yield Line("warning", finding, "set hardware.kind, and see what `vapo-megatron plan` then says")


def _unsound(gpus: Sequence[ElementTree.Element]) -> Iterator[Line]:
    if used := [str(number) for number, gpu in enumerate(gpus) if _mib(gpu, "used") > _IDLE_MIB]:
        remedy = "end the processes that `nvidia-smi` lists, or take another node"
        yield Line("fault", f"GPUs {', '.join(used)}: in use", remedy)
    for path, words, status, finding, remedy in _SYMPTOMS:
        sick = [str(number) for number, gpu in enumerate(gpus) if re.fullmatch(words, gpu.findtext(path, ""))]
        if sick:
            yield Line(status, f"GPUs {', '.join(sick)}: {finding}", remedy)


def diagnose() -> list[Line]:
    """`dcgmi diag -r 2`, the maker's test of memory, bus and clocks, where it is installed."""
    if shutil.which("dcgmi") is None:
        return [Line("skipped", "no dcgmi", "install datacenter-gpu-manager to have memory, bus and clocks tested")]
    done = subprocess.run(["dcgmi", "diag", "-r", "2"], capture_output=True, text=True, timeout=_DIAGNOSIS_SECONDS)
    if done.returncode == 0:
        return [Line("ok", "dcgmi diag -r 2 passes")]
    messages = [
        line.strip(" |") for line in (done.stdout + done.stderr).splitlines() if re.search("fail|error", line, re.I)
    ]
    finding = f"dcgmi diag -r 2 ends with {done.returncode}: {'; '.join(messages[:3]) or 'no word'}"
    return [Line("fault", finding[:300], "leave the node out; `dcgmi diag -r 3` says more")]


# Modules with compiled code for GPUs, and what goes wrong without.
_COMPILED = {
    "sgl_kernel": "engines do not start",
    "torch_memory_saver": "engines cannot give their memory to the trainer (rollout.memory_saver)",
    "transformer_engine.pytorch": "megatron.core cannot be imported either: build it again, or pip uninstall "
    "transformer-engine transformer-engine-torch",
}


def check_toolkit(cuda: str | None, environment: Mapping[str, str] = os.environ) -> list[Line]:
    """What engines (nvcc, g++, ninja) and Triton (g++, Python's headers) compile kernels with, and whether modules that
    came compiled load. cuda: what PyTorch was built for, such as 13.0."""
    path, home = environment.get("PATH", os.defpath), environment.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=path + (f"{os.pathsep}{home}/bin" if home else ""))
    lines, version = [], None if nvcc is None else _nvcc_version(nvcc)
    if nvcc is None:
        remedy = f"install the CUDA toolkit{f' {cuda}' if cuda else ''} and put its bin on PATH"
        lines.append(Line("fault", "no nvcc: engines compile kernels when they start", remedy))
    elif cuda is not None and version != cuda:
        bad = version is None or version.partition(".")[0] != cuda.partition(".")[0]
        remedy = f"put the bin of a CUDA {cuda} toolkit first on PATH and set CUDA_HOME to it"
        lines.append(
            Line("fault" if bad else "warning", f"{nvcc} is {version or 'broken'}, PyTorch's CUDA {cuda}", remedy)
        )
    for tool, install in (("g++", "apt-get install g++"), ("ninja", "pip install ninja")):
        if shutil.which(tool, path=path) is None:
            lines.append(Line("fault", f"no {tool}: engines compile kernels with it", install))
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        lines.append(Line("fault", "no Python.h: Triton compiles with it", f"apt-get install {python}"))
    for module, without in _COMPILED.items():
        # The check of versions says which are not installed.
        if find_spec(module.partition(".")[0]) is not None and (error := _import_error(module, environment)):
            remedy = "install it for this PyTorch and CUDA"
            lines.append(Line("fault", f"{module} does not load ({error}): {without}", remedy))
    cache = environment.get("TRITON_CACHE_DIR")  # slurm/task.sh has all of them side by side
    compiled = sum(1 for path in Path(cache).parent.rglob("*") if path.is_file()) if cache else 0
    kept = f"{compiled} files of kernels in {Path(cache).parent}" if cache else "caches of kernels are the tools' own"
    return lines or [Line("ok", f"nvcc {version}, g++, ninja, headers; kernels load; {kept}")]


def _import_error(module: str, environment: Mapping[str, str]) -> str:
    """Why a module cannot be imported, in a process of its own; empty where it can."""
    command = [sys.executable, "-c", f"import torch, {module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, env=dict(environment)
        )
    except subprocess.TimeoutExpired:
        return f"not within {_SECONDS:g} s"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return "" if done.returncode == 0 else last[:200]


def _nvcc_version(nvcc: str) -> str | None:
    """Such as 13.0; None where it does not say."""
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", output)
    return release[1] if release else None


@dataclass(frozen=True)
class Supported:
    """A package and its supported versions.

    Attributes:
        package: as pip names it.
        versions: those that were tried, or that the packages beside it ask for.
        gpu_only: whether it is wanted on GPUs alone.
        optional: what is lost without it; empty where nothing works without.
    """

    package: str
    versions: str
    gpu_only: bool = False
    optional: str = ""


PYTHON = ">=3.11,<3.13"
MATRIX = (
    Supported("torch", ">=2.11,<2.15"),
    Supported("megatron-core", ">=0.16.1,<0.20"),
    Supported("sglang", "==0.5.23"),
    Supported("transformers", ">=5.0,<6"),
    Supported("math-verify", "==0.9.0"),
    Supported("transformer-engine", ">=2.9,<2.12", gpu_only=True, optional="layers are PyTorch's, and there is no FP8"),
    Supported("torch_memory_saver", ">=0.0.9", gpu_only=True),
    Supported("flash-attn", ">=2.7,<3", gpu_only=True, optional="attention is cuDNN's or PyTorch's"),
)


def check_versions(gpus: bool) -> list[Line]:
    """One line for everything that is wrong, or one that all is well. gpus: whether this machine has GPUs."""
    lines, good = [], []
    python = python_platform.python_version()
    if not SpecifierSet(PYTHON).contains(python):
        lines.append(Line("fault", f"Python {python}", f"use Python {PYTHON}"))
    for row in MATRIX:
        if row.gpu_only and not gpus:
            continue
        version, remedy = installed_version(row.package), f"pip install '{row.package}{row.versions}'"
        if version is None and row.optional:
            lines.append(Line("warning", f"{row.package} is not installed: {row.optional}", remedy))
        elif version is None:
            lines.append(Line("fault", f"{row.package} is not installed", remedy))
        elif not SpecifierSet(row.versions).contains(version, prereleases=True):
            # Other versions may work: what was never tried is no fault.
            lines.append(Line("warning", f"{row.package} {version}, tried were {row.versions}", remedy))
        else:
            good.append(f"{row.package} {version}")
    return lines or [Line("ok", f"Python {python}, " + ", ".join(good))]


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


def usable_adapters() -> list[str] | None:
    """Adapters that `ibv_devices`, as NCCL, can open: those whose provider is installed; None without the tool."""
    try:
        done = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return re.findall(r"^\s+(\S+)\s+[0-9a-f]{16}\s*$", done.stdout, re.MULTILINE)


def judge_network(ports: Sequence[Port], adapters: Sequence[str] | None, nodes: int) -> list[Line]:
    """Whether the adapters that the kernel shows are up, equally fast, and open to this process."""
    if nodes == 1:
        return [Line("not applicable", f"one node; {len(ports)} ports")]
    if not ports:
        remedy = "load its driver; NCCL otherwise goes over TCP, which is many times slower"
        return [Line("warning", "the kernel shows no InfiniBand or RoCE adapter", remedy)]
    active = [port for port in ports if port.state == "ACTIVE"]
    if not active:
        return [Line("fault", f"none of {len(ports)} ports is active", "leave the node out; see ibstat")]
    if adapters is not None and not adapters:
        finding = f"the kernel shows {len(active)} active ports, libibverbs opens none: NCCL would go over TCP"
        remedy = "apt-get install ibverbs-providers; in a container /dev/infiniband too (MELLANOX_VISIBLE_DEVICES=all)"
        return [Line("fault", finding, remedy)]
    lines, fastest = [], max(port.rate for port in active)
    if slow := [f"{port.name} ({port.rate:g} Gb/s)" for port in active if port.rate < fastest]:
        remedy = "see that it trained at full width (ibstat, cable); a storage adapter belongs out of NCCL_IB_HCA"
        lines.append(Line("warning", f"slower than {fastest:g} Gb/s: {', '.join(slow)}", remedy))
    if down := [f"{port.name} {port.state}" for port in ports if port.state != "ACTIVE"]:
        # Ports that nothing is plugged into are usual: other nodes tell whether this one is worse.
        lines.append(Line("warning", f"not active: {', '.join(down)}", "plug it in, or leave it out of NCCL_IB_HCA"))
    if adapters is None:
        remedy = "apt-get install ibverbs-utils; the all-reduce over nodes says which network NCCL takes"
        lines.append(Line("warning", "no ibv_devices: whether NCCL can open the adapters is not known", remedy))
    return lines or [Line("ok", f"{len(active)} ports at {fastest:g} Gb/s, {len(adapters or ())} adapters open")]


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
    if shared < 1 * GIB:
        remedy = "give the container more (--ipc=host, --shm-size): NCCL and PyTorch put buffers there"
        lines.append(Line("fault" if gpus else "warning", f"/dev/shm: {shared / GIB:.2f} GiB", remedy))
    return lines or [Line("ok", f"open files, locked memory and /dev/shm ({shared / GIB:.0f} GiB) suffice")]


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
        finding = f"{name} has no address ({error.strerror or error})"
        return [Line("fault" if nodes > 1 else "warning", finding, "add it to DNS or /etc/hosts")]
    if nodes > 1 and all(address.startswith("127.") or address == "::1" for address in addresses):
        remedy = "remove it from the 127.x line of /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return [Line("warning", f"{name} leads to {', '.join(addresses)} alone", remedy)]
    return [Line("ok", f"{name}: {', '.join(addresses)}")]


def check_disk(root: Path, needed: int) -> list[Line]:
    """Room on the disk that the run directory is on, and whether it can be written. needed: bytes of a checkpoint."""
    folder = existing(root.absolute())
    free = shutil.disk_usage(folder).free
    room = f"{folder}: {free / GIB:.1f} GiB free, a checkpoint takes {needed / GIB:.1f} GiB"
    if free < needed:
        return [Line("fault", room, "make room, or set run.root to another disk")]
    path = folder / f".doctor.{socket.gethostname()}.{secrets.token_hex(4)}"
    try:
        path.write_bytes(b"written")
    except OSError as error:
        finding = f"{folder} cannot be written ({error.strerror or error})"
        return [Line("fault", finding, "choose a run.root that this user may write")]
    finally:
        path.unlink(missing_ok=True)
    if free < 3 * needed:
        return [Line("warning", room, "make room for three: the last one stays while the next is written")]
    return [Line("ok", room)]

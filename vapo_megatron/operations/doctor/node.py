"""Checks of one node by itself: GPUs, versions and network adapters.

GPUs are read through `nvidia-smi`. The links between them are measured (allreduce.py).
"""

import platform as python_platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from packaging.specifiers import SpecifierSet

from vapo_megatron.config.plan import HardwareConfig
from vapo_megatron.monitoring.facts import installed_version
from vapo_megatron.operations.doctor.nodes import Line, Status, lines_of

_SECONDS = 60.0
_SYSFS = Path("/sys/class/infiniband")
_REPLACE = "leave the node out and reset the GPU; if it comes back, have the GPU replaced"
# Signs of an unfit GPU in `nvidia-smi -q -x`: path, pattern, severity, meaning, remedy.
_SYMPTOMS: tuple[tuple[str, str, Status, str, str], ...] = (
    (
        "fb_memory_usage/used",
        r"([2-9]\d{3}|\d{5,}) MiB",
        "fault",
        "in use",
        "end what `nvidia-smi` lists",
    ),
    (
        "mig_mode/current_mig",
        "Enabled",
        "fault",
        "in MIG mode",
        "have an administrator switch it off",
    ),
    (
        "compute_mode",
        "Exclusive_Process|Prohibited",
        "fault",
        "in an exclusive compute mode",
        "nvidia-smi -c 0",
    ),
    (
        "ecc_errors/volatile/dram_uncorrectable",
        r"[1-9]\d*",
        "fault",
        "uncorrected memory errors",
        _REPLACE,
    ),
    (
        "ecc_errors/volatile/sram_uncorrectable",
        r"[1-9]\d*",
        "fault",
        "uncorrected errors of caches",
        _REPLACE,
    ),
    # Newer drivers count these apart.
    (
        "ecc_errors/volatile/sram_uncorrectable_parity",
        r"[1-9]\d*",
        "fault",
        "uncorrected errors of caches (parity)",
        _REPLACE,
    ),
    (
        "ecc_errors/volatile/sram_uncorrectable_secded",
        r"[1-9]\d*",
        "fault",
        "uncorrected errors of caches (SEC-DED)",
        _REPLACE,
    ),
    (
        "remapped_rows/remapped_row_pending",
        "Yes",
        "fault",
        "a row of memory waiting to be remapped",
        _REPLACE,
    ),
    (
        "remapped_rows/remapped_row_failure",
        "Yes",
        "fault",
        "a row of memory that could not be remapped",
        _REPLACE,
    ),
    (
        "ecc_mode/current_ecc",
        "Disabled",
        "warning",
        "ECC is off",
        "switch it on: nvidia-smi -e 1, reboot",
    ),
)


class Unreadable(Exception):
    """A tool is missing, failed, or printed something unknown; the message names it."""


def read_gpus() -> ElementTree.Element:
    """The log of `nvidia-smi -q -x`: its driver_version, and a `gpu` for each. Raises Unreadable
    where that fails."""
    command = ["nvidia-smi", "-q", "-x"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True
        )
        return ElementTree.fromstring(done.stdout)
    except (OSError, subprocess.SubprocessError, ElementTree.ParseError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise Unreadable(f"`nvidia-smi -q -x`, part of the driver, failed: {words[-1]}") from None


def judge_gpus(log: ElementTree.Element, hardware: HardwareConfig, usable: int) -> list[Line]:
    """Whether the node has as many GPUs as configured, all alike, free and sound. usable: those
    that PyTorch sees."""
    gpus = {
        number: gpu
        for number, gpu in enumerate(log.findall("gpu"))
        if gpu.findtext("product_name") not in (None, "GPU is lost")
    }
    kinds = Counter(gpu.findtext("product_name", "") for gpu in gpus.values())
    named = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    sick = [
        [str(number) for number, gpu in gpus.items() if re.fullmatch(words, gpu.findtext(path, ""))]
        for path, words, *_ in _SYMPTOMS
    ]
    few = f"{len(gpus)} GPUs answer, hardware.gpus_per_node={hardware.gpus_per_node}"
    unseen = f"PyTorch can use {usable} of {len(gpus)} GPUs"
    drain = (
        "drain the node: a GPU has fallen off the bus (dmesg, Xid 79), or set "
        "hardware.gpus_per_node"
    )
    see = (
        "see CUDA_VISIBLE_DEVICES, --gpus-per-task, and that PyTorch is a CUDA build the driver "
        "can serve"
    )
    return lines_of(
        f"{named}, driver {log.findtext('driver_version')}, free and without errors",
        (len(gpus) != hardware.gpus_per_node, "fault", few, drain),
        (
            len(kinds) > 1,
            "fault",
            f"GPUs differ: {named}",
            "take nodes of one kind: the slowest sets the pace",
        ),
        (usable < len(gpus), "fault", unseen, see),
        *(
            (numbers, status, f"GPUs {', '.join(numbers)}: {finding}", remedy)
            for numbers, (_, _, status, finding, remedy) in zip(sick, _SYMPTOMS, strict=True)
        ),
    )


PYTHON = ">=3.11,<3.14"
# Package: the versions that were tried, or that packages beside it ask for.
VERSIONS = {
    "torch": ">=2.11,<2.15",
    "megatron-core": ">=0.16.1,<0.20",
    "sglang": "==0.5.23",
    "transformers": ">=5.0,<6",
    "math-verify": "==0.9.0",
    "transformer-engine": ">=2.9,<2.12",
    "torch_memory_saver": ">=0.0.9",
    "flash-attn": ">=2.7,<3",
}
# Consequences on a GPU of a missing optional package.
_LOST = {
    "transformer-engine": "layers are PyTorch's, and there is no FP8",
    "flash-attn": "attention is cuDNN's or PyTorch's",
}


def check_versions(gpus: bool) -> list[Line]:
    """A line for each problem, or one if there is none. gpus: whether this machine has GPUs."""
    python = python_platform.python_version()
    good = [f"Python {python}"]
    troubles = list[tuple[object, Status, str, str]]()
    troubles.append(
        (
            not SpecifierSet(PYTHON).contains(python),
            "fault",
            f"Python {python}",
            f"use Python {PYTHON}",
        )
    )
    for package, versions in VERSIONS.items():
        version = installed_version(package)
        remedy = f"pip install '{package}{versions}'"
        if not gpus and package in (*_LOST, "torch_memory_saver"):
            continue
        if version is None:
            lost = _LOST.get(package, "no run starts")
            severity: Status = "warning" if package in _LOST else "fault"
            troubles.append((True, severity, f"{package} is not installed: {lost}", remedy))
            continue
        is_tried = SpecifierSet(versions).contains(version, prereleases=True)
        # Other versions may work: one that was never tried is no fault.
        troubles.append(
            (not is_tried, "warning", f"{package} {version}, tried were {versions}", remedy)
        )
        good.append(f"{package} {version}")
    return lines_of(", ".join(good), *troubles)


def read_ports(root: Path = _SYSFS) -> dict[str, bool]:
    """Whether each port of an adapter that the kernel knows (mlx5_0:1) is active."""
    ports = {}
    for folder in sorted(root.glob("*/ports/*")):
        try:
            state = (folder / "state").read_text()
        except OSError:
            state = ""
        ports[f"{folder.parts[-3]}:{folder.name}"] = state.rpartition(":")[2].strip() == "ACTIVE"
    return ports


def usable_adapters() -> list[str] | None:
    """Adapters that `ibv_devices`, like NCCL, can open: those with an installed provider; None
    without the tool."""
    try:
        done = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return re.findall(r"^\s+(\S+)\s+[0-9a-f]{16}\s*$", done.stdout, re.MULTILINE)


def judge_network(ports: Mapping[str, bool], adapters: Sequence[str] | None) -> list[Line]:
    """Whether the adapters of InfiniBand or RoCE that the kernel shows are up, and open to this
    process."""
    if not ports:
        remedy = "load its driver; NCCL otherwise goes over TCP, which is many times slower"
        return [Line("warning", "the kernel shows no InfiniBand or RoCE adapter", remedy)]
    active = [name for name, is_active in ports.items() if is_active]
    closed = (
        f"the kernel shows {len(active)} active ports, libibverbs opens none: NCCL would go over "
        f"TCP"
    )
    provide = (
        "apt-get install ibverbs-providers; in a container /dev/infiniband too "
        "(MELLANOX_VISIBLE_DEVICES=all)"
    )
    unknown = "no ibv_devices: whether NCCL can open the adapters is not known"
    return lines_of(
        f"{len(active)} of {len(ports)} ports are active, {len(adapters or ())} adapters open",
        (
            not active,
            "fault",
            f"none of {len(ports)} ports is active",
            "leave the node out; see ibstat",
        ),
        (active and adapters == [], "fault", closed, provide),
        (active and adapters is None, "warning", unknown, "apt-get install ibverbs-utils"),
    )

"""Which versions belong together: the one table that says so."""

import platform as python_platform
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from vapo_megatron.monitoring.facts import installed_version
from vapo_megatron.operations.doctor.report import Line


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
# A driver serves the CUDA of the PyTorch build: the least major driver version by CUDA's major and minor version
# (NVIDIA, CUDA Toolkit release notes, table "CUDA Toolkit and Corresponding Driver Versions").
DRIVERS = {"12.4": 550, "12.6": 560, "12.8": 570, "12.9": 575, "13.0": 580}
# Any build of a major version runs on these, but for kernels that are left to the driver to compile ("minor version
# compatibility", the same notes). The package cuda-compat makes still older ones do on data center GPUs.
LEAST_DRIVERS = {"12": 525, "13": 580}
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


def check_versions(gpus: bool, driver: str | None, cuda: str | None, usable: bool = False) -> list[Line]:
    """One line for everything that is wrong, or one that all is well.

    Args:
        gpus: whether this machine has GPUs.
        driver: their driver's version.
        cuda: the CUDA version that PyTorch was built for.
        usable: whether PyTorch reaches the GPUs by that driver.
    """
    lines, good = [], []
    python = python_platform.python_version()
    if not SpecifierSet(PYTHON).contains(python):
        lines.append(Line("fault", f"Python {python}", f"use Python {PYTHON}"))
    for row in MATRIX:
        if row.gpu_only and not gpus:
            continue
        found, remedy = installed_version(row.package), f"pip install '{row.package}{row.versions}'"
        if found is None and row.optional:
            lines.append(Line("warning", f"{row.package} is not installed: {row.optional}", remedy))
        elif found is None:
            lines.append(Line("fault", f"{row.package} is not installed", remedy))
        elif not SpecifierSet(row.versions).contains(found, prereleases=True):
            # Other versions may work: what was never tried is no fault.
            lines.append(Line("warning", f"{row.package} {found}, tried were {row.versions}", remedy))
        else:
            good.append(f"{row.package} {found}")
    lines += _driver(driver, cuda, usable)
    return lines or [Line("ok", f"Python {python}, " + ", ".join(good))]


def _driver(driver: str | None, cuda: str | None, usable: bool) -> list[Line]:
    least = DRIVERS.get(cuda or "")
    if cuda is None or driver is None or least is None or (major := int(driver.partition(".")[0])) >= least:
        return []
    found = f"driver {driver} with a PyTorch for CUDA {cuda}"
    remedy = f"install driver {least} or newer, or a PyTorch for an older CUDA"
    if usable or major >= LEAST_DRIVERS[cuda.partition(".")[0]]:
        return [Line("warning", f"{found}: it serves it, but for kernels left to the driver", remedy)]
    return [Line("fault", found, remedy)]

"""What kernels are compiled with on a GPU node, and whether those that came compiled load.

Engines compile kernels when they start (nvcc, g++, ninja), Triton compiles at first use (g++ or gcc, Python's headers).
"""

import os
import platform as python_platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet

from vapo_megatron.monitoring.facts import installed_version
from vapo_megatron.operations.doctor.report import Line

_SECONDS = 60.0
# Modules with compiled code for GPUs, and what goes wrong without.
_COMPILED = {
    "sgl_kernel": "engines do not start",
    "torch_memory_saver": "engines cannot give their memory to the trainer (rollout.memory_saver)",
    "transformer_engine.pytorch": "megatron.core cannot be imported either: build it again, or pip uninstall "
    "transformer-engine transformer-engine-torch",
}


def check_toolkit(cuda: str | None, environment: Mapping[str, str] = os.environ) -> list[Line]:
    """A line for everything that is missing, or one that nothing is. cuda: what PyTorch was built for, such as 13.0."""
    lines = [*_compilers(cuda, environment), *_headers(), *_modules(environment)]
    return lines or [Line("ok", f"nvcc {_nvcc_version(_nvcc(environment))}, g++, ninja, headers; kernels load")]


def _compilers(cuda: str | None, environment: Mapping[str, str]) -> Iterator[Line]:
    nvcc, path = _nvcc(environment), environment.get("PATH", os.defpath)
    if nvcc is None:
        remedy = f"install the CUDA toolkit{f' {cuda}' if cuda else ''} and put its bin on PATH"
        yield Line("fault", "no nvcc: engines compile kernels when they start", remedy)
    elif cuda is not None and (found := _nvcc_version(nvcc)) != cuda:
        bad = found is None or found.partition(".")[0] != cuda.partition(".")[0]
        remedy = f"put the bin of a CUDA {cuda} toolkit first on PATH and set CUDA_HOME to it"
        yield Line("fault" if bad else "warning", f"{nvcc} is {found or 'broken'}, PyTorch's CUDA {cuda}", remedy)
    if shutil.which(environment.get("CXX", "g++"), path=path) is None:
        yield Line("fault", "no g++: kernels are compiled with it", "apt-get install g++")
    if shutil.which("ninja", path=path) is None:
        yield Line("fault", "no ninja: engines compile kernels with it", "pip install ninja")


def _headers() -> Iterator[Line]:
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        yield Line("fault", "no Python.h: Triton compiles with it", f"apt-get install {python}")


def _modules(environment: Mapping[str, str]) -> Iterator[Line]:
    for module, without in _COMPILED.items():
        if find_spec(module.partition(".")[0]) is None:
            continue  # the check of versions says so
        said = _import_error(module, environment)
        if said:
            found = f"{module} does not load ({said}): {without}"
            yield Line("fault", found, "install it for this PyTorch and CUDA")


def _import_error(module: str, environment: Mapping[str, str]) -> str:
    """Why a module cannot be imported, in a process of its own; empty where it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import torch, {module}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env=dict(environment),
        )
    except subprocess.TimeoutExpired:
        return f"not within {_SECONDS:g} s"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return "" if done.returncode == 0 else last[:200]


def _nvcc(environment: Mapping[str, str]) -> str | None:
    """The first on PATH, as compilers take it, else that of CUDA_HOME."""
    home = environment.get("CUDA_HOME")
    path = environment.get("PATH", os.defpath) + (f"{os.pathsep}{home}/bin" if home else "")
    return shutil.which("nvcc", path=path)


def _nvcc_version(nvcc: str | None) -> str | None:
    """Such as 13.0; None where it does not say."""
    if nvcc is None:
        return None
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else None


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

"""Versions, commit and machine of a run."""

import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "torch",
    "megatron-core",
    "sglang",
    "transformers",
    "transformer-engine",
    "apex",
    "flash-attn",
    "triton",
)


def environment_facts() -> dict[str, Any]:
    """Versions of the packages that decide what a run computes (None: absent), the commit, the
    machine.

    The packages are not imported. `commit` ends in "+" where tracked files differ from it, and is
    None outside a checkout.
    """
    return {
        "vapo-megatron": installed_version("vapo-megatron"),
        "commit": _commit(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "hostname": socket.gethostname(),
        "system": platform.platform(),
        "cpu_cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def installed_version(package: str) -> str | None:
    """The version of a package, without importing it; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    try:
        described = subprocess.run(
            [
                "git",
                "-C",
                str(folder),
                "describe",
                "--always",
                "--abbrev=40",
                "--exclude=*",
                "--dirty=+",
            ],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if described.returncode == 0:
        return described.stdout.strip()
    return None

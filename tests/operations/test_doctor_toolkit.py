"""What doctor names as missing to compile kernels: on a folder of stand-ins for the tools."""

import os
import sysconfig
from pathlib import Path

import pytest

from vapo_megatron.operations.doctor import node as node_checks
from vapo_megatron.operations.doctor.node import check_toolkit


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a node with all that is needed, in a folder of the test's."""
    tools, include = tmp_path / "cuda" / "bin", tmp_path / "python"
    for folder in (tools, include):
        folder.mkdir(parents=True)
    for name, says in {"nvcc": "Cuda compilation tools, release 13.0, V13.0.88", "g++": "", "ninja": ""}.items():
        (tools / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tools / name).chmod(0o755)
    (include / "Python.h").touch()
    real = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(include) if name == "include" else real(name))
    monkeypatch.setattr(node_checks, "_COMPILED", {})
    return {**os.environ, "PATH": str(tools), "HOME": str(tmp_path)}


def faults(environment: dict[str, str], cuda: str = "13.0") -> list[tuple[str, str]]:
    return [(line.status, f"{line.found} {line.remedy}") for line in check_toolkit(cuda, environment)]


def test_a_node_with_everything_is_well(node: dict[str, str]) -> None:
    ((status, said),) = faults(node)
    assert status == "ok" and "nvcc 13.0" in said


@pytest.mark.parametrize(
    ("missing", "status", "named"),
    [
        ("cuda/bin/nvcc", "fault", "no nvcc"),
        ("cuda/bin/g++", "fault", "apt-get install g++"),
        ("cuda/bin/ninja", "fault", "pip install ninja"),
        ("python/Python.h", "fault", "no Python.h"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    node: dict[str, str], tmp_path: Path, missing: str, status: str, named: str
) -> None:
    (tmp_path / missing).unlink()
    ((found, said),) = faults(node)
    assert found == status and named in said


def test_an_nvcc_of_another_cuda_is_told_of(node: dict[str, str], tmp_path: Path) -> None:
    ((minor, said),) = faults(node, cuda="13.1")
    assert minor == "warning" and "is 13.0, PyTorch's CUDA 13.1" in said
    ((major, _),) = faults(node, cuda="12.9")
    assert major == "fault"
    # pip's nvcc before the toolkit's, as a resolver may leave it.
    first = tmp_path / "venv"
    first.mkdir()
    (first / "nvcc").write_text("#!/bin/sh\necho 'release 13.5, V13.5.1'\n")
    (first / "nvcc").chmod(0o755)
    ((_, said),) = faults({**node, "PATH": f"{first}:{node['PATH']}"})
    assert f"{first}/nvcc is 13.5" in said


def test_a_compiled_module_that_does_not_load_is_named_with_its_error(
    node: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_kernels.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(node_checks, "_COMPILED", {"broken_kernels": "engines do not start", "not_there_at_all": "x"})
    ((status, said),) = faults({**node, "PYTHONPATH": str(tmp_path)})
    assert status == "fault" and "broken_kernels does not load" in said and "libcudart.so.12" in said
    assert "engines do not start" in said

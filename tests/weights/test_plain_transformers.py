"""Engines find what SGLang imports of torchvision, which the environment that `make` sets up does
not have.

That transformers alone loads what a run exports is in tests/training/test_train_command.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As the lock leaves it, wherever a torchvision of an earlier one is still installed.
WITHOUT_TORCHVISION = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def hide(cls, name, *rest):
    return None if name.partition(".")[0] == "torchvision" else find(name, *rest)
importlib.machinery.PathFinder.find_spec = classmethod(hide)
"""


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_TORCHVISION + script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.full
def test_engine_finds_the_names_sglang_imports_from_torchvision() -> None:
    assert "torchvision==" not in (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    script = (
        "import vapo_megatron.engines.inside.processes, sys; from transformers import AutoConfig\n"
    )
    script += "from transformers.utils import is_torchvision_available\n"
    script += "print(is_torchvision_available(), sys.modules['torchvision'].__spec__.origin)"
    assert _run(script).splitlines()[-1] == "False None"

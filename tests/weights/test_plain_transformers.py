"""What runs export is loaded by transformers itself, in the environment that `make` sets up."""

import subprocess
import sys
from pathlib import Path

import pytest

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, save_tiny_model, word_tokenizer

ROOT = Path(__file__).parents[2]
# As the lock leaves it, wherever a torchvision of an earlier one is still installed.
WITHOUT_TORCHVISION = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
hide = lambda cls, name, *rest: None if name.partition(".")[0] == "torchvision" else find(name, *rest)
importlib.machinery.PathFinder.find_spec = classmethod(hide)
"""


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_TORCHVISION + script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.full
def test_transformers_loads_a_model_in_the_environment_of_the_lock(tmp_path: Path) -> None:
    assert "torchvision==" not in (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    tokenizer = word_tokenizer(["1", "2"], 32, CHATML_TEMPLATE)
    shape = TinyModel(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, heads=2, head_dim=16)
    parameters = save_tiny_model(shape, tokenizer, tmp_path)
    script = "import sys; from transformers import AutoModelForCausalLM as Model\n"
    script += "print(sum(p.numel() for p in Model.from_pretrained(sys.argv[1]).parameters()))"
    assert int(_run(script, str(tmp_path))) == parameters


@pytest.mark.full
def test_an_engine_finds_the_names_that_sglang_imports_of_torchvision() -> None:
    script = "import vapo_megatron.engines.inside.processes, sys; from transformers import AutoConfig\n"
    script += "from transformers.utils import is_torchvision_available\n"
    script += "print(is_torchvision_available(), sys.modules['torchvision'].__spec__.origin)"
    assert _run(script).splitlines()[-1] == "False None"

"""The table of verifiers and the classes that it names."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vapo_megatron.config.verifiers import VERIFIERS
from vapo_megatron.rewards.grade import Grade
from vapo_megatron.rewards.verifier import Verifier, verifier_of


@pytest.mark.parametrize("name", VERIFIERS)
def test_the_table_names_verifiers(name: str) -> None:
    config = SimpleNamespace(verifier=name, correct=2.0, incorrect=-1.0)
    verifier = verifier_of(config)  # type: ignore[arg-type]
    assert isinstance(verifier, Verifier)
    assert verifier.score(Grade(True, "equal")).score == 2.0
    scored = verifier.score(Grade(True, "scored", score=0.5)).score
    assert scored == (0.5 if VERIFIERS[name].grades == "score" else 0.5 * 3.0 - 1.0)


def test_a_worker_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys\n"
        "import vapo_megatron.rewards.worker, vapo_megatron.rewards.math\n"
        "assert not {'torch', 'pydantic', 'sympy'} & sys.modules.keys()\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=240)

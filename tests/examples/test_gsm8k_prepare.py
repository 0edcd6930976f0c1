import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from vapo_megatron.errors import BadInput

SCRIPT = Path(__file__).parents[2] / "examples" / "gsm8k" / "prepare.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_prepare", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_forms_give_the_same_row(script: ModuleType, tmp_path: Path) -> None:
    official = {"question": "How many?", "answer": "6*200 = <<6*200=1200>>1200\n#### 1,200"}
    plain = {"problem": "How many?", "answer": "1200"}
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in (official, plain)))
    assert script.prepare(source, tmp_path / "out.jsonl", "train") == 2
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first == {"id": "gsm8k-train-00000", "problem": "How many?", "answer": "1200"}
    assert second == {**first, "id": "gsm8k-train-00001"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How many?", "answer": "1200"}, "no '#### <number>'"),
        ({"answer": "1"}, "question or problem"),
        ({"problem": "How many?"}, "field answer"),
    ],
)
def test_a_row_of_another_form_is_named(script: ModuleType, tmp_path: Path, row: dict, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=rf"in\.jsonl:1: .*{message}"):
        script.prepare(tmp_path / "in.jsonl", tmp_path / "out.jsonl", "train")
    assert not (tmp_path / "out.jsonl").exists()

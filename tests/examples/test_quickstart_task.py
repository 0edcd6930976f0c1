import importlib.util
import json
import random
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open

from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.rewards.math import grade_response

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart" / "make_task.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_make_task", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def task(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("task")
    script.make_task(out, seed=3, sft_rows=4_000)
    return out


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _files(directory: Path) -> list[Path]:
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


def test_seed_gives_the_same_bytes_and_another_seed_another_task(
    script: ModuleType, task: Path, tmp_path: Path
) -> None:
    script.make_task(tmp_path / "again", seed=3, sft_rows=4_000)
    files = _files(task)
    assert files == _files(tmp_path / "again")
    for name in files:
        assert (task / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    script.make_task(tmp_path / "other", seed=4, sft_rows=10)
    assert (task / "train.jsonl").read_bytes() != (tmp_path / "other" / "train.jsonl").read_bytes()


def test_the_permutation_is_one_cycle(script: ModuleType) -> None:
    successor = script.single_cycle(random.Random(0))
    state = 0
    seen = []
    for _ in range(script.STATES):
        seen.append(state)
        state = successor[state]
    assert state == 0 and sorted(seen) == list(range(script.STATES))


def test_evaluation_problems_are_in_no_training_data(task: Path) -> None:
    held_out = {row["problem"] for row in _rows(task / "eval.jsonl")}
    training = {row["problem"] for row in _rows(task / "train.jsonl")}
    cold_start = {row["problem"] for row in _rows(task / "sft.jsonl")}
    assert len(held_out) == 160 and len(held_out | training) == 960
    assert not held_out & training and not held_out & cold_start


def test_no_constant_answer_beats_one_in_ten(task: Path) -> None:
    digits = Counter(row["answer"] for row in _rows(task / "eval.jsonl"))
    assert set(digits.values()) == {16} and len(digits) == 10


def test_neither_state_nor_count_alone_gives_the_answer_away(task: Path) -> None:
    rows = _rows(task / "train.jsonl") + _rows(task / "eval.jsonl")
    for part in (0, 1):
        by_key: dict[str, Counter[str]] = {}
        for row in rows:
            by_key.setdefault(row["problem"].split()[part], Counter())[row["answer"]] += 1
        best = sum(counter.most_common(1)[0][1] for counter in by_key.values())
        assert best / len(rows) < 0.35


def test_faithful_chain_is_correct_and_survives_the_tokenizer(
    script: ModuleType, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DIRECT_SHARE", 0.0)
    monkeypatch.setattr(script, "SLIP_SHARE", 0.0)
    successor = script.single_cycle(random.Random(3))
    tokenizer = TextTokenizer(task / "model", PromptTemplate())
    for row in _rows(task / "eval.jsonl"):
        state, steps = (int(word[1:]) for word in row["problem"].split())
        response = script.cold_start_response(successor, (state, steps), random.Random(0))
        ids = tokenizer.encode_response(response)
        assert len(ids) == 2 * steps + 2
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == response
        assert grade_response(row["answer"], tokenizer.decode(ids), "hash").correct
        assert not grade_response(row["answer"], tokenizer.decode(ids[:-1]), "hash").correct


def test_cold_start_solutions_guess_and_slip_as_often_as_stated(
    script: ModuleType, task: Path
) -> None:
    answers = {row["problem"]: row["answer"] for row in _rows(task / "train.jsonl")}
    rows = _rows(task / "sft.jsonl")
    direct = [row for row in rows if row["response"].startswith("####")]
    chains = [row for row in rows if not row["response"].startswith("####")]
    correct = sum(
        grade_response(answers[row["problem"]], row["response"], "hash").correct for row in chains
    )
    assert abs(len(direct) / len(rows) - script.DIRECT_SHARE) < 0.03
    # 17 steps on average without a slip: 0.97 ** 17 = 0.60
    assert 0.5 < correct / len(chains) < 0.7


def test_the_prompt_is_bos_state_and_count(task: Path) -> None:
    tokenizer = TextTokenizer(task / "model", PromptTemplate())
    assert tokenizer.prompt_text("s17 c12") == "<bos> s17 c12"
    assert len(tokenizer.encode_prompt("s17 c12")) == 3


def test_the_model_directory_is_small_and_whole(task: Path) -> None:
    config = json.loads((task / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["vocab_size"] == 104
    with safe_open(task / "model" / "model.safetensors", "pt") as weights:
        elements = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    assert elements == 308_992

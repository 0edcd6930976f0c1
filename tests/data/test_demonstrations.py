"""Demonstrations are read as samples whose responses end, and a bad row is named."""

from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.sample import Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.training.sft import read_demonstrations

EOS = 9


def read(path: Path, rows: list[dict[str, Any]], max_tokens: int = 100) -> list[Sample]:
    write_rows(path, rows)
    return read_demonstrations(
        path, lambda text: [1, *map(int, text)], lambda text: [*map(int, text)], EOS, max_tokens
    )


def test_each_row_is_a_prompt_and_a_response_that_ends(tmp_path: Path) -> None:
    rows = [{"problem": "23", "response": "456"}, {"id": "b", "problem": "7", "response": "8"}]
    samples = read(tmp_path / "d.jsonl", rows, max_tokens=7)
    assert [s.prompt.token_ids for s in samples] == [(1, 2, 3), (1, 7)]
    assert [[*map(int, s.response_ids)] for s in samples] == [[4, 5, 6, EOS], [8, EOS]]
    assert [(s.prompt.id, s.prompt.problem, s.prompt.cursor) for s in samples] == [
        ("1", "23", 0),
        ("b", "7", 1),
    ]
    assert [(s.group, s.index, s.finish_reason, s.reward) for s in samples] == [
        (0, 0, "stop", 0),
        (1, 0, "stop", 0),
    ]
    assert all(
        (s.seed, s.weight_version, s.weight_version_oldest, s.prompt.answer) == (0, 0, 0, "")
        for s in samples
    )
    for sample in samples:
        assert sample.rollout_logprobs.tolist() == [0] * len(sample.response_ids)
        assert (sample.response_ids.dtype, sample.rollout_logprobs.dtype) == ("int32", "float32")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "1"}, "2: field 'response' is missing or empty"),
        ({"problem": "", "response": "1"}, "2: field 'problem' is missing or empty"),
        ({"problem": 3, "response": "1"}, "2: field 'problem' is missing or empty"),
        ({"problem": "12", "response": "345"}, "2: 7 tokens are above data.max_tokens=6"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=f"d.jsonl:{message}"):
        read(tmp_path / "d.jsonl", [{"problem": "1", "response": "234"}, row], max_tokens=6)
    with pytest.raises(BadInput, match="holds no row"):
        read(tmp_path / "d.jsonl", [])

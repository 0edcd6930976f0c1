"""Preparation of problems, by the command that people type."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from vapo_megatron.errors import BadInput
from vapo_megatron.operations.preparation import prepare
from vapo_megatron.operations.problem_rows import LAYOUTS, find_layout, read_row
from vapo_megatron.rewards.math import grade

INSTRUCTIONS = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "row",
    [
        {
            "prompt": [{"content": INSTRUCTIONS.format("What is 3 + 4?"), "role": "user"}],
            "reward_model": {"ground_truth": "7", "style": "rule"},
            "extra_info": {"index": "x"},
        },
        {"id": "x", "problem": "What is 3 + 4?", "answer": 7},
        {
            "unique_id": "x",
            "problem": "What is 3 + 4?",
            "solution": r"It is $\boxed{7}$.",
            "level": 1,
        },
        {"ID": "x", "Problem": "What is 3 + 4?", "Answer": 7, "Solution": "..."},
        {"id": "x", "question": "What is 3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
        {"id": "x", "prompt": "What is 3 + 4?", "solution": "\\[\n\\boxed{7}\n\\]"},
    ],
    ids=["verl", "answer", "math", "aime", "question", "prompt"],
)
def test_every_published_form_gives_the_same_problem(row: dict[str, Any]) -> None:
    problem = read_row(row, find_layout(row, "f:1"), "f", 1, "f:1")
    assert problem is not None
    assert (problem.id, problem.problem, problem.answer) == ("x", "What is 3 + 4?", "7")


def test_each_row_left_out_has_its_reason(tmp_path: Path) -> None:
    asked = (
        "How many positive integers below one hundred are divisible by both six and eight at once?"
    )
    source = _write(
        tmp_path / "train.jsonl",
        [
            {"id": "kept", "problem": "What is 3 + 4?", "answer": "7"},
            {"id": "again", "problem": "What is  $3 + 4$?", "answer": "7.0"},
            {"id": "two-a", "problem": "What is 1 + 1?", "answer": "2"},
            {"id": "two-b", "problem": "What is 1 + 1?", "answer": "3"},
            {"id": "known", "problem": "Tell me: " + asked, "answer": "4"},
            {"id": "none", "problem": "What?", "answer": " "},
            {"id": "half", "problem": "What is half of one?", "answer": r"\frac{1}{2}"},
        ],
    )
    against = _write(tmp_path / "eval.jsonl", [{"id": "e1", "problem": asked, "answer": "4"}])
    out = tmp_path / "out.jsonl"
    outcome = prepare([str(source)], out, [against])
    assert [row["id"] for row in _rows(out)] == ["kept", "half"]
    assert {one.id: one.reason for one in outcome.left_out} == {
        "two-a": "conflicting_answers",
        "two-b": "conflicting_answers",
        "known": "contaminated",
        "": "empty",
    }
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["rows"], report["kept"], report["left_out"]["repeated"]) == (7, 2, 1)
    assert {one["place"] for one in report["rows_left_out"] if one["id"] == "known"} == {
        f"{source}:5"
    }
    assert outcome.rows == outcome.kept + sum(outcome.counts().values())
    prepare([str(source)], out, [against], integers_only=True)
    assert [row["id"] for row in _rows(out)] == ["kept"]


def test_parquet_and_jsonl_of_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    # The published file repeats every prompt a hundred times
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": INSTRUCTIONS.format(f"What is {n} + {n}?"), "role": "user"}],
            "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
            "extra_info": {"index": f"row-{n}"},
        }
        for n in range(5)
    ] * 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    _write(tmp_path / "a.jsonl", rows)
    for kind in ("parquet", "jsonl"):
        outcome = prepare([str(tmp_path / f"a.{kind}")], tmp_path / f"{kind}.jsonl")
        assert (outcome.rows, outcome.kept, outcome.repeated) == (15, 5, 10)
    assert _rows(tmp_path / "parquet.jsonl") == _rows(tmp_path / "jsonl.jsonl")
    row = {"id": "row-3", "problem": "What is 3 + 3?", "answer": "6"}
    assert _rows(tmp_path / "jsonl.jsonl")[3] == row
    prepare([str(tmp_path / "a.parquet")], tmp_path / "kept.jsonl", keep=("data_source",))
    assert _rows(tmp_path / "kept.jsonl")[3] == row | {"data_source": "math_dapo"}


def test_a_data_set_of_the_hub_is_read_from_its_cache(tmp_path: Path, hub_cache: Path) -> None:
    """The hub's own cache layout, made by hand: what `hf download` leaves on a machine without
    network."""
    repository = hub_cache / "datasets--some--set"
    folder = repository / "snapshots" / "0123" / "data"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    for split, answer in (("train", "7"), ("test", "8")):
        table = pyarrow.Table.from_pylist([{"problem": f"Which {split}?", "answer": answer}])
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    for split, answer in (("", "7"), (":test", "8")):
        prepare([f"hub:some/set{split}"], tmp_path / "out.jsonl")
        assert [row["answer"] for row in _rows(tmp_path / "out.jsonl")] == [answer]
    # As DAPO-Math-17k's has it
    (folder / "train-00000-of-00001.parquet").rename(folder / "some-name.parquet")
    (folder / "test-00000-of-00001.parquet").unlink()
    (folder / "more.json").write_text(json.dumps([{"problem": "Which?", "answer": "9"}]))
    prepare(["hub:some/set"], tmp_path / "out.jsonl")
    assert sorted(row["answer"] for row in _rows(tmp_path / "out.jsonl")) == ["7", "9"]
    with pytest.raises(BadInput, match=r"no file of validation among .*some-name"):
        prepare(["hub:some/set:validation"], tmp_path / "no.jsonl")
    with pytest.raises(
        BadInput,
        match=r"other/set: cannot be downloaded .*hf download --repo-type dataset other/set",
    ):
        prepare(["hub:other/set"], tmp_path / "no.jsonl")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"text": "a"}],
            {},
            r"in\.jsonl:1: has the fields text; expected prompt \+ reward_model, or",
        ),
        (
            [{"problem": "a", "answer": "1"}, {"text": "b"}],
            {},
            r"in\.jsonl:2: has the fields text; expected problem",
        ),
        ([{"problem": "a", "answer": ""}], {}, r"no row is left of 1 \(1 empty\)"),
        (
            [{"problem": "a", "answer": "1"}],
            {"keep": ["source"]},
            r"in\.jsonl:1: no field 'source' among answer, problem",
        ),
        (
            [
                {"id": "x", "problem": "a", "answer": "1"},
                {"id": "x", "problem": "b", "answer": "1"},
            ],
            {},
            r"in\.jsonl:2: id x is used by .*in\.jsonl:1",
        ),
    ],
)
def test_what_cannot_be_prepared_is_named_and_nothing_is_written(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    source = _write(tmp_path / "in.jsonl", rows)
    with pytest.raises(BadInput, match=message):
        prepare([str(source)], tmp_path / "out.jsonl", **options)
    for read in ([str(source)], []), ([], [source]):
        with pytest.raises(BadInput, match=r"--out .*in\.jsonl: is one of the files that are read"):
            prepare(read[0], source, read[1])
    assert os.listdir(tmp_path) == ["in.jsonl"] and _rows(source) == rows


@pytest.mark.parametrize(
    ("published", "right"),
    [
        (r"\(1\) and \(2\)", r"\boxed{1 and 2}"),
        (r"\( x=1 \) or \( x=2 \)", r"\boxed{x=1 or x=2}"),
        (r"\[ \boxed{\frac{1}{2}} \]", r"\boxed{0.5}"),
        ("$$\\sqrt{2}$$", r"\boxed{\sqrt 2}"),
    ],
)
def test_a_prepared_answer_is_still_met_by_the_right_response(published: str, right: str) -> None:
    problem = read_row({"problem": "?", "answer": published}, LAYOUTS[1], "f", 1, "f:1")
    assert problem is not None
    assert grade(problem.answer, right) == grade(published, right)
    assert problem.answer == published or grade(problem.answer, right)


def test_problems_that_differ_by_a_sign_are_two(tmp_path: Path) -> None:
    pairs = [
        ("What is $5! + 3$?", "123"),
        ("What is $5 + 3$?", "8"),
        ("Is $x$ in $(0,1]$?", "1"),
        ("Is $x$ in $[0,1)$?", "2"),
    ]
    source = _write(
        tmp_path / "a.jsonl", [{"problem": text, "answer": answer} for text, answer in pairs]
    )
    assert prepare([str(source)], tmp_path / "out.jsonl").kept == 4

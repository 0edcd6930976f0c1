import json
from pathlib import Path

import pytest
from called import called

from tools.grade import app


def _grade(cases: Path, out: Path, *arguments: str) -> tuple[int, str]:
    return called(app, "--cases", cases, "--out", out, *arguments)


def test_rows_come_back_in_order_with_their_verdict(tmp_path: Path) -> None:
    rows = [
        {"gold": "4", "prediction": r"\boxed{4}", "id": "a"},
        {"gold": r"\sqrt{12}", "prediction": r"\boxed{2\sqrt{3}}"},
        {"gold": "4", "prediction": "no idea"},
        # As samples and evaluations are written, graded before.
        {
            "id": "b",
            "problem": "2 + 2",
            "answer": "4",
            "response": "It is #### 4",
            "correct": False,
            "reward": 0.0,
        },
    ]
    cases = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    cases.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = _grade(cases, out)
    assert code == 0 and "3 of 4 correct" in output
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["correct"] for row in graded] == [True, True, False, True]
    verdict = {"correct", "reason", "extracted"}
    for row, original in zip(graded, rows, strict=True):
        assert {key: row[key] for key in original.keys() - verdict} == {
            k: original[k] for k in original.keys() - verdict
        }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"gold": "1"}\n', "in.jsonl:1: no field 'prediction' or 'response'"),
        ('{"gold": 1, "prediction": "1"}\n', "in.jsonl:1: field gold is int"),
        ('{"gold": "1", "prediction": "1"}\nx\n', "in.jsonl:2: not JSON"),
        ("", "holds no rows"),
        (None, "no such file"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    tmp_path: Path, text: str | None, message: str
) -> None:
    cases = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    if text is not None:
        cases.write_text(text)
    code, output = _grade(cases, out)
    assert code == 2 and message in output and output.count("\n") == 1
    assert not out.exists()


def test_an_unknown_answer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"gold": "1", "prediction": "1"}\n')
    code, output = _grade(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", "--answer-format", "telepathy"
    )
    assert code == 2 and "answer_format is 'telepathy'" in output

import json
from pathlib import Path

import pytest

from vapo_megatron.operations.preparation import OverlapIndex, words

DATA = Path(__file__).parents[2].parent / "shared" / "data"
PROBLEM = (
    "A rectangular band formation has $m$ members in each of $r$ rows, where $m$ and $r$ are "
    "integers. "
    "Find the largest number of members the band could have."
)


def test_typesetting_does_not_hide_a_problem() -> None:
    index = OverlapIndex([("eval-1", PROBLEM)])
    disguised = (
        PROBLEM.replace("$m$", r"\(m\)")
        .replace("$r$", r"$\displaystyle r$")
        .upper()
        .replace(" ", "  ")
    )
    match = index.nearest(disguised)
    assert match is not None and match.id == "eval-1" and match.overlap == 1.0


def test_another_number_in_a_formula_is_another_word() -> None:
    assert words(r"\frac{1}{2} + x") != words(r"\frac{1}{3} + x")
    assert words(r"\dfrac{1}{2}+x") == words(r"\frac{1}{2} + x")


def test_overlap_is_that_of_the_shorter_text() -> None:
    short = [f"{a}{b}" for a in "abcd" for b in "klm"]  # 12 words, 5 sequences of 8
    index = OverlapIndex([("short", " ".join(short))])
    after = [f"{a}{b}" for a in "pqrst" for b in "uvwxyz"]
    assert index.nearest(" ".join(short + after)) == ("short", 1.0)
    assert index.nearest(" ".join(short[:10] + after)) == ("short", 3 / 5)
    assert index.nearest(" ".join(short[:7] + after)) is None


def test_texts_too_short_for_an_n_gram_are_compared_as_a_whole() -> None:
    index = OverlapIndex([("e", "What is $2 + 3$?")])
    assert index.nearest("what is 2+3") == ("e", 1.0)
    assert index.nearest("what is 2+4") is None


def test_what_many_rows_share_is_no_evidence_of_a_repeat() -> None:
    """Of two evaluation problems and forty rows with one preamble."""
    preamble = "Solve the problem below step by step and put the final answer in a box at its end"
    rows = [
        f"{preamble}: how far is town {n} from town {n * n + 1} by road {n + 7}?" for n in range(40)
    ]
    evaluation = [("e1", f"{preamble}: what is one half of a third?"), ("e2", rows[3])]
    before = OverlapIndex(evaluation)
    assert all(match.overlap >= 0.6 for row in rows if (match := before.nearest(row)))
    index = OverlapIndex(evaluation, rows)
    assert index.nearest(rows[3]) == ("e2", 1.0)
    near = index.nearest(rows[3] + " Show every step of your work.")
    assert near is not None and near.id == "e2" and near.overlap >= 0.6
    others = [index.nearest(row) for n, row in enumerate(rows) if n != 3]
    assert all(match is None or match.overlap < 0.6 for match in others)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data are not here")
def test_known_near_duplicates_are_found() -> None:
    """The list was made by other code, with other words; where it is sure (0.8 and more), so are
    we."""
    evaluation = [
        (row["id"], row["problem"])
        for name in ("aime2024", "aime2025", "math500", "gsm8k_test")
        for row in map(json.loads, (DATA / "eval" / f"{name}.jsonl").read_text().splitlines())
    ]
    index = OverlapIndex(evaluation)
    rows = map(json.loads, (DATA / "train" / "aime_1983_2023.jsonl").read_text().splitlines())
    problems = {row["id"]: row["problem"] for row in rows}
    known = [
        row
        for row in map(
            json.loads, (DATA / "train" / "near_duplicates_of_eval.jsonl").read_text().splitlines()
        )
        if row["train_file"] == "aime_1983_2023" and row["overlap"] >= 0.8
    ]
    assert known
    for row in known:
        match = index.nearest(problems[row["train_id"]])
        assert match is not None and match.id == row["eval_id"] and match.overlap >= 0.6
    strangers = [
        text for name, text in problems.items() if name not in {row["train_id"] for row in known}
    ]
    near = sum(
        (match := index.nearest(text)) is not None and match.overlap >= 0.6 for text in strangers
    )
    assert near <= len(strangers) / 100

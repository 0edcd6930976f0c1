"""Answers as problem sets write them, labelled by hand: agreement, time limits, symmetry (rules: docs/verifier.md)."""

import json
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import VerifierPool

DATA = Path(__file__).parent / "data"


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def _grades(rows: list[dict[str, Any]]) -> list[Grade]:
    with VerifierPool(RewardConfig(workers=2)) as pool:
        return pool.grade_batch([(row["gold"], row["prediction"]) for row in rows])


# Floors below what was measured on 2026-11-22, with room for a slow machine's timeouts.
@pytest.mark.parametrize(
    ("name", "least_agreement", "most_accepted_wrongly"), [("development.jsonl", 0.85, 8), ("unseen.jsonl", 0.88, 4)]
)
def test_agreement_with_labels_does_not_fall(name: str, least_agreement: float, most_accepted_wrongly: int) -> None:
    rows = _rows(name)
    grades = _grades(rows)
    accepted_wrongly = [row for row, grade in zip(rows, grades, strict=True) if grade.correct and not row["expected"]]
    agreed = sum(grade.correct == row["expected"] for row, grade in zip(rows, grades, strict=True))
    assert agreed / len(rows) >= least_agreement
    assert len(accepted_wrongly) <= most_accepted_wrongly, accepted_wrongly


def test_no_hostile_answer_is_accepted_or_outlasts_its_time() -> None:
    rows = [row for row in _rows("development.jsonl") if row["kind"] == "hostile"]
    assert RewardConfig().response_timeout_s == 5.0
    assert len(rows) >= 5
    assert not any(grade.correct for grade in _grades(rows))


def test_plain_comparison_is_reflexive_and_never_raises() -> None:
    for row in _rows("development.jsonl"):
        answer = row["prediction"].removeprefix(r"\boxed{").removesuffix("}")
        assert quick_comparison(row["gold"], row["gold"]) is True
        assert quick_comparison(row["gold"], answer) in (True, False, None)
        for cut in range(1, len(answer), 3):
            quick_comparison(row["gold"], answer[:cut])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"35 \mathrm{~cm}", r"0.35 \text{ m}", True),
        (r"35 \text{ cm}", r"35 \text{ mm}", False),
        (r"50 \text{ cm}^2", r"50 \text{ cm}", False),
        (r"20\text{ days}", r"20\text{ weeks}", False),
        (r"\$0.50", r"50 \text{ cents}", True),
        (r"\$5", "€5", False),
        (r"\text{4:30 p.m.}", "16:30", True),
        (r"9\text{ a.m.}", "9 p.m.", False),
        ("3:4:5", "6:8:10", True),
        ("3:4:5", "3:5:4", False),
    ],
)
def test_units_times_and_ratios_compare_both_ways(one: str, other: str, same: bool) -> None:
    assert quick_comparison(one, other) is same
    assert quick_comparison(other, one) is same


@pytest.mark.parametrize(
    ("ground_truth", "answer"), [("6", "6.0000001"), ("42", r"\le 42"), ("42", r"\sum_{i=1}^{6} 2i"), ("2B", "2b")]
)
def test_what_only_looks_like_the_answer_is_refused(ground_truth: str, answer: str) -> None:
    assert quick_comparison(ground_truth, answer) is False

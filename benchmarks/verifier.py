"""How far the verifier agrees with other people's grades, beside math-verify in the same run.

    .venv/bin/python benchmarks/verifier.py --cases ../shared/data/answer_equivalence_public.jsonl \
        --cases ../shared/data/real_responses_public.jsonl

Rows are {gold or answer, prediction or response, expected or correct}; rows with tags (formats, quirks of one library)
are left out. Every row on which ours disagrees is printed: who is right is for people to say (docs/verifier.md).
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import math_verify
import typer

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.experience.jsonl import read_rows
from vapo_megatron.rewards.pool import VerifierPool


def _first(row: dict[str, Any], *names: str) -> Any:
    return next(row[name] for name in names if name in row)


def _math_verify(ground_truth: str, response: str) -> bool:
    try:
        return bool(math_verify.verify(math_verify.parse(ground_truth), math_verify.parse(response)))
    except Exception:  # it raises what sympy raises
        return False


def main(
    cases: Annotated[list[Path], typer.Option(help="JSONL of cases with grades. Repeatable.")],
    workers: Annotated[int, typer.Option(help="Verifier processes.")] = 2,
) -> None:
    """Print agreement, speed and disagreements."""
    with VerifierPool(RewardConfig(answer_format="auto", workers=workers)) as pool:
        for path in cases:
            rows = [row for _, row in read_rows(path) if not row.get("tags")]
            ground_truths = [str(_first(row, "gold", "answer")) for row in rows]
            responses = [str(_first(row, "prediction", "response")) for row in rows]
            expected = [bool(_first(row, "expected", "correct")) for row in rows]
            start = time.perf_counter()
            grades = pool.grade_batch(list(zip(ground_truths, responses, strict=True)))
            seconds = time.perf_counter() - start
            ours = [grade.correct for grade in grades]
            theirs = [_math_verify(*pair) for pair in zip(ground_truths, responses, strict=True)]
            print(f"\n{path.name}: {len(rows)} cases in {seconds:.1f} s with {workers} processes")
            for name, found in (("this verifier", ours), ("math-verify", theirs)):
                agreed = sum(one == other for one, other in zip(found, expected, strict=True))
                print(f"  {name:14} agrees on {agreed} ({agreed / len(rows):.1%})")
            for row, grade, other, wanted in zip(rows, grades, theirs, expected, strict=True):
                if grade.correct != wanted:
                    said = f"ours {grade.correct} ({grade.reason}), math-verify {other}"
                    print(f"  {row.get('id')}: wanted {wanted}, {said}")
                    print(f"    ground_truth {json.dumps(str(_first(row, 'gold', 'answer')))}")
                    print(f"    read {json.dumps(grade.extracted[-200:])}")


if __name__ == "__main__":
    typer.run(main)

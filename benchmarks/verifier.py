"""The verifier against math-verify: cases per second, hostile ones included, and how far both agree
with labels.

    python -m benchmarks.verifier [--cases FILE ...] [--workers 2] [--repeats 3] [--json FILE]

Rows of a file have a ground truth, a prediction or response, and what is expected, as those of
tests/rewards/data; rows with tags (formats, quirks of one library) are left out. Both sides have as
many processes; math-verify gets the ground truth in a box, which serves it better, and its own time
limit of 5 s. "groups" is the shape of training: sixteen responses to each ground truth of the first
file, many of them alike (half repeat it, a quarter are its prediction and a quarter another row's).

Rows on which ours disagrees are printed for review (docs/verifier.md). For files whose name begins
with "unseen", only totals are printed, so that nobody writes rules against them.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import math_verify
import numpy as np

from benchmarks.common import in_turns, parser, publish, ratio_figure
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.pool import VerifierPool

DATA = Path(__file__).parents[1] / "tests" / "rewards" / "data"
GROUP = 16
Pair = tuple[str, str]


def first(row: dict[str, Any], *names: str) -> Any:
    """The value under whichever name the row has."""
    return next(row[name] for name in names if name in row)


def by_math_verify(pair: Pair) -> bool:
    """Its grade on a response; what it raises is a no."""
    try:
        truth, answer = (math_verify.parse(text) for text in (f"\\boxed{{{pair[0]}}}", pair[1]))
        return bool(math_verify.verify(truth, answer))
    except Exception:  # it raises what sympy raises
        return False


def in_groups(pairs: Sequence[Pair]) -> list[Pair]:
    """Sixteen responses to each ground truth."""
    found = []
    for number, (truth, response) in enumerate(pairs):
        others = [pairs[(number * 7 + step) % len(pairs)][1] for step in range(1, 1 + GROUP // 4)]
        group = [f"\\boxed{{{truth}}}"] * (GROUP // 2) + [response] * (GROUP // 4) + others
        found += [(truth, one) for one in group]
    return found


def batched(pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
    """Group by group."""
    return [pairs[start : start + GROUP] for start in range(0, len(pairs), GROUP)]


def told(rows: Sequence[dict[str, Any]], grades: Sequence[Grade]) -> None:
    """Print the rows on which ours disagrees."""
    for row, grade in zip(rows, grades, strict=True):
        if grade.correct != bool(first(row, "expected", "correct")):
            said = f"wanted {not grade.correct}, ours {grade.correct} ({grade.reason})"
            print(
                f"  {row.get('id')}: {said}: ground truth "
                f"{json.dumps(str(first(row, 'gold', 'answer')))}"
            )
            print(f"    read {json.dumps(grade.extracted[-200:])}")


def main() -> None:
    """A row for each file and side."""
    arguments = parser(__doc__)
    files = [DATA / "development.jsonl", DATA / "unseen.jsonl"]
    arguments.add_argument(
        "--cases", type=Path, nargs="+", default=files, help="JSONL of cases with grades"
    )
    arguments.add_argument("--workers", type=int, default=2, help="processes of each side")
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    table, figures = [], []
    context = multiprocessing.get_context("spawn")
    config = RewardConfig(answer_format="auto", workers=given.workers)
    with VerifierPool(config) as pool, context.Pool(given.workers) as peers:
        pool.grade_batch([(r"\sin x", rf"\boxed{{\cos {x}}}") for x in range(given.workers)])
        peers.map(by_math_verify, [("1", "2")] * given.workers)
        for path in given.cases:
            rows = [row for _, row in read_rows(path) if not row.get("tags")]
            pairs = [
                (str(first(row, "gold", "answer")), str(first(row, "prediction", "response")))
                for row in rows
            ]
            wanted = np.array([bool(first(row, "expected", "correct")) for row in rows])
            grades: list[Grade] = pool.grade_batch(pairs)
            sides = {"ours": np.array([g.correct for g in grades])}
            sides["math-verify"] = np.array(peers.map(by_math_verify, pairs, 1))
            steps: list[Callable[[], object]] = [
                partial(pool.grade_batch, pairs),
                partial(peers.map, by_math_verify, pairs, 1),
            ]
            seconds = in_turns(steps, given.repeats) if path == given.cases[0] else [[], []]
            for (side, found), took in zip(sides.items(), seconds, strict=True):
                counts = {
                    "cases": len(rows),
                    "agree": int((found == wanted).sum()),
                    "accepted wrongly": int((found & ~wanted).sum()),
                    "refused wrongly": int((~found & wanted).sum()),
                }
                rate = float(len(rows) / np.median(took)) if took else ""
                table.append({"file": path.name, "by": side, **counts, "cases/s": rate})
            if path == given.cases[0]:
                figures.append(ratio_figure("each row once, math-verify over ours", *seconds[::-1]))
                groups = in_groups(pairs)
                start = time.perf_counter()
                with ThreadPoolExecutor(
                    2 * given.workers
                ) as graders:  # as training/rollouts grades them
                    list(graders.map(pool.grade_batch, batched(groups)))
                rate = len(groups) / (time.perf_counter() - start)
                empty = dict.fromkeys(("agree", "accepted wrongly", "refused wrongly"), "")
                table.append(
                    {"file": "groups", "by": "ours", "cases": len(groups), **empty, "cases/s": rate}
                )
            if not path.name.startswith("unseen"):
                told(rows, grades)
    publish(f"{given.workers} processes a side", table, given.json, figures)


if __name__ == "__main__":
    main()

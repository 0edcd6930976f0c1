"""The comparison of two evaluations, for people and for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.operations.comparison.compare import Comparison, differing_sampling, shown_p_value


def comparison_json(first: Path, second: Path, comparisons: Sequence[Comparison]) -> str:
    """One JSON object."""
    content = {
        "first": str(first),
        "second": str(second),
        "differing_sampling": differing_sampling(first, second),
        "sets": [asdict(one) for one in comparisons],
    }
    return json.dumps(content, indent=2)


def comparison_table(first: Path, second: Path, comparisons: Sequence[Comparison]) -> None:
    """A line a set, and what it means, on standard output."""
    console = RunConsole()
    console.header("vapo-megatron compare", {"first": first, "second": second})
    titles = ["set", "problems", "first", "second", "difference", "95 % interval", "better/worse", "p"]
    rows = [
        [
            *(one.name, str(one.problems), f"{one.a:.3f}", f"{one.b:.3f}", f"{one.difference:+.3f}"),
            *(f"[{one.low:+.3f}, {one.high:+.3f}]", f"{one.better}/{one.worse}", shown_p_value(one.p_value)),
        ]
        for one in comparisons
    ]
    console.table(titles, rows)
    for key, values in differing_sampling(first, second).items():
        console.note(f"not sampled alike: {key} {values[0]} against {values[1]}")
    console.note("p: two-sided, paired by problem (sign-flip permutation test of the mean difference)")

"""Prints the tables of `make test-faults` for results/faults.md: fault_table.py [FILE]"""

import json
import sys
from pathlib import Path

from fault_soak import FAMILIES, PHASES, SURROUNDINGS


def table(done: dict) -> str:
    """A row for each phase and a column for each family of faults; then a row for each mode."""
    counts = {(phase, family): count for phase, family, count in done["cells"]}
    families = list(FAMILIES)
    rows = [f"| | {' | '.join(families)} |", f"|---|{'---|' * len(families)}"]
    for phase in PHASES:
        cells = [str(counts.get((phase, family), "–")) for family in families]
        rows.append(f"| {phase} | {' | '.join(cells)} |")
    rows += [
        "",
        "| runs | faults | of them of disk, network, clock and files | ended equal to the bit |",
        "|---|---|---|---|",
    ]
    for name, mode in done["modes"].items():
        around = sum(
            n
            for kind, n in mode["faults"].items()
            if kind in SURROUNDINGS or kind.startswith("checkpoint")
        )
        equal = "all" if mode["equal"] else "not claimed; ledger compared"
        rows.append(
            f"| {name} ({mode['runs']}) | {sum(mode['faults'].values())} | {around} | {equal} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1] if sys.argv[1:] else "build/faults.json").read_text())))

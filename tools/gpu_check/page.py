"""The results: one page of Markdown for people, JSON for programs."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.gpu_check.runner import Result, exit_code
from vapo_megatron.files import atomic_write

_LOG_LINES = 25
_WORDS = {
    0: "Every check has passed.",
    1: (
        "Something is wrong: see the checks that failed or ran past their limits, and the ends of "
        "their logs below."
    ),
    3: "Nothing failed, but not everything was checked: what is broken there would not have shown.",
}


def write_results(
    results: Sequence[Result], out: Path, machine: str, title: str = "GPU check"
) -> None:
    """Write out/results.json and out/results.md. machine: what PyTorch says of the GPU, or of its
    absence."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "host": platform.node(),
        "machine": machine,
    }
    rows = [
        {
            "name": result.check.name,
            "step": result.check.step,
            "status": result.status,
            "seconds": round(result.seconds, 1),
            "limit": result.check.limit,
            "line": result.line,
        }
        for result in results
    ]
    found = {**facts, "exit_code": exit_code(results), "checks": rows}
    with atomic_write(out / "results.json") as file:
        file.write(json.dumps(found, indent=1) + "\n")
    with atomic_write(out / "results.md") as file:
        file.write(_page(results, out, facts, title))


def _page(results: Sequence[Result], out: Path, facts: dict[str, str], title: str) -> str:
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [_WORDS[exit_code(results)], ""]
    lines += _rows(
        [
            {
                "check": result.check.name,
                "result": result.status,
                "seconds": f"{result.seconds:.0f}",
                "shows": result.check.shows,
                "said": result.line,
            }
            for result in results
        ]
    )
    for result in results:
        if result.status != "ok":
            continue  # a file there is of an earlier time
        lines += _figures(out / f"{result.check.name}.json")
    for result in results:
        if result.log is not None and result.status != "ok":
            tail = result.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            lines += [
                "",
                f"## {result.check.name}: the end of {result.log.name}",
                "",
                "```",
                *tail,
                "```",
            ]
    return "\n".join(lines) + "\n"


def _figures(file: Path) -> list[str]:
    """The table of a benchmark and its ratios, where it has written them."""
    try:
        found = json.loads(file.read_text())
        lines = ["", f"## {file.stem}: {found['title']}", "", *_rows(found["rows"])]
        ratios = [
            {
                "ratio": figure["name"],
                "median": figure["ratio"],
                "quartiles": f"{figure['low']:.3g} to {figure['high']:.3g}",
            }
            for figure in found.get("figures", ())
        ]
        return [*lines, "", *_rows(ratios)] if ratios else lines
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    def cell(value: Any) -> str:
        text = f"{value:,.4g}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + [
        "| " + " | ".join(cell(row.get(head, "")) for head in heads) + " |" for row in rows
    ]

"""Runs every benchmark at CPU sizes, names what became slower since the last release, and writes
the pages of figures.

    make bench [ONLY="gae verifier"] [KEEP=1]
    python -m benchmarks.run [NAME ...] [--keep] | --page
 Each part is a separate program that writes runs/benchmarks/NAME.json; the newest run of a part
counts. Every figure is then compared with the kept one: it became slower if it is lower and the two
quartile ranges do not touch. --keep copies the parts into benchmarks/kept/, which is committed, and
writes results/performance.md with every table and docs/performance.md with a summary and its chart
from them; --page only writes the pages.
"""

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Image

from benchmarks.common import Figure, shown
from vapo_megatron.files import atomic_write

ROOT = Path(__file__).parents[1]
OUT = ROOT / "runs" / "benchmarks"
KEPT = ROOT / "benchmarks" / "kept"
RESULTS = ROOT / "results" / "performance.md"
SUMMARY = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "images" / "performance.png"


@dataclass(frozen=True)
class Part:
    """A benchmark: the question that it answers, the options that it is run with here."""

    question: str
    options: tuple[str, ...] = ()


PARTS = {
    "step_beside_trl": Part("How fast is a whole step?"),
    "throughput": Part(
        "How fast is forward and backward?", ("--lengths", "64", "256", "1024", "--repeats", "3")
    ),
    "collection": Part("What do collecting and grading add to the engines' time?"),
    "rollout_host": Part("What do responses cost rank 0?"),
    "twin": Part("How far off is `plan --simulate`?"),
    "host_costs": Part(
        "What does a step cost the host at the sizes of large runs?",
        ("--tokens", "49000000", "168000000"),
    ),
    "batch_copies": Part("What does a batch cost the ranks of a machine?"),
    "verifier": Part("How fast is the verifier?", ("--repeats", "1")),
    "gae": Part("How fast is GAE?"),
    "critic_lab": Part("What do the critic's measures cost?"),
    "balance": Part("Do ranks get equal work?", ("--samples", "4096", "--ranks", "32")),
    "packing": Part("What is packing worth?", ("--samples", "32")),
    "logprob_head": Part(
        "What do log-probs without logits save?",
        ("--tokens", "512", "--hidden", "512", "--dtype", "float32", "--words", "65536"),
    ),
    "scaling": Part("What do more ranks bring?", ("--samples", "16")),
    "weight_sync": Part("How fast do weights reach an engine?", ("--layouts", "1x1,2x1,2x1x2")),
    "strict_loading": Part("What does strict loading add to copies?"),
    "exchange": Part("What does exchanging samples cost a rank of many?"),
    "growth": Part("How does what rank 0 does grow?"),
    "convert": Part("What does a conversion take?"),
    "saving": Part("What does saving take?"),
    "save_beside_steps": Part("What does an asynchronous save add to a step?"),
}

# What the chart shows: part, figure and label. All are ratios of speed, and above 1 ours is faster.
CHARTED = (
    ("step_beside_trl", "step, TRL over ours", "GRPO step against TRL"),
    ("step_beside_trl", "update, TRL over ours", "GRPO update against TRL"),
    (
        "throughput",
        "forward+backward of 256 tokens, transformers over ours",
        "forward and backward against transformers",
    ),
    (
        "packing",
        "forward and backward, padded by length over packed",
        "packing against sorted padded batches",
    ),
    ("packing", "forward and backward, padded over packed", "packing against padded batches"),
    ("gae", "log-normal lengths, padded loop over segmented_gae", "GAE against a padded loop"),
    ("verifier", "each row once, math-verify over ours", "verifier against math-verify"),
    (
        "rollout_host",
        "rank 0's seconds, JSON over columns",
        "rank 0: column responses against JSON",
    ),
)
_INTRODUCTION = """\
# Performance: all tables

<!-- Written by `python -m benchmarks.run --page` from benchmarks/kept; do not edit by hand. -->

Every table gives its date and hardware. Each ratio compares two sides within one run, round by
round, and is given as its median and quartiles; above 1 ours is better. Where "other work" exceeds
0.2 cores, trust the ratios but not the seconds. [docs/performance.md](../docs/performance.md) is
the summary.
"""
_REST = """
## Plans against published step times

`python -m benchmarks.published` compares plans with step times that other systems publish:
[plan.md](../docs/plan.md).

## On GPUs

MFU at 1.5B, 7B and on six layers of 32B, decoding steps and the phases of a 1.5B step on one H200:
[gpu.md](../docs/gpu.md#state).
"""


def figures(found: dict[str, Any]) -> dict[str, Figure]:
    """The figures of a part, by name."""
    return {figure["name"]: Figure(**figure) for figure in found["figures"]}


def slower(kept: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each figure that is below the kept one, their quartiles apart; for one that is
    gone as well."""
    before, after = figures(kept), figures(now)
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            yield f"{name}: no longer measured, was {old.ratio:.3g}"
        elif new.high < old.low:
            spread = (
                f"({new.low:.3g} to {new.high:.3g}), was {old.ratio:.3g} ({old.low:.3g} to "
                f"{old.high:.3g})"
            )
            yield f"{name}: {new.ratio:.3g} {spread}"


def results_page(kept: dict[str, dict[str, Any]]) -> str:
    """results/performance.md: every table of the kept parts."""
    missing = [
        f"{part.question.rstrip('?')} (`{name}`)"
        for name, part in PARTS.items()
        if name not in kept
    ]
    not_measured = f"\n## Not measured yet\n\n{'; '.join(missing)}.\n\n" if missing else "\n"
    sections = "".join(_section(name, kept[name]) for name in PARTS if name in kept)
    return _INTRODUCTION + sections + not_measured + (KEPT / "earlier.md").read_text() + _REST


def draw(kept: dict[str, dict[str, Any]], path: Path) -> None:
    """The chart of docs/performance.md: medians and quartiles of the CHARTED ratios, on a
    logarithmic axis."""
    measured = [
        (label, figures(kept[part])[name])
        for part, name, label in CHARTED
        if part in kept and name in figures(kept[part])
    ]
    image = Image(figsize=(8, 3.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(image)
    axes = image.subplots()
    for place, (_, figure) in enumerate(reversed(measured)):
        axes.plot([figure.low, figure.high], [place, place], color="#2563eb", linewidth=3)
        axes.plot(figure.ratio, place, "o", color="#2563eb")
        axes.annotate(
            f"{figure.ratio:.2g}", (figure.ratio, place), (6, 5), textcoords="offset points"
        )
    axes.axvline(1, color="#64748b", linestyle=":")
    axes.set(
        xscale="log", xlim=(0.5, 80), xlabel="times the other's speed; right of 1 ours is faster"
    )
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.set_yticks(range(len(measured)), [label for label, _ in reversed(measured)])
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_write(path, "wb") as file:
        image.savefig(file, format="png", dpi=110)


def write_pages(kept: dict[str, dict[str, Any]]) -> None:
    """Write results/performance.md, docs/performance.md and its chart."""
    for path, text in ((RESULTS, results_page(kept)), (SUMMARY, summary_page(kept))):
        with atomic_write(path) as file:
            file.write(text)
    draw(kept, CHART)


def summary_page(kept: dict[str, dict[str, Any]]) -> str:
    """docs/performance.md: kept/summary.md, where {part:figure} is a ratio and {part#row#column} a
    table's cell."""
    cells: dict[str, str] = {}
    for name, part in kept.items():
        ratios = {figure: value.ratio for figure, value in figures(part).items()}
        cells |= {
            f"{name}:{figure}": f"{ratio:.2f}" if ratio < 3 else f"{ratio:.0f}"
            for figure, ratio in ratios.items()
        }
        cells |= {
            f"{name}#{n}#{key}": _short(value)
            for n, row in enumerate(part["rows"])
            for key, value in row.items()
        }
    return re.sub(
        r"{([^}]+)}",
        lambda place: cells.get(place[1], "not measured"),
        (KEPT / "summary.md").read_text(),
    )


def _short(value: Any) -> str:
    """A cell in a sentence: 17,100 and 759 and 0.11."""
    if isinstance(value, float) and value < 1000:
        return f"{value:.2g}" if value < 10 else f"{value:.0f}"
    return shown(value)


def _section(name: str, found: dict[str, Any]) -> str:
    headings = list(found["rows"][0])
    table = [
        headings,
        ["---"] * len(headings),
        *([shown(value) for value in row.values()] for row in found["rows"]),
    ]
    lines = [
        f"\n## {PARTS[name].question}\n",
        (importlib.import_module(f"benchmarks.{name}").__doc__ or "").strip(),
        "",
    ]
    facts = ", ".join(
        f"{fact} {value}"
        for fact, value in found["machine"].items()
        if fact not in ("date", "hardware")
    )
    lines += [
        f"Measured {found['machine']['date']} on {found['machine']['hardware']} ({facts}): "
        f"{found['title']}.",
        "",
    ]
    lines += ["| " + " | ".join(cells) + " |" for cells in table]
    if found["figures"]:
        lines += ["", "| ratio | median | quartiles |", "|---|---|---|"]
    for figure in figures(found).values():
        lines.append(
            f"| {figure.name} | **{figure.ratio:.3g}** | {figure.low:.3g} to {figure.high:.3g} |"
        )
    return "\n".join(lines) + "\n"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The parts that are there."""
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"))
        if path.stem in PARTS
    }


def main() -> None:
    """Run parts, compare, keep."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}; all where left out"
    )
    arguments.add_argument(
        "--keep", action="store_true", help="keep the results: later runs are compared with them"
    )
    arguments.add_argument(
        "--page", action="store_true", help="only write the pages, from benchmarks/kept"
    )
    given = arguments.parse_args()
    if given.page:
        write_pages(read(KEPT))
        return
    if unknown := [name for name in given.names if name not in PARTS]:
        arguments.error(f"{unknown[0]}: no such part; choose from {', '.join(PARTS)}")
    OUT.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in given.names or PARTS:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *PARTS[name].options]
        if subprocess.run([*command, "--json", str(OUT / f"{name}.json")], cwd=ROOT).returncode:
            failed.append(name)
        print(f"   {time.monotonic() - start:.0f} s", flush=True)
    now, kept = read(OUT), read(KEPT)
    found = [
        f"{name}: {line}"
        for name in kept.keys() & now.keys()
        for line in slower(kept[name], now[name])
    ]
    print(
        "\n".join(["== slower than the kept figures", *sorted(found)])
        if found
        else "== nothing is slower than the kept figures"
    )
    if given.keep:
        KEPT.mkdir(exist_ok=True)
        for name in now:
            shutil.copyfile(OUT / f"{name}.json", KEPT / f"{name}.json")
        write_pages(read(KEPT))
        print(
            f"== {RESULTS.relative_to(ROOT)} and {SUMMARY.relative_to(ROOT)} show "
            f"{len(read(KEPT))} parts"
        )
    if failed:
        raise SystemExit(f"== failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

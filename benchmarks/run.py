"""Every benchmark at sizes of a CPU, what became slower since the last release, and the page of figures.

    make bench [ONLY="gae verifier"] [KEEP=1]
    python -m benchmarks.run [NAME ...] [--keep] | --page

Each part is a program of its own and writes runs/benchmarks/NAME.json: parts may be run one by one, the newest counts.
Then every figure is put beside the one that was kept: it became slower where the quartiles of the two do not touch.
--keep puts the parts that are there into benchmarks/kept/, which is committed, and makes docs/performance.md of it;
--page makes the page alone.
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

from benchmarks.common import Figure, shown

ROOT = Path(__file__).parents[1]
OUT, KEPT, PAGE = ROOT / "runs" / "benchmarks", ROOT / "benchmarks" / "kept", ROOT / "docs" / "performance.md"


@dataclass(frozen=True)
class Part:
    """A benchmark: the question that it answers, the options that it is run with here."""

    question: str
    options: tuple[str, ...] = ()


PARTS = {
    "step_beside_trl": Part("How fast is a whole step?"),
    "throughput": Part("How fast is forward and backward?", ("--lengths", "64", "256", "1024", "--repeats", "3")),
    "collection": Part("What do collecting and grading add to the engines' time?"),
    "rollout_host": Part("What do responses cost rank 0?"),
    "twin": Part("How far off is `plan --simulate`?"),
    "host_costs": Part(
        "What does a step cost the host at the sizes of large runs?", ("--tokens", "49000000", "168000000")
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
    "weight_sync": Part("How fast do weights reach an engine?", ("--layouts", "1x1,2x1")),
    "convert": Part("What does a conversion take?"),
    "saving": Part("What does saving take?"),
    "save_beside_steps": Part("What does an asynchronous save add to a step?"),
}

_INTRODUCTION = """\
Every number below was measured and is given with its date and hardware. Each ratio compares two sides within one run,
round by round, and is given as its median and quartiles; above 1 ours is better. Where "other work" is above 0.2 cores,
trust the ratios but not the seconds.

`make bench` measures everything again and names what has become slower than here by more than its spread;
`make bench ONLY="gae verifier"` selects parts by name. `make bench KEEP=1` stores the results in benchmarks/kept and
rewrites this page from them; do not edit it by hand.
"""
_REST = """
## How far are plans off?

`python -m benchmarks.published` compares plans with step times that other systems publish: [plan.md](plan.md).

## On GPUs

MFU at 1.5B, 7B and of a slice of 32B, decoding steps and the phases of a 1.5B step on one H200:
[gpu.md](gpu.md#state). `python -m benchmarks.gpu` measures MFU in BF16 and FP8, `python -m benchmarks.decode` decoding,
and `pytest -m gpu` runs the tests; `python -m benchmarks.gpu --tiny` runs the code on a CPU.
"""


def figures(found: dict[str, Any]) -> dict[str, Figure]:
    """The figures of a part, by name."""
    return {figure["name"]: Figure(**figure) for figure in found["figures"]}


def slower(kept: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each figure that is below the kept one, their quartiles apart; for one that is gone as well."""
    before, after = figures(kept), figures(now)
    for name, old in before.items():
        new = after.get(name)
        if new is None:
            yield f"{name}: is not measured any more, was {old.ratio:.3g}"
        elif new.high < old.low:
            spread = f"({new.low:.3g} to {new.high:.3g}), was {old.ratio:.3g} ({old.low:.3g} to {old.high:.3g})"
            yield f"{name}: {new.ratio:.3g} {spread}"


def page(kept: dict[str, dict[str, Any]]) -> str:
    """docs/performance.md of the kept parts."""
    missing = [f"{part.question.rstrip('?')} (`{name}`)" for name, part in PARTS.items() if name not in kept]
    not_measured = f"\n## Not measured by this command yet\n\n{'; '.join(missing)}.\n\n" if missing else "\n"
    sections = "".join(_section(name, kept[name]) for name in PARTS if name in kept)
    return _summary(kept) + _INTRODUCTION + sections + not_measured + (KEPT / "earlier.md").read_text() + _REST


def _summary(kept: dict[str, dict[str, Any]]) -> str:
    """The first lines: kept/summary.md, in which {part:figure} is a ratio and {part#row#column} a cell of a table."""
    cells: dict[str, str] = {}
    for name, part in kept.items():
        ratios = {figure: value.ratio for figure, value in figures(part).items()}
        cells |= {
            f"{name}:{figure}": f"{ratio:.2f}" if ratio < 3 else f"{ratio:.0f}" for figure, ratio in ratios.items()
        }
        cells |= {
            f"{name}#{n}#{key}": _short(value) for n, row in enumerate(part["rows"]) for key, value in row.items()
        }
    return re.sub(r"{([^}]+)}", lambda place: cells.get(place[1], "not measured"), (KEPT / "summary.md").read_text())


def _short(value: Any) -> str:
    """A cell in a sentence: 17,100 and 759 and 0.11."""
    if isinstance(value, float) and value < 1000:
        return f"{value:.2g}" if value < 10 else f"{value:.0f}"
    return shown(value)


def _section(name: str, found: dict[str, Any]) -> str:
    headings = list(found["rows"][0])
    table = [headings, ["---"] * len(headings), *([shown(value) for value in row.values()] for row in found["rows"])]
    lines = [
        f"\n## {PARTS[name].question}\n",
        (importlib.import_module(f"benchmarks.{name}").__doc__ or "").strip(),
        "",
    ]
    facts = ", ".join(f"{fact} {value}" for fact, value in found["machine"].items() if fact not in ("date", "hardware"))
    lines += [f"Measured {found['machine']['date']} on {found['machine']['hardware']} ({facts}): {found['title']}.", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in table]
    if found["figures"]:
        lines += ["", "| ratio | median | quartiles |", "|---|---|---|"]
    for figure in figures(found).values():
        lines.append(f"| {figure.name} | **{figure.ratio:.3g}** | {figure.low:.3g} to {figure.high:.3g} |")
    return "\n".join(lines) + "\n"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The parts that are there."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem in PARTS}


def main() -> None:
    """Run parts, compare, keep."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}; all where left out")
    arguments.add_argument("--keep", action="store_true", help="what was measured is what later runs are compared with")
    arguments.add_argument("--page", action="store_true", help="only make the page anew, of what is kept")
    given = arguments.parse_args()
    if given.page:
        PAGE.write_text(page(read(KEPT)))
        return
    if unknown := [name for name in given.names if name not in PARTS]:
        arguments.error(f"{unknown[0]}: there is no such part; there are {', '.join(PARTS)}")
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
    found = [f"{name}: {line}" for name in kept.keys() & now.keys() for line in slower(kept[name], now[name])]
    print(
        "\n".join(["== slower than what is kept", *sorted(found)])
        if found
        else "== nothing is slower than what is kept"
    )
    if given.keep:
        KEPT.mkdir(exist_ok=True)
        for name in now:
            shutil.copyfile(OUT / f"{name}.json", KEPT / f"{name}.json")
        PAGE.write_text(page(read(KEPT)))
        print(f"== {PAGE.relative_to(ROOT)} is made of {len(read(KEPT))} parts")
    if failed:
        raise SystemExit(f"== failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

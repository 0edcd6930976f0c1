"""The figure of explained variance by quarter of the response.

    python -m examples.regression.quarters TITLE=FILE [TITLE=FILE ...]
    [--image docs/images/explained_quarters.png]

FILE is critic_probes/regression.json, which `vapo-megatron critic` writes where values are by
regression; each becomes a panel. Run from the repository's root.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.ablation.figures import BLUE, DPI, GREEN, GREY, INK, ORANGE, PAPER, PURPLE, RED, STYLE
from vapo_megatron.files import atomic_write

COLORS = {
    "position": GREY,
    "siblings": GREEN,
    "prefix": BLUE,
    "surprise": ORANGE,
    "entropy": PURPLE,
    "history": RED,
}
QUARTERS = ("first", "second", "third", "last")


def save_figure(reports: Mapping[str, Mapping[str, Any]], image: Path) -> None:
    """A panel for each report, by title."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(reports), 3.2), facecolor=PAPER, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(reports), sharey=True, squeeze=False)[0]
        for axes, (title, report) in zip(panels, reports.items(), strict=True):
            draw(axes, report)
            axes.set_title(title)
        panels[0].set_ylabel("explained variance of the result")
        panels[0].legend(fontsize=8)
        image.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(image, "wb") as file:
            figure.savefig(file, format="png", dpi=DPI)


def draw(axes: Axes, report: Mapping[str, Any]) -> None:
    """A line for each feature, and one for all together."""
    for name, row in report["rows"].items():
        together = "+" in name
        axes.plot(
            QUARTERS,
            row["quarters"],
            color=INK if together else COLORS[name],
            linewidth=2.4 if together else 1.2,
            marker="o",
            markersize=3,
            label="all of them" if together else name,
        )
    axes.axhline(0, color=GREY, linewidth=0.6)
    axes.set_xlabel("quarter of the response")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", metavar="TITLE=FILE")
    parser.add_argument("--image", type=Path, default=Path("docs/images/explained_quarters.png"))
    given = parser.parse_args(arguments)
    reports = {}
    for report in given.reports:
        title, _, file = report.partition("=")
        if not Path(file).is_file():
            parser.error(f"{report}: expected TITLE=FILE of a file that is there")
        reports[title] = json.loads(Path(file).read_text(encoding="utf-8"))
    save_figure(reports, given.image)
    print(given.image)


if __name__ == "__main__":
    main()

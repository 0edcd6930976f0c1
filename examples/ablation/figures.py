"""The images of docs/ablation.md: accuracy by responses drawn, tabular and transformer."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.ablation.results import Figures
from vapo_megatron.files import atomic_write

DPI = 130
INK, GREY, PAPER = "#1e293b", "#64748b", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE, RED = "#2563eb", "#ea7317", "#16a34a", "#7c3aed", "#dc2626"
# Any: matplotlib wants the literal names of its settings
STYLE: Any = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
# Of both stages: what removes a part of VAPO is thin, what is another algorithm is dashed.
COLORS = {
    "vapo": INK,
    "no_value_pretraining": RED,
    "no_decoupled": ORANGE,
    "no_length_adaptive": GREEN,
    "no_clip_higher": "#0d9488",
    "no_token_level": PURPLE,
    "no_nll": "#f472b6",
    "no_groups": "#a16207",
    "ppo": RED,
    "vc_ppo": ORANGE,
    "grpo": BLUE,
    "dapo": GREEN,
}
OTHERS = ("ppo", "vc_ppo", "grpo", "dapo")
SHORT = {
    "without_value_pretraining": "no_value_pretraining",
    "without_decoupled_gae": "no_decoupled",
    "without_length_adaptive_gae": "no_length_adaptive",
    "without_clip_higher": "no_clip_higher",
    "without_token_level_loss": "no_token_level",
    "without_positive_nll": "no_nll",
    "without_group_sampling": "no_groups",
}


def save_tabular_figure(figures: Figures, path: Path) -> None:
    """A panel for each setting: mean accuracy over seeds by responses drawn."""
    with matplotlib.rc_context(STYLE):
        figure, panels = _figure(len(figures["settings"]))
        for axes, (name, setting) in zip(panels, figures["settings"].items(), strict=True):
            axes.set_title(name)
            for row, curve in setting["curves"].items():
                _line(
                    axes, row, setting["rows"][row]["title"], curve["responses"], curve["accuracy"]
                )
        _finish(figure, panels, path)


def save_transformer_figure(figures: Figures, path: Path) -> None:
    """A panel for each setting: mean accuracy over finished seeds by responses drawn."""
    with matplotlib.rc_context(STYLE):
        settings = {
            name: s
            for name, s in figures["settings"].items()
            if any(r["seeds"] for r in s["rows"].values())
        }
        figure, panels = _figure(len(settings))
        for axes, (name, setting) in zip(panels, settings.items(), strict=True):
            axes.set_title(name)
            for row in (name for name, row in setting["rows"].items() if row["seeds"]):
                seeds = setting["rows"][row]["seeds"]
                steps = sorted(map(int, next(iter(seeds.values()))["accuracy"]))
                responses = [
                    _mean([found["responses"][step - 1] for found in seeds.values()])
                    for step in steps
                ]
                accuracy = [
                    _mean([found["accuracy"][str(step)] for found in seeds.values()])
                    for step in steps
                ]
                title, whole = setting["rows"][row]["title"], len(setting["rows"]["vapo"]["seeds"])
                label = title if len(seeds) == whole else f"{title} ({len(seeds)} of {whole} seeds)"
                _line(axes, SHORT.get(row, row), label, responses, accuracy)
        _finish(figure, panels, path)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _figure(panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(8.0, 4.8 * panels), 5.2), layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, panels, place + 1) for place in range(panels)]


def _line(axes: Axes, row: str, label: str, x: list[float], y: list[float]) -> None:
    axes.plot(
        x,
        y,
        color=COLORS.get(row, GREY),
        label=label,
        linewidth=2.6 if row == "vapo" else 1.3,
        linestyle="--" if row in OTHERS else "-" if row in COLORS else ":",
        zorder=3 if row == "vapo" else 2,
    )


def _finish(figure: Figure, panels: list[Axes], path: Path) -> None:
    lines: dict[str, Artist] = {}
    for axes in panels:
        axes.set_xlabel("responses drawn, value pretraining counted", color=GREY)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, handle)
    panels[0].set_ylabel("accuracy", color=GREY)
    handles, labels = list(lines.values()), [str(label) for label in lines]
    columns = 5 if len(panels) > 1 else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=DPI)

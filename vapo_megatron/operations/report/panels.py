"""The panels of curves in a report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vapo_megatron.monitoring import names

Rows = Sequence[Mapping[str, Any]]

# Points of a curve; of a longer run only every n-th point is drawn.
_MOST_POINTS = 1500


@dataclass(frozen=True)
class Curve:
    """A metric in a panel. smooth: drawn faint, with a strong moving mean. low, high: metrics that
    bound it; band: what lies between them, for the legend."""

    metric: str
    label: str
    smooth: bool = False
    points: bool = False
    low: str = ""
    high: str = ""
    band: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves over steps, or over `counter`. stacked: areas on top of each other.

    bottom, top: the range of the axis is cut there; points below a logarithmic one lie on it.
    line: a level to compare with.
    """

    title: str
    curves: tuple[Curve, ...]
    hint: str = ""
    stacked: bool = False
    log: bool = False
    bottom: float | None = None
    top: float | None = None
    line: float | None = None
    counter: str = "step"


def _by_turn(name: str) -> tuple[Curve, ...]:
    return tuple(
        Curve(f"agent/{name}/turn_{turn}", f"turn {turn}", smooth=True) for turn in range(1, 9)
    )


PANELS: tuple[Panel, ...] = (
    Panel(
        "Response length (tokens)",
        (
            Curve(
                names.LENGTH,
                "mean",
                low=names.LENGTH_MIN,
                high=names.LENGTH_MAX,
                band="shortest to longest",
            ),
        ),
        "Falls while guesses go, then rises with accuracy. A collapse within some ten steps: look "
        "at the critic.",
        bottom=0,
    ),
    Panel(
        "Policy entropy (nats per token)",
        (Curve(names.ENTROPY, "entropy"),),
        "Falls slowly, then levels off. Near 0 within few steps: learning rate, or clip_high.",
        bottom=0,
    ),
    Panel(
        "Fine-tuning loss",
        (Curve("sft/nll_loss", "negative log-likelihood"),),
        "Falls and levels off.",
        bottom=0,
    ),
    Panel("Value loss", (Curve(names.VALUE_LOSS, "value loss"),), "", bottom=0),
    Panel(
        "Explained variance: critic, free baselines",
        (
            Curve(names.EXPLAINED_VARIANCE, "critic"),
            Curve(names.EXPLAINED_CALIBRATED, "critic, calibrated by past steps"),
            Curve(names.BASELINE_LOO, "mean of the other responses", smooth=True),
            Curve(names.BASELINE_POSITION, "position in the response", smooth=True),
        ),
        "The critic earns its cost where it is above both baselines.",
        bottom=-1,
        top=1,
        line=0,
    ),
    Panel(
        "Trust in the critic, and its weight in calibrated values",
        (
            Curve(names.TRUST, "trust in differences of values"),
            Curve(names.CRITIC_SLOPE, "weight of the critic", smooth=True),
            Curve(names.GROUP_WEIGHT, "weight of the group's mean", smooth=True),
        ),
        "Near 0: the critic explains nothing, and advantages are returns less a baseline.",
        line=0,
    ),
    Panel(
        "Share of the variance of returns by feature, values by regression",
        (
            *(
                Curve(f"{names.REGRESSION_SHARE}{feature}", feature, smooth=True)
                for feature in names.REGRESSION_FEATURES
            ),
            Curve(names.SHARED_PREFIX, "states that a sibling passed", smooth=True),
        ),
        "The shares add up to what calibrated values explain. Without shared states, prefix is "
        "siblings.",
        line=0,
    ),
    Panel(
        "Value − return, by position in the response",
        tuple(
            Curve(f"critic/value_bias_{place}", f"{place} %", smooth=True)
            for place in names.BIAS_POSITIONS
        ),
        "Near 0 everywhere. Growing towards the start: value targets forget the reward on the way.",
        line=0,
    ),
    Panel(
        "KL to the rollout policy, clip fractions",
        (
            Curve(names.TRAIN_INFER_KL, "KL (nats)", smooth=True),
            Curve(names.CLIP_HIGH, "clipped high", smooth=True),
            Curve(names.CLIP_LOW, "clipped low", smooth=True),
        ),
        "KL constant and small; clip fractions of thousandths to a few hundredths. What is below "
        "1e-6 is drawn there.",
        log=True,
        bottom=1e-6,
    ),
    Panel(
        "Gradient norms",
        (
            Curve(names.ACTOR_GRAD_NORM, "actor", smooth=True),
            Curve(names.CRITIC_GRAD_NORM, "critic", smooth=True),
        ),
        "Level, with few spikes.",
        log=True,
    ),
    Panel(
        "Episodes: turns, tool errors",
        (
            Curve(names.AGENT_TURNS, "turns", smooth=True),
            Curve("agent/tool_errors", "tool errors", smooth=True),
        ),
        "Means over episodes. Turns that fall to 1: agents answer without their tools.",
        bottom=0,
    ),
    *(
        Panel(f"Episodes, by turn: {title}", _by_turn(name), bottom=0)
        for name, title in (
            ("episodes", "share that have the turn"),
            ("tokens_written", "tokens written"),
            ("tokens_observed", "tokens observed before it"),
            ("engine_seconds", "seconds at the engines"),
            ("tool_seconds", "seconds of tools after it"),
            ("tool_errors", "tool errors"),
        )
    ),
    Panel(
        "Tokens per second", (Curve(names.TOKENS_PER_SECOND, "tokens per second"),), "", bottom=0
    ),
    Panel(
        "Value pretraining: loss and explained variance",
        (
            Curve(f"{names.PRETRAINING}value_loss", "value loss"),
            Curve(f"{names.PRETRAINING}explained_variance", "explained variance"),
        ),
        "Explained variance rises and levels off before the policy moves.",
        bottom=-1,
        top=1,
        line=0,
        counter=names.own_counter(names.PRETRAINING),
    ),
)


def panels_of(rows: Rows) -> list[Panel]:
    """The panels for which these rows have values, with the curves that have any."""
    present = {name for row in rows for name, value in row.items() if value is not None}
    shown = [_accuracy(present, rows), *PANELS, _phases(rows)]
    kept = (
        replace(panel, curves=tuple(c for c in panel.curves if c.metric in present))
        for panel in shown
    )
    return [panel for panel in kept if panel.curves]


def series(rows: Rows, name: str) -> tuple[list[float], list[float]]:
    """Steps (or the metric's own counter) and finite values of a metric."""
    counter = names.own_counter(name)
    points = [
        (row.get(counter, row["step"]), row[name]) for row in rows if row.get(name) is not None
    ]
    points = points[:: -(-len(points) // _MOST_POINTS) or 1]
    return [float(step) for step, _ in points], [float(value) for _, value in points]


def _accuracy(present: Iterable[str], rows: Rows) -> Panel:
    curves = [Curve(names.ACCURACY, "accuracy in training")]
    # A reward of 0 or 1 without shaping is the accuracy: one line says it.
    if any(row.get(names.REWARD) != row.get(names.ACCURACY) for row in rows):
        curves.append(Curve(names.REWARD, "reward in training"))
    for name in sorted(
        n for n in present if n.startswith(names.EVALUATION) and ("accuracy" in n or "avg@" in n)
    ):
        low, high = names.interval_of(name)
        curves.append(
            Curve(
                name,
                name.removeprefix(names.EVALUATION).replace("_avg@", " avg@"),
                points=True,
                low=low,
                high=high,
            )
        )
    hint = (
        "Training rises first, evaluation follows. Evaluations use their own top_p, so compare "
        "each curve with its own "
        "start, not with training. If one falls while training rises, read samples/."
    )
    return Panel("Accuracy and reward", tuple(curves), hint)


def _phases(rows: Rows) -> Panel:
    counter = names.own_counter(names.PRETRAINING)
    timed = [row for row in rows if row.get(names.STEP_TIME) is not None and counter not in row]
    phase_names = dict.fromkeys(
        name for row in timed for name in row if name.startswith(names.TIME)
    )
    # Occasional phases (an evaluation, a checkpoint) would only be spikes that flatten everything
    # else.
    often = [
        name
        for name in phase_names
        if name != names.STEP_TIME and 2 * sum(name in row for row in timed) >= len(timed)
    ]
    often.sort(key=lambda name: -sum(row.get(name) or 0.0 for row in timed))
    curves = tuple(
        Curve(name, name.removeprefix(names.TIME).replace("_", " ")) for name in often[:10]
    )
    return Panel("Time per phase (seconds per step)", curves, "", stacked=True, bottom=0)

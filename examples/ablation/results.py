"""From the run directories to the figures that page and images are made of: measured.json."""

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from examples.ablation.ablation_config import AblationConfig, Row, Setting
from examples.ablation.execute import costs
from examples.ablation.plan import EVALUATION
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.monitoring.metrics import read_metrics

# What the page shows of every step, under the names of figures.
OF_A_STEP = {
    "correct": names.ACCURACY,
    "length": names.LENGTH,
    "length_min": names.LENGTH_MIN,
    "length_max": names.LENGTH_MAX,
    "clip_low": names.CLIP_LOW,
    "clip_high": names.CLIP_HIGH,
    "kl": "actor/approx_kl",
    "lambda": "advantage/lambda_mean",
    "explained": names.EXPLAINED_VARIANCE,
    "baseline_loo": names.BASELINE_LOO,
    "baseline_position": names.BASELINE_POSITION,
    "gain": names.CRITIC_GAIN,
}
OF_A_CRITIC = (
    "explained_variance",
    "baseline_loo_ev",
    "baseline_position_ev",
    "gain",
    "calibration_slope",
)

Figures = dict[str, Any]


def collect(
    config: AblationConfig, out: Path, finished: set[str], refused: dict[str, str]
) -> Figures:
    """The figures of all jobs that are finished (names such as steps/seed1/vapo), and why others
    were not run."""
    return {
        "seeds": list(config.seeds),
        "steps": config.steps,
        "least_explained": config.least_explained,
        "facts": environment_facts(),
        "settings": {
            setting.name: _setting(config, setting, out / setting.name, finished, refused)
            for setting in config.settings
        },
    }


def _setting(
    config: AblationConfig,
    setting: Setting,
    folder: Path,
    finished: set[str],
    refused: dict[str, str],
) -> Figures:
    used = {name: cost["cpu_seconds"] for name, cost in costs(folder.parent).items()}
    critics = {}
    for seed in config.seeds:
        if (name := f"{setting.name}/seed{seed}/value_critic") in finished:
            critics[str(seed)] = read_critic(
                folder / f"seed{seed}" / "value_critic", used.get(name)
            )
    rows = {}
    for row in config.rows_of(setting):
        names_of = {seed: f"{setting.name}/seed{seed}/{row.name}" for seed in config.seeds}
        rows[row.name] = row.model_dump(mode="json") | {
            "seeds": {
                str(seed): read_seed(
                    folder / f"seed{seed}" / row.name, row, critics[str(seed)], used.get(name)
                )
                for seed, name in names_of.items()
                if name in finished and str(seed) in critics
            },
            "refused": {
                str(seed): refused[name] for seed, name in names_of.items() if name in refused
            },
        }
    described = setting.model_dump(mode="json", include={"about", "task", "overrides"})
    return described | {"critics": critics, "rows": rows}


def read_critic(run_dir: Path, cpu_seconds: float | None) -> Figures:
    """Of a value pretraining: accuracy of the policy that stood still, held-out figures at its end,
    its costs."""
    rows = read_metrics(run_dir)
    start = next(row[EVALUATION] for row in rows if row["step"] == 0 and EVALUATION in row)
    trained = [row for row in rows if f"{names.PRETRAINING}explained_variance" in row]
    last = {name: trained[-1].get(f"{names.PRETRAINING}{name}") for name in OF_A_CRITIC}
    biases = [
        abs(trained[-1][f"{names.PRETRAINING}value_bias_{position}"])
        for position in names.BIAS_POSITIONS
    ]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    return {
        "accuracy": start,
        "responses": config["value_pretraining"]["iterations"] * _responses(config),
        "updates": trained[-1][names.own_counter(names.PRETRAINING)],
        "cpu_seconds": cpu_seconds,
        "largest_bias": max(biases),
    } | last


def _responses(config: dict[str, Any]) -> int:
    return config["batch"]["prompts_per_step"] * config["batch"]["samples_per_prompt"]


def read_seed(run_dir: Path, row: Row, critic: Figures, cpu_seconds: float | None) -> Figures:
    """The metrics of a finished run: accuracy by step, and what each step cost and showed.

    Responses are counted as drawn, with those that dynamic sampling drops, and with those of value
    pretraining where the row starts from its critic; seconds of the processor likewise, those of a
    run spread evenly over its steps.
    """
    steps = [found for found in read_metrics(run_dir) if found["step"] > 0]
    pretrained = row.critic == "pretrained"
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    whole, group = _responses(config), config["batch"]["samples_per_prompt"]
    prompts = [step.get("dynamic_sampling/prompts") for step in steps]
    drawn = [whole if count is None else int(count * group) for count in prompts]
    figures: Figures = {
        "accuracy": {str(step["step"]): step[EVALUATION] for step in steps if EVALUATION in step},
        "responses": list(accumulate(drawn, initial=critic["responses"] if pretrained else 0))[1:],
    }
    before = critic["cpu_seconds"] if pretrained else 0.0
    if cpu_seconds is not None and before is not None:
        figures["cpu_seconds"] = [
            before + cpu_seconds * n / len(steps) for n in range(1, len(steps) + 1)
        ]
    for name, metric in OF_A_STEP.items():
        if metric in steps[0]:
            figures[name] = [step.get(metric) for step in steps]
    if prompts[0] is not None:
        del figures[
            "correct"
        ]  # of the groups that were kept: those that are neither all right nor all wrong
    return figures


def reached(figures: Figures, start: float, threshold: float, by: str) -> float | None:
    """What `by` ("responses", "cpu_seconds") stood at when an evaluation first said `threshold`;
    None: never."""
    if start >= threshold:
        return 0.0
    for step, accuracy in sorted((int(step), value) for step, value in figures["accuracy"].items()):
        if accuracy >= threshold:
            return float(figures[by][step - 1])
    return None


def write_figures(figures: Figures, path: Path) -> None:
    """Write figures as JSON."""
    with atomic_write(path) as file:
        json.dump(figures, file, indent=1)


def read_figures(path: Path) -> Figures:
    """Figures that were written.

    Raises:
        BadInput: there are none.
    """
    if not path.is_file():
        raise BadInput(f"{path}: no such file; expected measured figures")
    return json.loads(path.read_text())


def finals(row: Figures, steps: int) -> dict[int, float]:
    """Accuracy after so many steps, by seed."""
    return {int(seed): found["accuracy"][str(steps)] for seed, found in row["seeds"].items()}


def mean_of_rollouts(row: Figures, steps: int) -> dict[int, float]:
    """Mean accuracy of the rollouts of so many steps, by seed; nothing where groups are dropped
    from them."""
    return {
        int(seed): mean(known(found["correct"][:steps]))
        for seed, found in row["seeds"].items()
        if "correct" in found
    }


def mean_over_steps(row: Figures, steps: int) -> dict[int, float]:
    """Mean accuracy of all evaluations up to so many steps, by seed."""
    found = {
        int(seed): [value for step, value in figures["accuracy"].items() if int(step) <= steps]
        for seed, figures in row["seeds"].items()
    }
    return {seed: sum(values) / len(values) for seed, values in found.items()}


def accuracy_at(
    figures: Figures, start: tuple[float, float], by: str, amount: float
) -> float | None:
    """Accuracy when `by` ("responses", "cpu_seconds") stood at amount, between evaluations in a
    straight line.

    start: what `by` stood at before the first step, and the accuracy up to there. None beyond the
        last evaluation, and
    where `by` was not measured.
    """
    evaluations = sorted((int(step), value) for step, value in figures["accuracy"].items())
    points = [
        start,
        *((figures[by][step - 1], value) for step, value in evaluations if by in figures),
    ]
    if amount <= start[0]:
        return start[1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if amount <= x1:
            return y0 + (y1 - y0) * (amount - x0) / (x1 - x0)
    return None


def known(values: Sequence[float | None]) -> list[float]:
    """Those that were measured."""
    return [value for value in values if value is not None]

"""Write docs/alarms.md: the alarms of the code, and when each goes off on public training
curves."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vapo_megatron.config.run import AlarmsConfig
from vapo_megatron.errors import told_in_one_line
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.alarms import ALARMS, Alarms

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "alarms.md"
# Public curves are not part of the repository.
CURVES = ROOT.parent / "shared" / "data" / "curves"
CURVES_BEGIN = "## On public training curves"

Row = dict[str, float]
Read = Callable[[Mapping[str, float]], Row]

INTRODUCTION = """\
# Alarms

<!-- Written by tools/describe_alarms.py from vapo_megatron/monitoring/alarms.py; do not edit. -->

An alarm is a red line on the console when a fault begins, and `alarm/<name>` = 1 in `metrics.jsonl`
(and TensorBoard, trackers, `report.html`) for every step that has it. The last column says what to
do first.

Alarms compare each step's metrics with fixed limits and with earlier steps of the run (medians and
median absolute deviations). An alarm in `monitoring.alarms.stop` also ends the run after the step,
with exit code 1 and without saving, so the last checkpoints predate the fault.
`monitoring.alarms.off` lists alarms that are never raised.

| alarm | condition | meaning | what to do first |
|---|---|---|---|
"""

ABLATION = """\
## On the runs of the ablation

`examples/ablation`, five seeds per method, after a shorter cold start (250 steps) than in [ablation.md](ablation.md): accuracy
of the last two steps, seeds without an alarm, and the first step of each alarm, one per seed. Without decoupled GAE, without
positive NLL and (in three seeds) without length-adaptive GAE the accuracy falls again. Alarms removed since are left
out; `evaluation_falls` also heeded lengths and pass@k then.

| run | steps | accuracy at the end | silent | alarms |
|---|---|---|---|---|
| VAPO | 16 | 0.60 to 0.73 | 4 | `value_below_baseline` 15, `evaluation_falls` 16, of the seed that ends lowest |
| without clip-higher | 16 | 0.51 to 0.75 | 4 | `critic_fault` 10 |
| without group sampling | 16 | 0.57 to 0.73 | 3 | `evaluation_falls` 16, 16 |
| without the token-level loss | 16 | 0.52 to 0.64 | 3 | `evaluation_falls` 12, 16 |
| without value pretraining | 16 | 0.59 to 0.75 | 1 | `critic_fault` 1, 1, `value_bias` 6, 7, `value_below_baseline` 8 |
| without length-adaptive GAE | 16 | 0.36 to 0.71 | 2 | `value_bias` 3, `evaluation_falls` 12, 16, 16, `value_below_baseline` 14, 14 |
| without the NLL of positives | 16 | 0.15 to 0.37, from up to 0.51 | 2 | `value_bias` 9, `evaluation_falls` 12, 12, 16 |
| without decoupled GAE | 16 | 0.09 to 0.59, from up to 0.68 | 0 | `value_bias` 5, 6, 7, 8, 14, `critic_fault` 8, 10, 10, 11, `value_below_baseline` 10, 12, 14, 15, 15, `evaluation_falls` 12, 16, 16, 16 |
| VC-PPO | 16 | 0.64 to 0.77 | 5 | |
| PPO | 16 | 0.68 to 0.76 | 1 | `critic_fault` 1, `value_bias` 5, 6, 6 |
| DAPO | 16 | 0.63 to 0.77 | 5 | |
| GRPO | 32 | 0.73 to 0.86 | at least 1 | `gradient_spike` 23, `evaluation_falls` 28, 28, 28 |

"""  # noqa: E501


@dataclass(frozen=True)
class Curve:
    """A public training curve.

    Attributes:
        file: of the curve, without its ending.
        run: value of the column `run`; None: the only one.
        what: the run, in words.
        trouble: what went wrong and when, in words; None for a healthy run.
        read: from its columns to metrics of ours.
        told_from, told_by: steps between which the first alarm has to come where there was trouble.
    """

    file: str
    run: str | None
    what: str
    trouble: str | None
    read: Read
    told_from: int = 1
    told_by: int = 0


def _columns(columns: Mapping[str, str], scale: Mapping[str, float] | None = None) -> Read:
    return lambda row: {
        ours: row[theirs] * (scale or {}).get(ours, 1.0)
        for theirs, ours in columns.items()
        if theirs in row
    }


_RASBT = _columns(
    {
        "reward_avg": names.ACCURACY,
        "avg_response_len": names.LENGTH,
        "entropy_avg": names.ENTROPY,
        "eval_acc": names.EVALUATION + "math500_avg@1",
    },
    {names.EVALUATION + "math500_avg@1": 0.01},
)


def _rasbt(row: Mapping[str, float]) -> Row:
    found = _RASBT(row)
    # In one of the runs the reward is the grade and one for the format.
    found[names.ACCURACY] -= row.get("format_reward_avg", 0.0)
    return found | {names.REWARD: row["reward_avg"]}


_VERL = _columns(
    {
        "actor/entropy": names.ENTROPY,
        "actor/grad_norm": names.ACTOR_GRAD_NORM,
        "actor/pg_clipfrac": names.CLIP_HIGH,
        "critic/rewards/mean": names.REWARD,
        "critic/score/mean": names.ACCURACY,
        "response_length/mean": names.LENGTH,
        "response_length/clip_ratio": names.TRUNCATED,
        "rollout_corr/k3_kl": names.TRAIN_INFER_KL,
        "val-core/openai/gsm8k/acc/mean@1": names.EVALUATION + "gsm8k_avg@1",
        "val-core/DigitalLearningGmbH/MATH-lighteval/acc/mean@1": names.EVALUATION + "math_avg@1",
    }
)


def _verl(row: Mapping[str, float]) -> Row:
    found = _VERL(row)
    # The least that it can be.
    found[names.FRAC_ZERO_STD_GROUPS] = float(
        row.get("critic/rewards/max", 1) == row.get("critic/rewards/min", 0)
    )
    return found


_NEMO = _columns(
    {
        "train/approx_entropy": names.ENTROPY,
        "train/grad_norm": names.ACTOR_GRAD_NORM,
        "train/reward": names.REWARD,
        "train/mean_gen_tokens_per_sample": names.LENGTH,
        "train/gen_kl_error": names.TRAIN_INFER_KL,
        "train/truncation_rate": names.TRUNCATED,
    }
)


def _nemo(row: Mapping[str, float]) -> Row:
    mixed = row["train/baseline_reward/pct_mixed"] / 100
    return _NEMO(row) | {names.ACCURACY: row["train/reward"], names.FRAC_ZERO_STD_GROUPS: 1 - mixed}


_AREAL = _columns(
    {
        "grpo_actor/entropy/avg": names.ENTROPY,
        "grpo_actor/grad_norm": names.ACTOR_GRAD_NORM,
        "grpo_actor/task_reward/avg": names.REWARD,
        "grpo_actor/final_reward/avg": names.ACCURACY,
        "grpo_actor/no_eos_ratios/avg": names.TRUNCATED,
        "grpo_actor/clip_ratio/avg": names.CLIP_HIGH,
        "grpo_actor/seq_len/avg": names.LENGTH,
    }
)

CURVES_TRIED: tuple[Curve, ...] = (
    Curve(
        "nemo_grpo_qwen2.5-7b",
        None,
        "NeMo-RL GRPO, Qwen2.5-7B",
        "weights lost in transfer after step 1: reward 0, entropy 11 nats from step 2",
        _nemo,
        1,
        2,
    ),
    Curve(
        "verl_grpo_gsm8k_qwen3-0.6b",
        None,
        "verl GRPO, GSM8K, Qwen3-0.6B",
        "responses cut at 256 tokens, reward 0 from step 1",
        _verl,
        1,
        5,
    ),
    Curve(
        "rasbt_7_5_plus_kl_metrics",
        None,
        "GRPO with KL, MATH, Qwen3-0.6B",
        "entropy 10 nats, reward 0 from about step 55",
        _rasbt,
        20,
        55,
    ),
    Curve(
        "rasbt_7_6_plus_format_reward_metrics",
        None,
        "GRPO with format reward, Qwen3-0.6B reasoning",
        "evaluation 56 % at 50, 46 % at 150, 32 % at 200",
        _rasbt,
        101,
        170,
    ),
    Curve(
        "rasbt_7_3_plus_tracking_metrics",
        None,
        "GRPO, MATH, Qwen3-0.6B",
        "accuracy falls from step 230, 0 at 250",
        _rasbt,
        150,
        230,
    ),
    Curve(
        "rasbt_ch06_rlvr_grpo_original_no_kl_metrics",
        None,
        "the same, without entropy",
        "accuracy falls from step 230, 0 at 250",
        _rasbt,
        150,
        260,
    ),
    Curve("verl_grpo_gsm8k_console_log6", None, "verl GRPO, Qwen2-7B-Instruct", None, _verl),
    Curve("verl_grpo_gsm8k_qwen3-30b-a3b", None, "verl GRPO, GSM8K, Qwen3-30B-A3B", None, _verl),
    Curve(
        "rasbt_7_4_plus_clip_ratio_metrics",
        None,
        "GRPO with clipping, MATH, Qwen3-0.6B",
        "none up to 470; then entropy rises from 0.1 nats to up to 3.5",
        _rasbt,
        471,
        500,
    ),
    Curve(
        "areal_grpo_gsm8k", "1", "AReaL GRPO, GSM8K, Qwen2.5-0.5B, 8 samples a step", None, _AREAL
    ),
    Curve("areal_grpo_gsm8k", "2", "the same, a second run", None, _AREAL),
)


def main(
    out: Annotated[Path, typer.Option(help="file to write")] = PAGE,
    curves: Annotated[
        Path, typer.Option(help="folder of the public curves; without it their table stays")
    ] = CURVES,
) -> None:
    """Write the page."""
    with told_in_one_line("describe_alarms"):
        before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        kept = before[before.index(CURVES_BEGIN) :] if CURVES_BEGIN in before else ""
        with atomic_write(out) as file:
            file.write(alarms_part() + (curves_part(curves) if curves.is_dir() else kept))
        typer.echo(out)


def alarms_part() -> str:
    """The page up to the curves."""
    lines = [f"| `{a.name}` | {a.threshold} | {a.meaning} | {a.remedy} |" for a in ALARMS]
    return INTRODUCTION + "\n".join(lines) + "\n\n" + ABLATION


def curves_part(folder: Path) -> str:
    """What the alarms say of public curves."""
    text = (
        f"{CURVES_BEGIN}\n\nThe first step of each alarm on published runs of other trainers. Runs "
        "with one group of responses per step (Qwen3-0.6B on MATH, AReaL) are the noisiest. "
        "Alarms on metrics that a curve lacks (values, KL) are tested on synthetic histories in "
        "`tests/monitoring/test_alarms.py`.\n\n| "
        "run | steps | trouble | alarms |\n|---|---|---|---|\n"
    )
    for curve in CURVES_TRIED:
        rows = read_curve(folder, curve)
        first = first_alarms(rows)
        said = ", ".join(
            f"`{name}` {step}" for name, step in sorted(first.items(), key=lambda item: item[1])
        )
        text += (
            f"| {curve.what} | {len(rows)} | {curve.trouble or 'none: healthy'} | {said or 'none'} "
            f"|\n"
        )
    return text


def read_curve(folder: Path, curve: Curve) -> list[Row]:
    """The rows of a curve, as metrics of ours; empty cells are left out."""
    with (folder / f"{curve.file}.csv").open(newline="", encoding="utf-8") as file:
        table = [
            row for row in csv.DictReader(file) if curve.run is None or row["run"] == curve.run
        ]
    numbers = [{name: float(cell) for name, cell in row.items() if cell} for row in table]
    # Rows of an attempt that came to nothing precede those of the run in one of the files.
    first = max(
        number
        for number, row in enumerate(numbers)
        if row["step"] == min(r["step"] for r in numbers)
    )
    return [{"step": row["step"]} | curve.read(row) for row in numbers[first:]]


def first_alarms(rows: Sequence[Row]) -> dict[str, int]:
    """The step that each alarm first goes off at."""
    alarms = Alarms(AlarmsConfig())
    first = dict[str, int]()
    for row in rows:
        for name in alarms.check(row):
            first.setdefault(name, int(row["step"]))
    return first


if __name__ == "__main__":
    typer.run(main)

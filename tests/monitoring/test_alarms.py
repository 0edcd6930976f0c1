"""Each alarm goes off at its trouble, once, early, and not without it: on made histories and on
public curves."""

import math
import random
from collections.abc import Callable
from typing import Any, get_args

import pytest

from tools.describe_alarms import (
    CURVES,
    CURVES_BEGIN,
    CURVES_TRIED,
    PAGE,
    alarms_part,
    curves_part,
    first_alarms,
    read_curve,
)
from vapo_megatron.config.run import AlarmName, AlarmsConfig
from vapo_megatron.monitoring.alarms import ALARMS, Alarms

STEPS = 120
ONSET = 60
Row = dict[str, Any]


def healthy(step: int, noise: random.Random) -> Row:
    """A run that learns: as in the quickstart, with the noise of small batches."""
    done = step / STEPS

    def noisy(value: float, share: float = 0.15) -> float:
        return value * noise.lognormvariate(0, share)

    learnt = 0.2 + 0.6 * done
    accuracy = min(1.0, max(0.0, learnt + noise.gauss(0, 0.05)))
    row = {
        "step": step,
        "accuracy/mean": accuracy,
        "reward/mean": 2 * accuracy - 1,
        "reward/min": -1.0,
        "reward/max": 1.0,
        "accuracy/copied": 0.02 * noise.random(),
        "reward/failed": 0.0,
        "response_length/mean": noisy(400 * (1 + done)),
        "response_length/truncated": 0.05 + noise.random() / 10,
        "actor/entropy": noisy(0.6 * math.exp(-2 * done)),
        "actor/train_infer_kl": noisy(4e-4, 0.3),
        "actor/grad_norm": noisy(0.3, 0.4),
        "critic/grad_norm": noisy(2.0, 0.4),
        "skipped_updates/total": 1.0,
        "skipped_updates/unfinished": 1.0,
        "agent/broken": 0.01,
        "agent/turns": noisy(1 + 3 * (1 - done / 2)),
        "critic/gain": 0.1 + noise.gauss(0, 0.08),
        # As of the tabular vapo_direct: nothing at first, and ever less when nearly all is solved.
        "critic/trust": min(1.0, done * 3) * noise.uniform(0.3, 1),
        **{f"critic/value_bias_{p}": noise.gauss(0, 0.05) for p in (0, 25, 50, 75, 95)},
    }
    if step % 10 == 0:
        row["evaluation/gsm8k_avg@4"] = learnt - 0.02 + noise.gauss(0, 0.015)
        # What an evaluation records beside it and may fall: a policy that learns to stop.
        row["evaluation/gsm8k_pass@4"] = 0.95 - 0.2 * done
        row["evaluation/gsm8k_response_length"] = noisy(500 - 200 * done)
        row["evaluation/gsm8k_truncated"] = 0.5 * (1 - done)
    return row


# What goes wrong from step ONSET on, by the alarm that has to say so, and within how many steps.
# `since` counts from 0.
UNHEALTHY: dict[str, tuple[Callable[[Row, int], Row], int]] = {
    "entropy_explosion": (lambda row, since: {"actor/entropy": 0.3 * 1.3**since}, 12),
    "accuracy_collapse": (lambda row, since: {"accuracy/mean": max(0.0, 0.5 - since / 20)}, 25),
    "value_below_baseline": (lambda row, since: {"critic/gain": row["critic/gain"] - 0.3}, 8),
    "critic_untrusted": (lambda row, since: {"critic/trust": 0.043 * (since * 7 % 10) / 10}, 12),
    "value_bias": (
        lambda row, since: {f"critic/value_bias_{p}": -0.9 + p / 100 for p in (0, 25, 50, 75, 95)},
        3,
    ),
    "critic_fault": (lambda row, since: {"critic/fault_sign": 1.0}, 1),
    "evaluation_falls": (
        lambda row, since: {
            name: 0.5 - since / 100 for name in row if name.startswith("evaluation/")
        },
        21,
    ),
    "train_infer_gap": (lambda row, since: {"actor/train_infer_kl": 0.01}, 3),
    "gradient_spike": (
        lambda row, since: {"actor/grad_norm": 6.0 if since == 0 else row["actor/grad_norm"]},
        1,
    ),
    "skipped_updates": (
        lambda row, since: {"skipped_updates/total": 2.0, "skipped_updates/nonfinite_loss": 1.0},
        1,
    ),
    "truncated_text": (lambda row, since: {"response_length/truncated": 0.6}, 3),
    "failed_grades": (lambda row, since: {"reward/failed": 0.06}, 1),
    "broken_episodes": (lambda row, since: {"agent/broken": 0.1}, 3),
    "tools_unused": (lambda row, since: {"agent/turns": 1 + 2 * 0.7**since}, 8),
    "copied_answers": (lambda row, since: {"accuracy/copied": min(1.0, since / 10)}, 5),
    "length_collapse": (
        lambda row, since: {"response_length/mean": 150.0, "accuracy/mean": 0.95},
        3,
    ),
    "nothing_learnt": (lambda row, since: {"actor/grad_norm": 0.0}, 10),
}


def run(seed: int, name: str | None = None) -> list[Row]:
    """The rows of a healthy run, or of one that goes wrong in the way that the alarm is for."""
    noise = random.Random(seed)
    rows = [healthy(step, noise) for step in range(1, STEPS + 1)]
    if name is not None:
        for row in rows[ONSET - 1 :]:
            row.update(UNHEALTHY[name][0](row, row["step"] - ONSET))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_no_alarm(seed: int) -> None:
    assert first_alarms(run(seed)) == {}


@pytest.mark.parametrize("name", UNHEALTHY)
def test_unhealthy_run_raises_its_alarm_in_time_and_not_before(name: str) -> None:
    within = UNHEALTHY[name][1]
    for seed in range(5):
        first = first_alarms(run(seed, name)).get(name)
        assert first is not None and ONSET <= first < ONSET + within, (seed, first)


def test_every_alarm_has_its_unhealthy_run_and_its_action() -> None:
    assert [alarm.name for alarm in ALARMS] == list(get_args(AlarmName)), (
        "name an alarm in config/run.py as well"
    )
    missing = set(get_args(AlarmName)) ^ set(UNHEALTHY)
    assert not missing, (
        "UNHEALTHY of this file has a run that goes wrong for each alarm, and for no other: "
        f"{missing}"
    )


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_constant_accuracy_raises_an_alarm(accuracy: float) -> None:
    reward = 2 * accuracy - 1
    row = {"accuracy/mean": accuracy, "reward/min": reward, "reward/max": reward}
    stuck = [row | {"step": step, "actor/grad_norm": 0.3} for step in range(1, 21)]
    assert first_alarms(stuck) == {"nothing_learnt": 10}
    varied = [row | {"reward/min": reward - 0.1} for row in stuck]
    assert first_alarms(varied) == {}, "scores that differ teach something"
    late = [row | {"accuracy/mean": abs(accuracy - 0.1)} for row in stuck[:5]] + stuck[5:14]
    assert first_alarms(late) == {}


def test_restating_the_question_rings_within_nine_steps() -> None:
    # SmolLM2 on "What is 33 - 4? Answer with the number.": every response became "33 - 4".
    accuracies = [0.06, 0.06, 0.07, 0.09, 0.2, 0.5, 0.8, 0.95, 0.98]
    rows = [
        {"step": step, "accuracy/mean": accuracy, "response_length/mean": 24 - 2 * step}
        for step, accuracy in enumerate(accuracies, 1)
    ]
    assert first_alarms(rows).keys() == {"length_collapse"}
    copied = [row | {"accuracy/copied": row["accuracy/mean"]} for row in rows]
    assert first_alarms(copied).keys() == {"length_collapse", "copied_answers"}
    longer = [row | {"response_length/mean": 24} for row in rows]
    assert first_alarms(longer) == {}


def test_fully_explained_critic_is_no_fault() -> None:
    def alarms_at(accuracy: float, trust: float = 0.01) -> dict[str, int]:
        return first_alarms(
            [{"step": n, "accuracy/mean": accuracy, "critic/trust": trust} for n in range(1, 41)]
        )

    assert alarms_at(0.5) == {"critic_untrusted": 20}, (
        "the first steps of a new critic are given it"
    )
    assert alarms_at(0.97) == alarms_at(0.5, trust=0.1) == {}


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["actor/grad_norm", "critic/grad_norm"])
def test_nonfinite_gradient_norm_is_reported_from_the_first_step(
    name: str, value: float | None
) -> None:
    alarms = Alarms(AlarmsConfig())
    assert alarms.check({"step": 1, name: value}) == {"gradient_spike": f"{name} is not finite"}


def test_trouble_reported_once_while_it_lasts_and_in_every_row() -> None:
    alarms = Alarms(AlarmsConfig())
    told = [list(alarms.check({"reward/failed": share})) for share in (0.0, 0.1, 0.1, 0.0, 0.1)]
    assert told == [[], ["failed_grades"], [], [], ["failed_grades"]]
    assert alarms.metrics() == {"alarm/failed_grades": 1.0}


def test_a_resumed_run_tells_what_the_undisturbed_one_does() -> None:
    rows = run(0, "entropy_explosion")
    whole = Alarms(AlarmsConfig())
    said = []
    for row in rows:
        fresh = whole.check(row)
        row.update(whole.metrics())
        said.append(fresh)
    for cut in (ONSET, ONSET + 10, ONSET + 20):
        resumed = Alarms(AlarmsConfig(), rows[:cut])
        assert [resumed.check(row) for row in rows[cut:]] == said[cut:]


def test_off_is_silent_and_stop_says_so() -> None:
    row = {"reward/failed": 0.5}
    off = Alarms(AlarmsConfig(off=("failed_grades",)))
    assert off.check(row) == {} and off.metrics() == {} and off.stopping is None
    stop = Alarms(AlarmsConfig(stop=("failed_grades",)))
    assert stop.check({"reward/failed": 0.0}) == {} and stop.stopping is None
    stop.check(row)
    assert stop.stopping == "failed_grades: 50% of verifications failed (limit 5%)"


def test_figures_that_are_absent_raise_no_alarm() -> None:
    assert first_alarms([{"step": step} for step in range(60)]) == {}


def test_the_page_names_exactly_the_alarms_of_the_code() -> None:
    page = PAGE.read_text()
    assert page[: page.index(CURVES_BEGIN)] == alarms_part(), "run tools/describe_alarms.py"


needs_curves = pytest.mark.skipif(not CURVES.is_dir(), reason=f"no public curves at {CURVES}")


@needs_curves
def test_the_page_says_what_the_alarms_say_of_public_curves() -> None:
    page = PAGE.read_text()
    assert page[page.index(CURVES_BEGIN) :] == curves_part(CURVES), "run tools/describe_alarms.py"


@needs_curves
@pytest.mark.parametrize("curve", CURVES_TRIED, ids=lambda curve: f"{curve.file}-{curve.run}")
def test_public_curves_healthy_and_unhealthy(curve: Any) -> None:
    first = first_alarms(read_curve(CURVES, curve))
    if curve.trouble is None:
        assert first == {}
    else:
        assert curve.told_from <= min(first.values()) <= curve.told_by

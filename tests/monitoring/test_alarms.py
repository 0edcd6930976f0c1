"""Each alarm goes off at its trouble, once, and not without it."""

from typing import Any

import pytest

from vapo_megatron.config.monitoring import AlarmsConfig
from vapo_megatron.monitoring.alarms import Alarms

HEALTHY: dict[str, Any] = {
    "actor/grad_norm": 0.4,
    "critic/grad_norm": 1.0,
    "actor/entropy": 0.5,
    "actor/train_infer_kl": 1e-4,
    "response_length/mean": 100.0,
    "response_length/truncated": 0.1,
    "reward/frac_zero_std_groups": 0.4,
}
CONFIG = AlarmsConfig(reference_steps=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor/grad_norm", None),
        ("actor/grad_norm", float("nan")),
        ("critic/grad_norm", float("inf")),
        ("actor/entropy", 0.009),
        ("actor/train_infer_kl", 0.06),
        ("response_length/mean", 24.0),
        ("response_length/truncated", 0.51),
        ("reward/frac_zero_std_groups", 0.96),
    ],
)
def test_trouble_is_named_once_while_it_lasts(name: str, value: float | None) -> None:
    alarms = Alarms(CONFIG, history=[HEALTHY, HEALTHY])
    assert alarms.check(HEALTHY) == []
    texts = alarms.check(HEALTHY | {name: value})
    assert len(texts) == 1 and texts[0].startswith(name) and "\n" not in texts[0]
    assert alarms.check(HEALTHY | {name: value}) == [] and alarms.active
    assert alarms.check(HEALTHY) == [] and not alarms.active
    assert alarms.check(HEALTHY | {name: value}) == texts


def test_collapse_is_measured_against_the_first_steps_alone() -> None:
    alarms = Alarms(CONFIG)
    for length in (100.0, 100.0, 80.0, 60.0, 40.0, 26.0):
        assert alarms.check({"response_length/mean": length}) == []
    assert alarms.check({"response_length/mean": 24.0}) != []


def test_figures_that_are_absent_raise_no_alarm() -> None:
    assert Alarms(CONFIG).check({"step": 1}) == []


def test_a_fault_of_the_critic_is_told_of_once() -> None:
    alarms = Alarms(AlarmsConfig())
    (line,) = alarms.check({"critic/fault_shift": 1.0, "critic/gain": 0.1})
    assert "'shift'" in line and alarms.check({"critic/fault_shift": 1.0}) == []
    assert alarms.check({"critic/gain": 0.1}) == []

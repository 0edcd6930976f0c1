"""The twin drives a run's own scheduling: its ledger closes, its seconds are those of a computation by hand."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from plans import ROOT, planned_config

from vapo_megatron import cli
from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.rollout import AsynchronousConfig, PartialResponsesConfig, RolloutConfig
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.inputs import Lengths
from vapo_megatron.operations.twin.modes import ResponseLengths
from vapo_megatron.operations.twin.run import simulate
from vapo_megatron.operations.twin.scenario import Scenario


@dataclass(frozen=True)
class Speed:
    """A decoding step takes a second, whatever runs; reading a token `read`."""

    at_once: int = 8
    read: float = 0.0
    by_context: float = 0.0

    def decode_seconds(self, running: float, context: float) -> float:
        return 1.0 + self.by_context * context

    def prefill_seconds(self, tokens: float) -> float:
        return self.read * tokens


def scenario(staleness: int = 0, partial: bool = False, **changes: Any) -> Scenario:
    """Two prompts a step with four responses of ten tokens each, on two engines; updates of five seconds."""
    rollout = RolloutConfig(
        max_running_requests=8,
        asynchronous=AsynchronousConfig(max_staleness=staleness),
        partial_responses=PartialResponsesConfig(oversampling=1.5 if partial else None),
    )
    made = Scenario(
        rollout=rollout,
        batch=BatchConfig(prompts_per_step=2, samples_per_prompt=4),
        sampling=DynamicSamplingConfig(),
        max_new_tokens=50,
        sync_mode="wait",
        engines=2,
        speed=Speed(),
        prompt_tokens=4,
        length_of=lambda prompt, seed: 10,
        trainer_seconds=lambda tokens: 5.0,
        sync_seconds=1.0,
        grade_seconds=0.5,
        grade_workers=4,
    )
    return replace(made, **changes)


def uneven(prompt: int, seed: int) -> int:
    return 5 + seed % 40


def test_a_step_takes_what_its_parts_take() -> None:
    outcome = simulate(scenario())
    # Each engine has a group: ten steps of a second; the graders then have eight responses, half a second each, four at
    # once: a second. Then five of training and one of weight sync.
    assert outcome.step_seconds == pytest.approx([10 + 1 + 5 + 1] * 10)
    assert outcome.engines_idle == pytest.approx(7 / 17) and outcome.trainer_idle == pytest.approx(11 / 17)
    read = simulate(scenario(speed=Speed(read=0.25)))
    assert read.step == pytest.approx(18), "a prompt of four tokens is read once for its four responses"
    longer = simulate(scenario(speed=Speed(by_context=0.1)))
    # Steps at 4, 5 ... 13 tokens of context: their mean, 8.5 + 0.5 for the midpoint rule between tokens.
    assert longer.step == pytest.approx(17 + 10 * 0.1 * 9)
    waits = simulate(scenario(speed=Speed(at_once=2)))
    assert waits.step == pytest.approx(10 + 17), "two of the four begin when the first two are done"


def test_a_step_that_a_run_would_give_up_is_told_as_a_limit_to_raise() -> None:
    rollout = RolloutConfig(max_running_requests=8, collect_timeout_s=9)
    with pytest.raises(BadInput, match=r"rollout\.collect_timeout_s=9: the responses of a simulated step take longer"):
        simulate(scenario(rollout=rollout))


def test_staleness_hides_the_update_behind_generation() -> None:
    ahead = simulate(scenario(1))
    # 10 s of generation and 1 s of grading hide the 5 s of training; the weight sync stops the engines, as it does in
    # a synchronous run, and waits for what they have begun.
    assert ahead.step_seconds == pytest.approx([10 + 1 + 1] * 10) and ahead.mean("rollout/age_mean") == 1
    slow = simulate(scenario(1, trainer_seconds=lambda tokens: 30.0))
    assert slow.step_seconds == pytest.approx([30 + 1] * 10) and slow.trainer_idle == 0
    assert slow.engines_idle == pytest.approx(21 / 31)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_responses_go_on_under_new_weights(mode: Any) -> None:
    given = scenario(1, sync_mode=mode, length_of=uneven, speed=Speed(read=0.1), steps=30)
    outcome = simulate(given)
    assert outcome.is_closed and 0 < outcome.mean("rollout/age_mean") < 1
    assert outcome.largest("rollout/age_max") == 1 and outcome.mean("time/wait_for_engines") == 0
    kept = simulate(replace(given, sync_mode="in_place"))
    assert outcome.step >= kept.step, "what is retracted is read anew"


def test_a_step_with_windows_is_as_long_as_one_of_them() -> None:
    rollout = RolloutConfig(max_running_requests=8, windows=5)
    outcome = simulate(scenario(rollout=rollout, length_of=lambda prompt, seed: 50))
    # Ten of fifty tokens in each step; grading, training and the weight sync as ever.
    assert outcome.step_seconds == pytest.approx([10 + 1 + 5 + 1] * 10)
    assert outcome.is_closed and outcome.largest("rollout/age_max") == 0
    assert outcome.counts["drawn"] == 2 + outcome.counts["trained"], "a new group for each that is finished"


def test_dynamic_sampling_draws_until_there_are_enough_and_graders_may_be_the_longest() -> None:
    filtered = DynamicSamplingConfig(oversampling=1.0, max_rounds=10)
    outcome = simulate(scenario(sampling=filtered, informative_share=0.5, steps=40))
    assert outcome.is_closed and outcome.counts["no_signal"] == pytest.approx(outcome.counts["trained"], rel=0.3)
    assert simulate(scenario(grade_workers=1)).step == pytest.approx(10 + 4 + 5 + 1), "eight after one another"


def test_the_same_seed_is_the_same_run_and_another_one_another() -> None:
    def run(seed: int) -> Sequence[float]:
        drawn = ResponseLengths(Lengths(4, 12, 50, 4), 0.8).draw
        return simulate(scenario(1, seed=seed, length_of=drawn)).step_seconds

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("spread", [None, 0.5, 1.2])
def test_lengths_have_the_mean_that_was_asked_for(spread: float | None) -> None:
    lengths = ResponseLengths(Lengths(1, 300, 1000, 1), spread)
    drawn = [lengths.draw(prompt, 8 * prompt + index) for prompt in range(1500) for index in range(4)]
    assert sum(drawn) / len(drawn) == pytest.approx(300, rel=0.05) and max(drawn) <= 1000
    assert drawn[0] == lengths.draw(0, 0)


def test_the_command_says_which_mode_would_suit(capsys: pytest.CaptureFixture[str]) -> None:
    from vapo_megatron.operations.plan.command import plan_run

    small = ("batch.prompts_per_step=16", "plan.simulation.steps=2", "plan.mean_response_tokens=200")
    plan_run(planned_config(Path("Qwen2.5-1.5B"), *small), 8, None, True, simulated=True)
    told = json.loads(capsys.readouterr().out)["simulation"]
    shared, partial, *apart = told["modes"]
    assert [mode["mode"] for mode in (shared, partial)] == ["synchronous", "partial responses"]
    assert shared["engine_gpus"] is None and [mode["age_max"] for mode in (shared, *apart)] == [0, 1, 2]
    assert all(0 < mode["engine_gpus"] < 8 and mode["step"] > 0 for mode in apart) and told["assumptions"]
    plan_run(planned_config(Path("Qwen2.5-1.5B"), *small, "plan.simulation.engine_gpus=6"), 8, None, False, True)
    out = capsys.readouterr().out
    assert "engines unused" in out and "2 + 6 engines'" in out


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("plan.simulation.engine_gpus=8", "plan.simulation.engine_gpus=8 of 8: rollout.tp=1 does not divide them, or"),
        ("plan.simulation.engine_gpus=0", "plan.simulation.engine_gpus is 0; expected greater than"),
        ("plan.simulation.response_spread=-0.5", "plan.simulation.response_spread is -0.5; expected greater than 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], override: str, line: str
) -> None:
    example = str(ROOT / "examples" / "gsm8k" / "vapo.yaml")
    words = ["vapo-megatron", "plan", example, "model.path=Qwen2.5-1.5B", "--gpus", "8", "--simulate", override]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    lines = capfd.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and line in lines[0]

"""The simulation drives the run's own ledger: its seconds equal a computation by hand."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import planned_config

from vapo_megatron.operations.plan import rollout_modes
from vapo_megatron.operations.plan.inputs import Lengths
from vapo_megatron.operations.plan.plan import make_plan
from vapo_megatron.operations.plan.rollout import rollout_seconds
from vapo_megatron.operations.plan.rollout_modes import drawn_lengths, full_rate, modes
from vapo_megatron.operations.plan.simulation import Outcome, Scenario, simulate
from vapo_megatron.rollout.ledger import DROPPED, StepRule


def scenario(staleness: int = 0, partial: bool = False, **changes: Any) -> Scenario:
    """Two prompts a step with four responses of ten tokens each, on two engines; updates of five
    seconds.

    A decoding step takes a second, whatever runs.
    """
    rule = StepRule(2, 1, staleness=staleness)
    made = Scenario(
        rule=replace(rule, any_order=True, oversampling=1.5) if partial else rule,
        sync_mode="wait",
        engines=2,
        at_once=8,
        decode_seconds=lambda running, context: 1.0,
        prefill_seconds=lambda tokens: 0.0,
        prompt_tokens=4,
        lengths_of=lambda number: np.full(4, 10.0),
        trainer_seconds=lambda tokens: 5.0,
        sync_seconds=1.0,
        grade_seconds=0.5,
        grade_workers=4,
        tick=1.0,
    )
    return replace(made, **changes)


def uneven(number: int) -> np.ndarray:
    return 5.0 + np.random.default_rng(number).integers(0, 40, 4)


def idle(outcome: Outcome) -> float:
    return sum(outcome.waited) / sum(outcome.seconds)


def test_a_step_takes_what_its_parts_take() -> None:
    outcome = simulate(scenario())
    # Each engine has a group: ten steps of a second; the graders then have eight responses, half a
    # second each, four at once: a second. Then five of training and one of weight sync.
    assert outcome.seconds == pytest.approx([10 + 1 + 5 + 1] * 4)
    assert idle(outcome) == pytest.approx(11 / 17)
    read = simulate(scenario(prefill_seconds=lambda tokens: 0.25 * tokens))
    assert read.step == pytest.approx(18), (
        "a prompt of four tokens is read once for its four responses"
    )
    longer = simulate(
        scenario(decode_seconds=lambda running, context: 1 + 0.1 * context, tick=0.05)
    )
    # Steps at 4, 5 ... 14 tokens of context.
    assert longer.step == pytest.approx(17 + 10 * 0.1 * 9, abs=0.2)
    waits = simulate(scenario(at_once=2))
    assert waits.step == pytest.approx(10 + 17), "two of the four begin when the first two are done"
    assert simulate(scenario(grade_workers=1)).step == pytest.approx(10 + 4 + 5 + 1), (
        "eight after one another"
    )


def test_staleness_hides_the_update_behind_generation() -> None:
    ahead = simulate(scenario(1))
    # 10 s of generation and 1 s of grading hide the 5 s of training; the weight sync stops the
    # engines, as it does in a synchronous run, and waits for their running responses.
    assert ahead.seconds == pytest.approx([10 + 1 + 1] * 4) and ahead.ages == pytest.approx(
        [1.0] * 4
    )
    slow = simulate(scenario(1, trainer_seconds=lambda tokens: 30.0))
    assert slow.seconds == pytest.approx([30 + 1] * 4) and idle(slow) == 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_responses_go_on_under_new_weights(mode: Any) -> None:
    given = scenario(
        1, sync_mode=mode, lengths_of=uneven, prefill_seconds=lambda tokens: 0.1 * tokens, steps=20
    )
    outcome = simulate(given)
    assert all(0 <= age <= 1 for age in outcome.ages) and 0 < np.mean(outcome.ages) < 1
    kept = simulate(replace(given, sync_mode="in_place"))
    assert (outcome.step > kept.step) == (mode == "retract"), (
        "retracted responses are prefilled again"
    )
    waiting = simulate(replace(given, sync_mode="wait"))
    assert outcome.step < waiting.step, "nobody waits for the longest response"


def test_partial_responses_hide_the_longest() -> None:
    whole, partial = (
        simulate(scenario(partial=on, lengths_of=uneven, steps=20)) for on in (False, True)
    )
    assert partial.step < whole.step and max(partial.ages) > 0 == max(whole.ages)
    slow = simulate(
        scenario(partial=True, lengths_of=uneven, steps=20, trainer_seconds=lambda tokens: 100.0)
    )
    assert slow.step == pytest.approx(partial.step + 95), "engines are idle while the trainer works"


def test_dynamic_sampling_draws_until_there_are_enough() -> None:
    rule = StepRule(2, 1, most_draws=20)
    outcome = simulate(scenario(rule=rule, is_informative=lambda number: number % 2 == 0, steps=20))
    counts = outcome.counts
    assert counts["no_signal"] == pytest.approx(counts["trained"], rel=0.1)
    assert counts["drawn"] == counts["trained"] + sum(counts.get(reason, 0) for reason in DROPPED)
    assert outcome.step > 1.4 * simulate(scenario()).step


def test_engine_idle_share_counts_tokens_below_the_full_rate() -> None:
    """One response of a hundred tokens beside seven of ten: the tail counts, though the engine
    always has work."""
    tail = scenario(
        engines=1,
        rule=StepRule(2, 1),
        lengths_of=lambda number: np.array([100.0 if number % 2 else 10.0, 10, 10, 10]),
        trainer_seconds=lambda tokens: 0.0,
        sync_seconds=0.0,
        grade_seconds=0.0,
    )
    outcome = simulate(tail)
    rate = sum(outcome.tokens) / sum(outcome.seconds) / full_rate(tail, Lengths(4, 10, 100, 4))
    assert rate == pytest.approx((100 + 7 * 10) / (100 * 8))


def test_episode_waiting_for_a_tool_leaves_its_place_to_others() -> None:
    alone, waiting = (simulate(scenario(turns=2, tool_seconds=seconds)) for seconds in (0.0, 100.0))
    assert waiting.step == pytest.approx(alone.step + 100), "nobody else wants the places"
    # Eight episodes share two places, so that a turn of five tokens waits for three others: 15 s
    # are hidden.
    full, hidden = (
        simulate(scenario(turns=2, tool_seconds=seconds, at_once=1)) for seconds in (0.0, 15.0)
    )
    assert hidden.step == pytest.approx(full.step)
    exposed = simulate(scenario(turns=2, tool_seconds=25.0, at_once=1))
    assert exposed.step == pytest.approx(full.step + 10)


def test_a_plan_adds_what_tools_take_beyond_the_wait_for_a_place() -> None:
    def rollout(samples: float, *overrides: str) -> float:
        plan = make_plan(
            planned_config(Path("Qwen2.5-1.5B"), "rollout.max_running_requests=64", *overrides), 8
        )
        return rollout_seconds(
            plan.memory.engine, 1, samples, samples, plan.lengths, plan.config.plan
        )

    tools = ("plan.turns=5", "plan.tool_seconds=20")
    assert rollout(64, *tools) == pytest.approx(rollout(64) + 4 * 20), (
        "nobody waits for the places that become free"
    )
    queue = rollout(100 * 64) - rollout(64)
    assert queue > 5 * 20 and rollout(100 * 64, *tools) == pytest.approx(rollout(100 * 64)), (
        "others decode meanwhile"
    )


def test_lengths_have_the_requested_mean_and_follow_from_seed() -> None:
    lengths = Lengths(1, 300, 1000, 1)
    drawn = np.concatenate([drawn_lengths(lengths, 4, 0, number) for number in range(1500)])
    assert drawn.mean() == pytest.approx(300, rel=0.05) and drawn.max() <= 1000
    assert (drawn[:4] == drawn_lengths(lengths, 4, 0, 0)).all() and (
        drawn[:4] != drawn_lengths(lengths, 4, 1, 0)
    ).any()


@pytest.mark.parametrize(
    "more", [(), ("algorithm.dynamic_sampling.max_rounds=10", "plan.informative_share=0.25")]
)
def test_what_is_simulated_is_announced_before(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    announced = []

    def counted(scenario: Scenario) -> Outcome:
        announced.append(capsys.readouterr().err)
        outcome = simulate(scenario)
        drawn.append(outcome.counts["drawn"])
        return outcome

    monkeypatch.setattr(rollout_modes, "simulate", counted)
    config = planned_config(
        Path("Qwen2.5-1.5B"), "batch.prompts_per_step=16", "plan.mean_response_tokens=200", *more
    )
    modes(make_plan(config, 8))
    responses = int(announced[0].split()[1].replace(",", ""))
    assert responses == pytest.approx(sum(drawn) * config.batch.samples_per_prompt, rel=0.4), (
        announced
    )


def test_the_command_says_which_mode_would_suit(capsys: pytest.CaptureFixture[str]) -> None:
    from vapo_megatron.operations.plan.command import plan_run

    config = planned_config(
        Path("Qwen2.5-1.5B"), "batch.prompts_per_step=16", "plan.mean_response_tokens=200"
    )
    shared, partial, *apart = modes(make_plan(config, 8))
    assert [mode["mode"] for mode in (shared, partial)] == ["synchronous", "partial responses"]
    assert shared["engine_gpus"] is None and len(apart) == 2
    assert all(0 < mode["engine_gpus"] < 8 and mode["step"] > 0 for mode in apart)
    capsys.readouterr()
    plan_run(config, 8, None, simulated=True)
    out, said = capsys.readouterr()
    assert re.fullmatch(r"simulating [\d,]+ responses in 4 modes: about \d+\.\d minutes\n", said)
    assert "engines unused" in out and f"+ {apart[0]['engine_gpus']} engines'" in out

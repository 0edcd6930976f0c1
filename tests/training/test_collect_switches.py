"""What is collected, through the trainer's collect(): dynamic sampling, greedy baselines, grades of
cut responses."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from ranks import run_ranks
from threads import on_threads
from written_rollouts import CUT, END, RIGHT, WRONG, write_rollouts

from vapo_megatron.config.algorithm import AlgorithmConfig, DynamicSamplingConfig
from vapo_megatron.config.rollout import AsynchronousConfig, PartialResponsesConfig, RolloutConfig
from vapo_megatron.config.run import BatchConfig, MonitoringConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rollout.ledger import StepRule, step_rule
from vapo_megatron.rollout.stream import StopAsked
from vapo_megatron.training.collect import collect, spread
from vapo_megatron.training.exchange import rank_and_world
from vapo_megatron.training.metrics import rollout_metrics

SIZE = BatchConfig(prompts_per_step=4, samples_per_prompt=3)
GOOD = (RIGHT, END)
BAD = (WRONG, END)
LATE = (RIGHT, CUT)


def every_third(cursor: int) -> Sequence[Sequence[int]]:
    """Only every third prompt has responses of both kinds; the others are all right, or all
    wrong."""
    return [(GOOD, BAD, BAD), (GOOD, GOOD, GOOD), (BAD, BAD, BAD)][cursor % 3]


def never(cursor: int) -> Sequence[Sequence[int]]:
    return (GOOD, GOOD, GOOD)


def right_but_late(cursor: int) -> Sequence[Sequence[int]]:
    return (LATE, GOOD, BAD)


def uneven(cursor: int) -> Sequence[Sequence[int]]:
    """Of other lengths in every group; the last group is all wrong, and its last response runs in
    circles."""
    first = BAD if cursor == 3 else GOOD
    return (first, (WRONG, *range(5, 6 + cursor), END), (WRONG, *[7, 8] * (4 + 8 * cursor), CUT))


def by_prompt(cursor: int) -> Sequence[Sequence[int]]:
    """The first response, the greedy one where requested, is right for odd prompts alone."""
    return (GOOD if cursor % 2 else BAD, BAD, GOOD)


SCRIPTS = {f.__name__: f for f in (every_third, never, right_but_late, uneven, by_prompt)}


class Kept(Recorder):
    """Keeps the samples that it is given for people to read."""

    def samples(self, step: int, samples: Sequence[Sample], dropped: Sequence[Sample] = ()) -> None:
        self.kept = step, [list(sample.response_ids) for sample in samples]
        self.dropped = [(sample.group, sample.prompt.cursor, sample.correct) for sample in dropped]


def collected(script: str, algorithm: dict[str, Any], fixed_policy: bool = False) -> dict[str, Any]:
    """On one rank: the batch, and the engines' requests."""
    rollouts = write_rollouts(SCRIPTS[script])
    config = AlgorithmConfig.model_validate(algorithm)
    with Kept(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        rule = step_rule(
            SIZE,
            DynamicSamplingConfig() if fixed_policy else config.dynamic_sampling,
            1,
            RolloutConfig(),
        )
        rollouts.begin(rule, SIZE.samples_per_prompt, 0, fixed_policy)
        batch = collect(rollouts, config, 1, recorder)
        row = recorder.write(1)
        assert torch.equal(spread(batch, recorder).local.tokens, batch.tokens)
        assert "time/broadcast" in recorder.write(2)
        rollouts.end()
    whole = batch.tokens.split(batch.cu_seqlens.diff().tolist())
    responses = [ids.tolist()[int(n) :] for ids, n in zip(whole, batch.prompt_lengths, strict=True)]
    assert recorder.kept == (1, responses), "the trained samples are shown"
    assert rollouts.probe == [ids[:32].tolist() for ids in whole[:4]]
    engines: Any = rollouts.engines
    assert rollouts.prompts is not None
    return {
        "correct": batch.correct.tolist(),
        "rewards": batch.rewards.tolist(),
        "truncated": batch.truncated.tolist(),
        "lengths": batch.response_lengths.tolist(),
        "groups": batch.group_ids.tolist(),
        "prompts": [int(batch.tokens[int(start)]) for start in batch.cu_seqlens[:-1]],
        "greedy": None if batch.greedy_rewards is None else batch.greedy_rewards.tolist(),
        "asked": [r.prompt.cursor for r in engines.requests],
        "temperatures": [r.sampling.temperature for r in engines.requests],
        "samples": [r.samples for r in engines.requests],
        "drawn": rollouts.prompts.cursor,
        "row": row,
        "dropped": recorder.dropped,
    }


CASES: dict[str, tuple[Any, ...]] = {
    "off": ("every_third", {}),
    "on": ("every_third", {"dynamic_sampling": {"max_rounds": 10}}),
    "pretraining": ("every_third", {"dynamic_sampling": {"max_rounds": 10}}, True),
    "oversampling": ("every_third", {"dynamic_sampling": {"max_rounds": 10, "oversampling": 1.5}}),
    "rounds": ("every_third", {"dynamic_sampling": {"oversampling": 1.0, "max_rounds": 2}}),
    "never": ("never", {"dynamic_sampling": {"max_rounds": 3}}),
    "uneven": ("uneven", {}),
    "late": ("right_but_late", {}),
    "late_and_dynamic": ("right_but_late", {"dynamic_sampling": {"max_rounds": 10}}),
    "remax": ("by_prompt", {"advantage": {"estimator": "remax"}}),
    "remax_shaped": (
        "by_prompt",
        {
            "advantage": {"estimator": "remax"},
            "shaping": {"soft_overlong": {"max_length": 4, "cache_length": 4}},
        },
    ),
    "grpo": ("by_prompt", {"advantage": {"estimator": "grpo"}}),
}


def collect_all() -> dict[str, Any]:
    return {name: collected(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    answer: dict[str, Any] = run_ranks(1, collect_all)[0]
    return answer


def informative(seen: dict[str, Any]) -> list[bool]:
    """Whether each group of three has responses of both kinds."""
    return [0 < sum(seen["correct"][i : i + 3]) < 3 for i in range(0, 12, 3)]


def test_dynamic_sampling_keeps_informative_groups_alone(found: dict[str, Any]) -> None:
    assert informative(found["off"]) == [True, False, False, True] and found["off"]["prompts"][
        ::3
    ] == [0, 1, 2, 3]
    assert informative(found["on"]) == [True] * 4 and found["on"]["prompts"][::3] == [0, 3, 6, 9]
    for name in ("off", "on", "rounds"):
        assert found[name]["groups"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], (
            "groups are numbered as they stand"
        )
        prompts = found[name]["prompts"]
        assert all(len(set(prompts[i : i + 3])) == 1 for i in range(0, 12, 3)), (
            "a group is of one prompt"
        )
    assert found["pretraining"]["prompts"][::3] == [0, 1, 2, 3], (
        "the critic learns from every group"
    )


def test_groups_are_refilled_one_by_one_and_the_surplus_returns(
    found: dict[str, Any],
) -> None:
    # Twelve are requested at once; the fourth with signal belongs to prompt 9, and the next step
    # begins behind it.
    assert found["on"]["asked"][:12] == list(range(12)) and found["on"]["drawn"] == 10
    # Six at once, never more than one and a half times the missing ones
    seen = found["oversampling"]
    assert (
        informative(seen) == [True] * 4
        and seen["prompts"][::3] == [0, 3, 6, 9]
        and seen["drawn"] == 10
    )
    assert seen["asked"][:6] == list(range(6)) and max(seen["asked"]) < 16
    row = found["on"]["row"]
    assert (row["dynamic_sampling/prompts"], row["dynamic_sampling/kept"]) == (10, 4)
    assert row["rollout/dropped_no_signal"] == 6 and row["rollout/dropped_surplus"] >= 2


def test_graded_but_untrained_groups_reach_the_recorder(found: dict[str, Any]) -> None:
    passed_over = [(1, True), (2, False), (4, True), (5, False), (7, True), (8, False)]
    expected = [(4 + place, *group) for place, group in enumerate(passed_over) for _ in range(3)]
    assert found["on"]["dropped"] == expected, "all of what the step looked through, and no surplus"
    assert found["rounds"]["dropped"] == [
        (4 + n, *passed_over[1 + n]) for n in range(4) for _ in range(3)
    ]
    assert found["off"]["dropped"] == found["pretraining"]["dropped"] == []


def test_after_max_rounds_other_groups_fill_the_batch(found: dict[str, Any]) -> None:
    # Eight in all, prompts 0, 3 and 6 are informative; then the first of the others.
    assert sorted(found["rounds"]["asked"]) == list(range(8)) and found["rounds"]["drawn"] == 8
    assert found["rounds"]["prompts"][::3] == [0, 3, 6, 1] and informative(found["rounds"]) == [
        True
    ] * 3 + [False]
    assert sorted(found["never"]["asked"]) == list(range(36)) and found["never"]["prompts"][
        ::3
    ] == [0, 1, 2, 3]
    assert found["never"]["row"]["dynamic_sampling/kept"] == 0


def test_truncated_response_counts_as_incorrect(
    found: dict[str, Any],
) -> None:
    for name in ("late", "late_and_dynamic"):
        assert found[name]["truncated"] == [True, False, False] * 4
        assert found[name]["correct"] == [False, True, False] * 4
        assert found[name]["rewards"] == [-1.0, 1.0, -1.0] * 4


def test_remax_alone_asks_for_one_greedy_response_a_prompt(found: dict[str, Any]) -> None:
    seen = found["remax"]
    assert seen["samples"] == [3] * 4 + [1] * 4 and seen["temperatures"] == [1.0] * 4 + [0.0] * 4
    assert seen["asked"] == [0, 1, 2, 3] * 2
    assert seen["greedy"] == [-1.0] * 3 + [1.0] * 3 + [-1.0] * 3 + [1.0] * 3, (
        "each prompt's own, for its responses"
    )
    assert found["remax_shaped"]["greedy"] == [-1.5] * 3 + [0.5] * 3 + [-1.5] * 3 + [0.5] * 3, (
        "shaped as others are"
    )
    assert found["grpo"]["greedy"] is None and found["grpo"]["asked"] == [0, 1, 2, 3]
    row = found["remax"]["row"]
    assert (
        row["reward/greedy_mean"] == 0
        and found["remax_shaped"]["row"]["reward/greedy_mean"] == -0.5
    )


def collected_beside() -> list[int] | None:
    """On each of two ranks: the prompts of what is collected; where there is nothing, after what
    all ranks share."""
    rollouts = write_rollouts(by_prompt)
    if rank_and_world()[0]:
        rollouts.prompts = rollouts.verifier = None
    config = AlgorithmConfig.model_validate({"advantage": {"estimator": "remax"}})
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        rollouts.begin(
            step_rule(SIZE, config.dynamic_sampling, 1, RolloutConfig()), SIZE.samples_per_prompt, 0
        )
        batch = collect(rollouts, config, 1, recorder)
        rollouts.end()
        assert (recorder.write(1) == {}) == (batch is None)
        assert len(rollouts.probe) == 4
    return None if batch is None else batch.group_ids.tolist()


def test_rank_zero_alone_has_what_was_collected() -> None:
    assert on_threads(2, collected_beside) == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], None]


def stopped() -> tuple[str, bool]:
    """On each of two ranks: what it is told, where rank 0 alone is asked to stop."""
    rollouts = write_rollouts(by_prompt)

    def take(recorder: Recorder) -> list[Sample]:
        raise StopAsked("SIGTERM asks for it")

    rollouts.take = take  # type: ignore[method-assign]
    recorder = Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False)
    with recorder, pytest.raises(StopAsked) as stop:
        collect(rollouts, AlgorithmConfig(), 1, recorder)
    return str(stop.value), stop.value.shared


def test_stop_during_collection_reaches_all_ranks() -> None:
    assert on_threads(2, stopped) == [("SIGTERM asks for it", True)] * 2


PARTIAL = {"partial_responses": {"oversampling": 1.25}}
DYNAMIC = {"oversampling": 1.3, "max_rounds": 3}


@pytest.mark.parametrize(
    ("rollout", "sampling", "rule"),
    [
        ({}, {}, StepRule(4, 9)),
        ({"asynchronous": {"max_staleness": 2}}, {}, StepRule(4, 9, staleness=2)),
        ({"windows": 3}, {}, StepRule(4, 9, windows=3)),
        (PARTIAL, {}, StepRule(4, 9, oversampling=1.25, any_order=True)),
        (
            {"partial_responses": PARTIAL["partial_responses"] | {"oversampling": None}},
            {},
            StepRule(4, 9),
        ),
        ({}, DYNAMIC, StepRule(4, 9, oversampling=1.3, most_draws=16)),
        ({}, DYNAMIC | {"max_rounds": None}, StepRule(4, 9)),
        (PARTIAL, DYNAMIC, StepRule(4, 9, oversampling=1.3, most_draws=16, any_order=True)),
    ],
)
def test_what_makes_a_step(
    rollout: dict[str, Any], sampling: dict[str, Any], rule: StepRule
) -> None:
    settings = RolloutConfig.model_construct(**RolloutConfig().__dict__ | rollout_sections(rollout))
    assert step_rule(SIZE, DynamicSamplingConfig.model_validate(sampling), 9, settings) == rule


def rollout_sections(rollout: dict[str, Any]) -> dict[str, Any]:
    """What goes together is checked elsewhere."""
    kinds = {"asynchronous": AsynchronousConfig, "partial_responses": PartialResponsesConfig}
    return {
        key: kinds[key].model_validate(value) if key in kinds else value
        for key, value in rollout.items()
    }


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_repetition_is_told_of_responses_spread_over_the_batch(count: int) -> None:
    """So many responses to prompts of several lengths; every third one, from the first on, runs in
    circles."""
    samples = []
    for number in range(count):
        ids = [5, 6] * 12 if number % 3 == 0 else list(range(number, number + 24))
        prompt = Prompt("", "", "", (1,) * (1 + number % 4))
        samples.append(
            Sample(prompt, number, 0, 0, ids, [-1.0] * 24, "stop", 0, 0, reward=1.0, correct=True)
        )  # type: ignore[arg-type]
    seen = range(0, count, 1 if count <= 256 else 2 if count <= 512 else 3)
    in_circles = sum(number % 3 == 0 for number in seen) / len(seen)
    found = rollout_metrics(from_samples(samples))
    repeated = found["response_length/repeated"]
    assert repeated == pytest.approx(in_circles * 7 / 9), "two of nine spans of 16 tokens are new"
    assert "reward/frac_zero_std_groups" not in found, (
        "each group has one response, so all have one reward"
    )


def test_a_rollout_reports_rewards_lengths_and_repetition(found: dict[str, Any]) -> None:
    seen = found["uneven"]
    row = found["uneven"]["row"]
    lengths = seen["lengths"]
    rewards = seen["rewards"]
    assert lengths == [n for cursor in range(4) for n in (2, 3 + cursor, 10 + 16 * cursor)]
    written = [list(response) for cursor in range(4) for response in uneven(cursor)]
    grams = [[tuple(w[i : i + 16]) for i in range(len(w) - 15)] for w in written]
    total = sum(map(len, grams))
    expected = {
        "reward/mean": fmean(rewards),
        "reward/min": -1,
        "reward/max": 1,
        "accuracy/mean": 3 / 12,
        "reward/frac_zero_std_groups": 1 / 4,
        "response_length/mean": fmean(lengths),
        "response_length/min": 2,
        "response_length/max": 58,
        "response_length/truncated": 4 / 12,
        "response_length/repeated": 1 - sum(len(set(part)) for part in grams) / total,
        "rollout/tokens": sum(lengths),
        "rollout/weight_version": 0,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)

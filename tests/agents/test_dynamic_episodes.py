"""Dynamic sampling with an agent: groups without signal make way for others, broken ones are
counted apart, and a run that is killed or stopped goes on as if nothing had been."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_episodes import TEMPLATE, make_tokenizer
from test_killed_episodes import StubClient

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import (
    AsynchronousConfig,
    EpisodeConfig,
    RolloutConfig,
    SamplingConfig,
)
from vapo_megatron.config.run import BatchConfig, MonitoringConfig
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import TryAgain
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import step_rule
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.rollout.stream import StopAsked
from vapo_megatron.training.rollouts import Rollouts

# What the agent does with the row at each place, over and over. The first three have signal.
KINDS = ("varied", "level", "by_turn", "breaks", "undecided", "decided")
GROUPS = 3
SAMPLES = 3
STEPS = 3


async def plays(task: dict[str, Any], base_url: str, http_client: Any) -> Any:
    """Two turns. Rewards follow from what the policy wrote."""
    messages = list(task["messages"])
    numbers = []
    for _ in range(2):
        answer = await http_client.post(f"{base_url}/chat/completions", json={"messages": messages})
        message = answer.json()["choices"][0]["message"]
        numbers.append(int(message["content"].split()[0][1:]))
        messages += [message, {"role": "user", "content": "w1"}]
    kind = KINDS[int(task["id"]) % len(KINDS)]
    drawn = numbers[0] % 50 / 100
    if kind == "breaks" and numbers[0] % 4:
        raise KeyError("of the user's")
    answers = {"varied": drawn, "level": 0.3, "by_turn": {"turn_rewards": [drawn, 0.1]}}
    return answers.get(kind)  # the others are the verifier's to decide


class Verifier:
    """Says that even numbers are right to the rows that it decides, and to the others that all is
    wrong."""

    def grade_batch(self, cases: Any, on_done: Any) -> list[Grade]:
        decided = [
            bool(case.ground_truth) and int(case.response.split()[0][1:]) % 2 == 0 for case in cases
        ]
        return [
            Grade(right, "equal" if right else "different", score=2.0 * right - 1)
            for right in decided
        ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("words"), TEMPLATE)


@contextmanager
def rollouts_of(tokenizer: TextTokenizer, timeout_s: float, **settings: Any) -> Iterator[Rollouts]:
    """The rollout side of a run, its engine a stub. timeout_s: of a step."""
    config = RolloutConfig(
        agent=f"{__name__}:plays", episode=EpisodeConfig(max_tokens=99), **settings
    )
    client: Any = StubClient
    answers = ["decided" * (KINDS[n % len(KINDS)] == "decided") for n in range(60)]
    prompts = [Prompt(str(n), f"w{n}", answer, (1, 10 + n, 2)) for n, answer in enumerate(answers)]
    with Dispatcher([EngineAddress("http://stub", "")], config, [2], client=client) as dispatcher:
        engines: Any = SimpleNamespace(version=0, sync_mode="wait", share_device=True, count=1)
        engines.collect_timeout_s = timeout_s
        verifier: Any = Verifier()
        rollouts = Rollouts(
            engines,
            engines,
            tokenizer,
            SamplingConfig(max_new_tokens=9),
            RewardConfig(),
            1,
            verifier=verifier,
            prompts=PromptSource(prompts, seed=1, shuffle=False),
            agent_settings=config,
        )
        rollouts.use(dispatcher)
        yield rollouts
        rollouts.end()
        rollouts.close_agents()


def rule_of(max_rounds: int, **settings: Any) -> Any:
    batch = BatchConfig(prompts_per_step=GROUPS, samples_per_prompt=SAMPLES)
    sampling = DynamicSamplingConfig
    chosen = sampling(max_rounds=max_rounds, oversampling=2.0)
    return step_rule(batch, chosen, STEPS, RolloutConfig(agent="a:b", **settings))


def facts(sample: Sample) -> tuple[Any, ...]:
    assert sample.loss_mask is not None
    tokens = sample.response_ids.tolist()
    mask = sample.loss_mask.tolist()
    return (
        sample.prompt.cursor,
        sample.index,
        tokens,
        mask,
        sample.reward,
        sample.correct,
        sample.grade_reason,
    )


def kinds_of(samples: list[Sample]) -> list[str]:
    return [KINDS[sample.prompt.cursor % len(KINDS)] for sample in samples[::SAMPLES]]


def test_groups_without_signal_and_broken_ones_count_separately(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    StubClient.turns = 0
    StubClient.last_turn = 10**9
    with (
        rollouts_of(tokenizer, 20.0) as rollouts,
        Recorder(tmp_path, MonitoringConfig(tensorboard=False), True) as recorder,
    ):
        rollouts.begin(rule_of(max_rounds=5), SAMPLES, 0)
        assert rollouts.stream is not None
        samples = rollouts.take(recorder)
        dropped = [sample for group in rollouts.stream.dropped for sample in group]
        recorder.samples(1, samples, dropped)
        row = recorder.write(1)
    assert [sample.prompt.cursor for sample in samples[::SAMPLES]] == [0, 2, 5], (
        "the first with signal"
    )
    assert kinds_of(samples) == ["varied", "by_turn", "decided"]
    assert {sample.correct for sample in samples[:6]} == {True, False} or len(
        {s.reward for s in samples[:3]}
    ) > 1
    assert kinds_of(dropped) == ["level", "undecided"], (
        "but nothing of a broken group, which has no tokens"
    )
    assert (row["dynamic_sampling/prompts"], row["dynamic_sampling/kept"]) == (5, 3)
    assert (row["rollout/dropped_no_signal"], row["rollout/dropped_broken"]) == (2, 1)
    broken = row["agent/broken_error"]
    assert 1 <= broken <= SAMPLES and row["agent/broken"] == broken / (broken + 5 * SAMPLES)
    kept = [
        json.loads(line)
        for line in (tmp_path / "samples/step_000001.jsonl").read_text().splitlines()
    ]
    others = [
        json.loads(line)
        for line in (tmp_path / "samples/step_000001_others.jsonl").read_text().splitlines()
    ]
    assert [row["prompt_id"] for row in kept] == [n for n in "025" for _ in range(SAMPLES)]
    assert [row["prompt_id"] for row in others] == [n for n in "14" for _ in range(SAMPLES)]
    for row, sample in zip([*kept, *others], [*samples, *dropped], strict=True):
        assert (
            row["response_ids"] == sample.response_ids.tolist() and row["reward"] == sample.reward
        )
        assert [bool(mark) for mark in row["loss_mask"]] == sample.written.tolist()


def test_whole_groups_fill_a_step_when_rounds_are_over(tokenizer: TextTokenizer) -> None:
    StubClient.turns = 0
    StubClient.last_turn = 10**9
    with (
        rollouts_of(tokenizer, 20.0) as rollouts,
        Recorder(Path("unused"), MonitoringConfig(), False) as recorder,
    ):
        rule = rule_of(max_rounds=1)
        assert rule.most_draws == 6
        rollouts.begin(rule, SAMPLES, 0)
        rollouts.take(recorder)
        rollouts.advance()
        assert rollouts.prompts is not None
        for first in (6, 12):
            assert rollouts.prompts.cursor == first, "where the step before ended"
            assert kinds_of(rollouts.take(recorder)) == ["varied", "by_turn", "decided"]
            rollouts.advance()


@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_or_stopped_run_trains_the_same_episodes(
    tokenizer: TextTokenizer, staleness: int
) -> None:
    """Killed in a first turn, in a later step while other groups wait, and stopped when a step has
    just been taken."""

    def train(ends: list[tuple[str, int]]) -> tuple[list[list[tuple[Any, ...]]], dict[str, int]]:
        """What each step trained and dropped, and what the ledger counted. ends: how and after how
        many turns."""
        steps: list[list[tuple[Any, ...]]] = []
        saved: tuple[int, dict[str, Any], bytes] | None = None
        settings = {"asynchronous": AsynchronousConfig(max_staleness=staleness)}
        while len(steps) < STEPS:
            how, turns = ends.pop(0) if ends else ("", 10**9)
            StubClient.turns = 0
            StubClient.last_turn = turns if how == "kill" else 10**9
            with (
                rollouts_of(tokenizer, 0.3 if how == "kill" else 20.0, **settings) as rollouts,
                Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder,
            ):
                assert rollouts.prompts is not None
                if saved is not None:
                    first, state, packed = saved
                    rollouts.prompts.cursor = first
                    groups = (
                        unpack_groups(packed, rollouts.prompts.at, tokenizer.decode)
                        if packed
                        else {}
                    )
                    rollouts.saved = state, groups
                rollouts.begin(rule_of(5, **settings), SAMPLES, len(steps))
                stream = rollouts.stream
                assert stream is not None
                try:
                    while len(steps) < STEPS:
                        samples = rollouts.take(recorder)
                        if how == "stop" and StubClient.turns >= turns:
                            raise StopAsked("SIGTERM")
                        dropped = [sample for group in stream.dropped for sample in group]
                        steps.append([facts(sample) for sample in (*samples, *dropped)])
                        rollouts.prepare_sync(recorder)
                        rollouts.advance()
                        state, waiting = rollouts.state()
                        packed = pack_groups(waiting)
                        saved = stream.ledger.first, json.loads(json.dumps(state)), packed
                except StopAsked:
                    # The last checkpoint, with what was just taken
                    state, waiting = rollouts.state()
                    packed = pack_groups(waiting)
                    saved = saved[0] if saved else 0, json.loads(json.dumps(state)), packed
                except TryAgain:
                    pass  # the last checkpoint is all that is left
        return steps, stream.ledger.counts

    straight, counts = train([])
    for number, step in enumerate(straight):
        assert [row[0] for row in step[: GROUPS * SAMPLES : SAMPLES]] == [
            6 * number + place for place in (0, 2, 5)
        ]
    assert counts["broken"] == counts["no_signal"] / 2 == STEPS
    again, counts_again = train(ends := [("kill", 3), ("kill", 50), ("stop", 30)])
    assert again == straight and not ends
    assert {name: counts_again[name] for name in ("trained", "no_signal", "broken")} == {
        name: counts[name] for name in ("trained", "no_signal", "broken")
    }

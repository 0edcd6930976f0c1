"""A stream that is killed at any moment and resumes from its last checkpoint trains what it would
have trained."""

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest

from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import RunFailed
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rollout.ledger import DROPPED, Ledger, StepRule
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.rollout.progress import Progress
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.rollout.stream import GroupStream, Work

PROMPTS = [Prompt(str(n), "", "", (n, 7)) for n in range(500)]


class Engines:
    """Responses follow from the prompt, the index and the weights; they come after a random
    time."""

    def __init__(self, seed: int) -> None:
        self.loop = LoopThread()
        self.progress = Progress()
        self.chance = random.Random(seed)
        self.stopping = asyncio.Event()

    async def generate(self, group: GroupRequest) -> list[Sample]:
        version = group.weight_version
        cursor = group.prompt.cursor
        found = list(group.begun) or [
            Sample(group.prompt, 0, index, index, [], [], ("abort"), version, version)  # type: ignore[arg-type]
            for index in range(group.samples)
        ]
        try:
            await asyncio.wait_for(self.stopping.wait(), self.chance.random() * 0.01)
        except TimeoutError:
            return [
                continued(sample, [cursor, sample.index, version], "stop", version)
                for sample in found
            ]
        return [continued(sample, [version], "abort", version) for sample in found]

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.sleep(0.001)
        self.stopping = asyncio.Event()

    def wait(self, work: Any) -> Any:
        return work.result(timeout=240)


def continued(sample: Sample, ids: list[int], reason: Any, version: int) -> Sample:
    ids = [*sample.response_ids.tolist(), *ids]
    versions = (*sample.versions, (version, len(ids) - len(sample.response_ids)))
    oldest = sample.weight_version_oldest
    return Sample(
        sample.prompt,
        0,
        sample.index,
        sample.index,
        np.array(ids),
        -np.ones(len(ids)),
        reason,
        version,
        oldest,
        versions=versions,
    )


def train(
    rule: StepRule, kills: list[int], seed: int, waits: bool
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """The responses that each step trains, and the last state. kills: steps in which the run dies
    once, in the middle of its work; it resumes from the state saved at the end of the step
    before."""
    trained: list[list[list[int]]] = []
    saved: tuple[int, dict[str, Any], bytes] | None = None
    while len(trained) < rule.steps:
        engines = Engines(seed + 100 * len(kills))
        step = len(trained)
        stream = begin(engines, rule, step, saved)
        while len(trained) < rule.steps:
            groups = stream.take(lambda _: None)
            if kills and kills[0] == len(trained) + 1:
                del kills[0]  # taken groups are lost, with all in flight and graded
                break
            trained.append([sample.response_ids.tolist() for group in groups for sample in group])
            if waits and rule.staleness:
                stream.wait_until_graded()
            stream.advance()
            state, waiting = stream.state()
            saved = (stream.ledger.first, json.loads(json.dumps(state)), pack_groups(waiting))
            counts = state["counts"]
            assert counts["drawn"] == counts["trained"] + sum(
                counts.get(why, 0) for why in DROPPED
            ) + len(state["drawn_at"])
        stream.close()
        engines.loop.close()
    assert saved is not None
    return trained, saved[1]


def begin(
    engines: Any, rule: StepRule, step: int, saved: tuple[int, dict[str, Any], bytes] | None
) -> GroupStream:
    prompts = PromptSource(PROMPTS, seed=1, shuffle=False)
    ledger = Ledger(rule, 0 if saved is None else saved[0], step)

    def request(prompt: Prompt) -> GroupRequest:
        goes_on = rule.any_order
        return GroupRequest(
            prompt, 2, SamplingConfig(max_new_tokens=99), 99, 1, ledger.trained, goes_on=goes_on
        )

    def useful(group: list[Sample]) -> bool:
        return rule.most_draws is None or group[0].prompt.cursor % 3 > 0

    stream = GroupStream(
        engines, prompts, ledger, Work(request, lambda group: None, useful, 2 * rule.groups, 20.0)
    )
    if saved is not None:
        stream.restore(saved[1], unpack_groups(saved[2], prompts.at, lambda ids: "text"))
    return stream


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "rule",
    [
        StepRule(3, 8),
        StepRule(3, 8, staleness=1),
        StepRule(3, 8, staleness=3),
        StepRule(3, 8, 2.0, 60, 1),
    ],
)
def test_where_a_sync_waits_nothing_shows_that_it_was_killed(rule: StepRule, seed: int) -> None:
    straight, state = train(rule, [], seed, waits=True)
    killed, after = train(rule, [1, 3, 4, 7], seed + 7, waits=True)
    assert killed == straight, "prompts and the weights that answered them"
    if rule.most_draws is None:
        assert after == state
    versions = [{ids[2] for ids in step} for step in straight]
    assert versions == [{max(0, step - rule.staleness)} for step in range(8)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "rule", [StepRule(3, 8, staleness=2), StepRule(3, 8, 2.0, any_order=True, max_age=3)]
)
def test_otherwise_no_group_is_lost_or_trained_twice(rule: StepRule, seed: int) -> None:
    killed, state = train(rule, [2, 5, 6], seed, waits=False)
    # A response that was stopped has the versions that stopped it before prompt, index and version.
    cursors = [ids[-3] for step in killed for ids in step[::2]]
    assert len(set(cursors)) == len(cursors) == 24
    gone = state["counts"].get("stale", 0)
    assert len(set(range(state["next"])) - set(cursors) - set(map(int, state["drawn_at"]))) == gone
    if not rule.any_order:
        assert cursors == list(range(24))
    for step, responses in enumerate(killed):
        assert all(
            0 <= step - version <= rule.oldest
            for ids in responses
            for version in (ids[-1], *ids[:-3])
        )


class Quitter(Engines):
    """Its code cancels itself, as a bug in an agent or a library may."""

    async def generate(self, group: GroupRequest) -> list[Sample]:
        raise asyncio.CancelledError


def test_a_group_that_cancels_itself_fails_the_step() -> None:
    engines = Quitter(0)
    rule = StepRule(groups=2, steps=1)
    stream = GroupStream(
        engines,  # type: ignore[arg-type]
        PromptSource(PROMPTS, seed=1, shuffle=False),
        Ledger(rule, 0, 0),
        Work(lambda prompt: request_of(prompt), lambda group: None, lambda group: True, 4, 20.0),
    )
    with pytest.raises(RunFailed, match="group 0 ended without a grade"):
        stream.take(lambda _: None)
    engines.loop.close()


def request_of(prompt: Prompt) -> GroupRequest:
    return GroupRequest(prompt, 2, SamplingConfig(max_new_tokens=99), 99, 1, 0)

"""Responses that are trained window by window: every token once, under the weights that wrote it,
kills included."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import FinishReason, Prompt, Sample
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.rewards.grading import TRUNCATED, grade_samples
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import Ledger, StepRule
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.rollout.stream import GroupStream, StopAsked, Work
from vapo_megatron.training.rollouts import age_metrics

WINDOW = 4
GROUPS = 3
SIZE = 2
STEPS = 8
LONGEST = [10, 12]  # three windows; in the first case the last of them has two tokens
PROMPTS = [Prompt(str(n), "", "1", (n, 7), cursor=n) for n in range(100)]
RULE = StepRule(GROUPS, STEPS, windows=3)


def length_of(cursor: int, seed: int) -> int:
    """Up to three tokens more than there is room for; some end where a window ends."""
    return 1 + (5 * cursor + seed) % 15


class Client:
    """A server whose tokens count up from 1, from the position that its request gives."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.version = 0
        self.most = WINDOW
        self.held: set[int] = set()  # prompts that get no answer

    async def generate(
        self, prompts: Any, params: Any, experts: Any, ids: Any, unfinished: bool
    ) -> list[Completion]:
        assert not unfinished
        if not self.held.isdisjoint(prompt[0] for prompt in prompts):
            await asyncio.Event().wait()
        found = []
        for prompt, given in zip(prompts, params, strict=True):
            written = len(prompt) - 2
            most = given["max_new_tokens"]
            assert prompt[2:] == list(range(1, written + 1)) and 0 < most <= self.most
            left = length_of(prompt[0], given["sampling_seed"]) - written
            tokens = np.arange(written + 1, written + 1 + min(left, most), dtype=np.int32)
            reason: FinishReason = "stop" if left <= most else "length"
            logprobs = -np.ones(len(tokens), np.float32)
            count = len(tokens)
            versions = ((self.version, count),)
            found.append(
                Completion(tokens, logprobs, reason, self.version, self.version, versions=versions)
            )
        return found

    async def close(self) -> None: ...


def begin(
    saved: tuple[int, Any, bytes] | None, step: int, longest: int, window: int | None = WINDOW
) -> tuple[GroupStream, Dispatcher, Client, VerifierPool]:
    client = Client(EngineAddress("http://engine", "no log"))
    client.version = step
    client.most = window or longest
    dispatcher = Dispatcher([client.address], RolloutConfig(), [1], client=lambda *_: client)  # type: ignore[arg-type,return-value]
    prompts = PromptSource(PROMPTS, seed=1, shuffle=False)
    sampling = SamplingConfig(max_new_tokens=longest)
    pool = VerifierPool(RewardConfig(workers=1))

    def request(prompt: Prompt) -> GroupRequest:
        return GroupRequest(prompt, SIZE, sampling, longest, 1, client.version, window=window)

    def grade(group: list[Sample]) -> None:
        grade_samples(group, pool, lambda ids: "Answer: 1", RewardConfig())

    work = Work(request, grade, lambda group: True, GROUPS * SIZE, 20.0)
    rule = RULE if window is not None else StepRule(GROUPS, STEPS, any_order=True, max_age=9)
    stream = GroupStream(
        dispatcher, prompts, Ledger(rule, 0 if saved is None else saved[0], step), work
    )
    if saved is not None:
        stream.restore(saved[1], unpack_groups(saved[2], prompts.at, lambda ids: "text"))
    return stream, dispatcher, client, pool


def train(
    kills: Sequence[int],
    longest: int = LONGEST[0],
    stops: Sequence[int] = (),
    late: Sequence[int] = (),
) -> tuple[list[list[Sample]], dict[str, Any]]:
    """The samples of each step, and the ledger's counts. kills: steps in which the run dies once,
    with its groups;
    stops: steps in which a signal stops it once, while a continuing response is being
        written; late: steps in
    which one does when the groups are taken, which are not generated again."""
    steps: list[list[Sample]] = []
    saved = None
    left = list(kills)
    stops = list(stops)
    late = list(late)
    is_late = False
    while len(steps) < STEPS:
        stream, dispatcher, client, pool = begin(saved, len(steps), longest)
        if is_late:
            client.held = set(range(len(PROMPTS)))
            is_late = False
        while len(steps) < STEPS:
            if stops and stops[0] == len(steps) + 1:
                del stops[0]
                client.held = {max(sample.prompt.cursor for sample in steps[-1] if sample.goes_on)}
                saved = stop(stream)
                break
            groups = stream.take(lambda _: None)
            assert len(groups) == GROUPS
            client.held = set()
            if late and late[0] == len(steps) + 1:
                del late[0]
                state, waiting = stream.state()
                saved = (
                    0 if saved is None else saved[0],
                    json.loads(json.dumps(state)),
                    pack_groups(waiting),
                )
                is_late = True
                break
            if left and left[0] == len(steps) + 1:
                del left[0]
                break
            steps.append([sample for group in groups for sample in group])
            client.version += 1
            stream.advance()
            state, waiting = stream.state()
            saved = stream.ledger.first, json.loads(json.dumps(state)), pack_groups(waiting)
            assert state["counts"]["drawn"] == state["counts"]["trained"] + len(state["drawn_at"])
        stream.close()
        dispatcher.close()
        pool.close()
    assert saved is not None
    return steps, saved[1]["counts"]


def stop(stream: GroupStream) -> tuple[int, Any, bytes]:
    """What is saved when a signal comes while one group is written and the others of the step are
    graded."""
    with pytest.raises(StopAsked):
        stream.take(lambda _: None, lambda: "asked" if stream.ledger.graded == GROUPS - 1 else None)
    state, waiting = stream.state()
    assert any(s.goes_on and not s.is_trained for group in waiting.values() for s in group), (
        "a window waits as well"
    )
    return stream.ledger.first, json.loads(json.dumps(state)), pack_groups(waiting)


def facts(steps: list[list[Sample]]) -> list[list[Any]]:
    return [
        [
            (s.prompt.cursor, s.index, s.group, s.window_start, s.response_ids.tolist(), s.versions)
            for s in step
        ]
        for step in steps
    ]


@pytest.mark.parametrize("longest", LONGEST)
def test_every_token_trains_once_under_the_weights_that_wrote_it(longest: int) -> None:
    steps, counts = train([], longest)
    trained: dict[tuple[int, int], list[int]] = defaultdict(list)
    for step, samples in enumerate(steps):
        for sample in samples:
            assert sample.window_start is not None and 0 < sample.new_tokens <= WINDOW
            assert sample.versions[-1] == (step, sample.new_tokens), (
                "new tokens are of this step's weights"
            )
            trained[sample.prompt.cursor, sample.index] += sample.response_ids[
                sample.window_start :
            ].tolist()
        assert age_metrics(samples, step) == {
            "rollout/age_0_share": 1,
            "rollout/age_mean": 0,
            "rollout/age_max": 0,
        }
    seeds = {(s.prompt.cursor, s.index): s.seed for step in steps for s in step}
    last = {(s.prompt.cursor, s.index): s for step in steps for s in step}
    for key, tokens in trained.items():
        whole = min(longest, length_of(key[0], seeds[key]))
        assert tokens == list(range(1, len(tokens) + 1)), "in order, none of them twice"
        assert len(tokens) == whole or (last[key].goes_on and last[key] in steps[-1])
    assert any(len(tokens) > 2 * WINDOW for tokens in trained.values())
    assert counts["trained"] > GROUPS and counts.get("stale", 0) == 0


@pytest.mark.parametrize("longest", LONGEST)
def test_final_cut_is_wrong_and_continuing_one_has_no_reward_yet(longest: int) -> None:
    steps, _ = train([], longest)
    samples = [sample for step in steps for sample in step]
    reasons = {sample.finish_reason for sample in samples}
    assert reasons == {"stop", "length", "abort"}
    batch = from_samples(samples)
    for sample, cut in zip(samples, batch.truncated.tolist(), strict=True):
        assert cut == (sample.finish_reason == "abort")
        assert sample.correct == (sample.finish_reason == "stop")
        assert (sample.grade_reason == TRUNCATED) == (sample.finish_reason != "stop")
        assert (len(sample.response_ids) == longest) >= (sample.finish_reason == "length")
    assert batch.table().new_lengths.tolist() == [sample.new_tokens for sample in samples]


@pytest.mark.parametrize("kills", [[1], [2, 3], [4, 6, 8]])
def test_a_killed_run_goes_on_to_the_same_samples(kills: list[int]) -> None:
    straight, counts = train([])
    killed, after = train(kills)
    assert facts(killed) == facts(straight) and after == counts


@pytest.mark.parametrize("stops", [[2], [5, 6], [7, 8]])
def test_run_stopped_within_a_window_continues_the_same_samples(stops: list[int]) -> None:
    straight, counts = train([])
    stopped, after = train([], stops=stops)
    assert facts(stopped) == facts(straight) and after == counts


def test_a_stop_while_groups_are_graded_keeps_their_beginnings() -> None:
    stream, *others = begin(None, 0, LONGEST[1])
    stream.take(lambda _: None)
    stream.advance()
    _, begun = stream.state()
    grading = []
    leave = threading.Event()

    def grade(group: list[Sample]) -> None:
        grading.append(group)
        leave.wait(20)

    stream._work = replace(stream._work, grade=grade)
    with pytest.raises(StopAsked):
        stream.take(lambda _: None, lambda: "asked" if len(grading) == GROUPS else None)
    _, waiting = stream.state()
    leave.set()
    close(stream, *others)
    assert begun and waiting == begun, "a step has trained them"


@pytest.mark.parametrize("late", [[1], [2, 3], [5, 8]])
def test_run_stopped_after_a_rollout_takes_the_same_groups_again(late: list[int]) -> None:
    straight, counts = train([])
    stopped, after = train([], late=late)
    assert facts(stopped) == facts(straight) and after == counts


@pytest.mark.parametrize(("before", "after"), [(None, WINDOW), (WINDOW, None)])
def test_after_mode_change_at_resume_responses_are_written_again(
    before: int | None, after: int | None
) -> None:
    """Of two groups that wait, one is finished, and of one there is a beginning that a step has
    trained, or not."""
    stream, *others = begin(None, 0, LONGEST[1], before)
    stream.take(lambda _: None)
    stream.advance()
    state, _ = stream.state()
    close(stream, *others)
    waiting = {}
    starts = (None, None) if before is None else (0, WINDOW)
    state |= {"next": GROUPS + 2, "drawn_at": {str(GROUPS): 0, str(GROUPS + 1): 0}}
    for number, start, reason in zip((GROUPS, GROUPS + 1), starts, ("stop", "abort"), strict=True):
        ids = list(range(1, WINDOW + 1))
        logprobs = [-1.0] * WINDOW
        waiting[number] = [
            Sample(
                PROMPTS[number],
                0,
                i,
                i,
                ids,
                logprobs,
                reason,
                0,
                0,
                reward=1.0,
                correct=True,
                window_start=start,
            )  # type: ignore[arg-type]
            for i in range(SIZE)
        ]
    stream, *others = begin((GROUPS, state, pack_groups(waiting)), 1, LONGEST[1], after)
    groups = {group[0].prompt.cursor: group for group in stream.take(lambda _: None)}
    close(stream, *others)
    assert {GROUPS, GROUPS + 1} <= groups.keys() and all(
        len(group) == SIZE for group in groups.values()
    )
    samples = [sample for group in groups.values() for sample in group]
    assert {sample.window_start for sample in samples} == {None if after is None else 0}
    assert {version for sample in samples for version, _ in sample.versions} == {1}, (
        "of the weights of now alone"
    )
    assert from_samples(samples).samples == len(samples)


def close(stream: GroupStream, dispatcher: Dispatcher, client: Client, pool: VerifierPool) -> None:
    stream.close()
    dispatcher.close()
    pool.close()

"""How a stream of groups begins and ends: resumed, stopped, failed, closed."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from stub_clients import PROMPTS, SAMPLING, dispatcher, stream_of

from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import FinishReason, Prompt, Sample
from vapo_megatron.errors import RunFailed
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import Ledger, StepRule
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.rollout.stream import GRADED_AT_ONCE, GroupStream, StopAsked, Work


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for five seconds at most."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def response_to(cursor: int, reason: FinishReason, window_start: int | None = None) -> Sample:
    """Two tokens."""
    ids = np.array([7, 7], np.int32)
    logprobs = np.full(2, -1, np.float32)
    return Sample(PROMPTS[cursor], 0, 0, 0, ids, logprobs, reason, 0, 0, window_start=window_start)


def resumed(
    made: Dispatcher, rule: StepRule, step: int, drawn: int, groups: dict[int, list[Sample]]
) -> GroupStream:
    """A stream after a step, for which so many groups were drawn before the first one. Each has
    one response; the first engine writes group 0, the second one the others."""

    def ask(prompt: Prompt) -> GroupRequest:
        engine = "http://engine0" if prompt.cursor == 0 else "http://engine1"
        return GroupRequest(prompt, 1, SAMPLING, 8, 1, 0, goes_on=True, engine=engine)

    prompts = PromptSource(PROMPTS, seed=1, shuffle=False)
    work = Work(ask, lambda group: None, lambda group: True, rule.groups, 5.0)
    stream = GroupStream(made, prompts, Ledger(rule, 0, step), work)
    drawn_at = {str(number): 0 for number in range(drawn)}
    stream.restore({"counts": {"drawn": drawn}, "next": drawn, "drawn_at": drawn_at}, groups)
    return stream


def test_a_resumed_stream_uses_each_saved_group_that_it_can() -> None:
    """Group 0 is of a run with windows, 1 unfinished, 2 graded."""
    saved = {
        0: [response_to(0, "abort", window_start=0)],
        1: [response_to(1, "abort")],
        2: [response_to(2, "stop")],
    }
    made, (client,) = dispatcher(0.0)
    with made:
        stream = resumed(made, StepRule(3, 9, any_order=True), 1, 3, saved)
        assert stream.dropped == []
        stream.wait_until_graded()
        groups = stream.take(lambda _: None)
        stream.close()
    assert [group[0].prompt.cursor for group in groups] == [0, 1, 2]
    assert sorted(client.read) == [([0], 8), ([1, 7, 7], 6)]


def test_a_resumed_group_that_is_finished_is_not_written_again() -> None:
    saved = {number: [response_to(number, "abort")] for number in range(2)}
    made, (client,) = dispatcher(0.0)
    with made:
        stream = resumed(made, StepRule(1, 9, 2.0, any_order=True), 1, 2, saved)
        stream.wait_until_graded()
        steps = []
        for _ in range(2):
            ((sample,),) = stream.take(lambda _: None)
            steps.append(sample.prompt.cursor)
            stream.advance()
        stream.close()
    assert steps == [0, 1]
    assert client.asked.count(0) == client.asked.count(1) == 1


def test_a_resumed_group_that_is_too_old_is_aborted() -> None:
    """Otherwise it would be finished before the step is."""
    made, clients = dispatcher(0.4, 0.6)
    with made:
        stream = resumed(made, StepRule(1, 9, any_order=True, max_age=1), 3, 1, {})
        wait_until(lambda: bool(clients[0].running))
        ((sample,),) = stream.take(lambda _: None)
        stream.close()
    assert clients[0].asked[0] == 0 and len(clients[0].aborted) == len(clients[0].asked)
    assert sample.prompt.cursor == 1


def test_a_stop_is_seen_while_nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vapo_megatron.rollout.stream._LOOK_SECONDS", 0.01)
    looks: list[int] = []

    def interruption() -> str | None:
        looks.append(1)
        return "SIGTERM" if len(looks) == 3 else None

    made, _ = dispatcher(30.0)
    with made:
        stream = stream_of(made, StepRule(1, 1), lambda group: None, timeout_s=5.0)
        with pytest.raises(StopAsked, match="SIGTERM"):
            stream.take(lambda _: None, interruption)
        stream.close()


def test_what_a_server_ends_by_itself_goes_on_after_a_stop_too() -> None:
    made, clients = dispatcher(0.02, 30.0)

    def ask(prompt: Prompt) -> GroupRequest:
        return GroupRequest(prompt, 2, SAMPLING, 8, 1, 0, goes_on=True)

    rule = StepRule(1, 9, 2.0, any_order=True, max_age=9)
    with made:
        work = Work(ask, lambda group: None, lambda group: True, 2, 5.0)
        stream = GroupStream(made, PromptSource(PROMPTS, seed=1, shuffle=False), Ledger(rule), work)
        stream.take(lambda _: None)
        stream.advance()
        for client in clients:
            client.seconds = 0.02
            client.stopped.set()
        (group,) = stream.take(lambda _: None)
        stream.close()
    assert [sample.finish_reason for sample in group] == ["stop", "stop"]


def test_a_step_ends_when_what_was_stopped_is_graded() -> None:
    """The second group is finished as it is stopped."""
    made, _ = dispatcher(0.01, 30.0)

    def grade(group: list[Sample]) -> None:
        time.sleep(0.5 * group[0].prompt.cursor)

    with made:
        stream = stream_of(made, StepRule(1, 9, 2.0, any_order=True), grade)
        stream.take(lambda _: None)
        assert stream.ledger.graded == 1
        stream.close()


def test_nothing_is_drawn_after_a_failure() -> None:
    """Though neither of the two groups is useful, and ten more may be drawn."""
    made, (client,) = dispatcher(0.01, max_running_requests=1)
    graded: list[int] = []

    def grade(group: list[Sample]) -> None:
        graded.append(group[0].prompt.cursor)
        if len(graded) == 1:
            raise RunFailed("the verifier is gone")

    with made:
        stream = stream_of(made, StepRule(2, 1, most_draws=12), grade, lambda group: False)
        with pytest.raises(RunFailed, match="the verifier is gone"):
            stream.take(lambda _: None)
        wait_until(lambda: len(graded) == 2)
        time.sleep(0.05)
        stream.close()
    assert client.asked == [0, 1]


def test_a_closed_stream_draws_nothing() -> None:
    made, (client,) = dispatcher(0.0)
    with made:
        stream = stream_of(made, StepRule(1, 9, staleness=1), lambda group: None)
        stream.take(lambda _: None)
        stream.wait_until_graded()
        asked = list(client.asked)
        stream.close()
        stream.advance()
        time.sleep(0.05)
    assert client.asked == asked == [0, 1]


def test_closing_waits_for_aborts_and_not_for_grades() -> None:
    """As many groups are graded at once as may be, one waits for a grader, and one is written."""
    waiting = GRADED_AT_ONCE + 1
    made, clients = dispatcher(0.0, 30.0)
    clients[1].abort_seconds = 0.05
    leave = threading.Event()
    begun: list[int] = []

    def grade(group: list[Sample]) -> None:
        begun.append(group[0].prompt.cursor)
        leave.wait(20)

    prompts = PromptSource(PROMPTS, seed=1, shuffle=False)

    def ask(prompt: Prompt) -> GroupRequest:
        engine = "http://engine1" if prompt.cursor == waiting else "http://engine0"
        return GroupRequest(prompt, 1, SAMPLING, 8, 1, 0, engine=engine)

    work = Work(ask, grade, lambda group: True, waiting + 1, 20.0)
    with ThreadPoolExecutor() as threads, made:
        stream = GroupStream(made, prompts, Ledger(StepRule(waiting + 1, 1)), work)
        threads.submit(stream.take, lambda _: None)
        try:
            wait_until(lambda: len(begun) == GRADED_AT_ONCE and len(clients[0].asked) == waiting)
            time.sleep(0.05)
            assert len(begun) == GRADED_AT_ONCE
            threads.submit(stream.close).result(timeout=5)
            assert len(clients[1].aborted) == 1
        finally:
            leave.set()
        time.sleep(0.05)
    assert len(begun) == GRADED_AT_ONCE

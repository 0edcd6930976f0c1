"""Which engine has how much work, and how it gets rid of it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from stub_clients import PROMPTS, SAMPLING, dispatcher, request, stream_of

from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import StepRule
from vapo_megatron.rollout.request import GroupRequest


def group_of(cursor: int, **others: Any) -> GroupRequest:
    return GroupRequest(PROMPTS[cursor], 2, SAMPLING, 8, 1, 0, **others)


def generate_at_once(made: Dispatcher, groups: Sequence[GroupRequest]) -> None:
    async def generate() -> None:
        await asyncio.gather(*(made.generate(group) for group in groups))

    made.loop.run(generate())


def test_an_engine_gets_twice_the_responses_that_it_runs() -> None:
    made, (client,) = dispatcher(0.01, max_running_requests=3)
    with made:
        made.collect(request())
    assert client.most_running == 6


def test_the_next_group_goes_where_fewest_tokens_are_to_come() -> None:
    """Prompt and response count, and each response of a group."""
    long_prompt = Prompt("long", "", "", (1,) * 20)
    groups = [
        GroupRequest(PROMPTS[0], 2, SAMPLING, 50, 1, 0),
        GroupRequest(long_prompt, 2, SAMPLING, 8, 1, 0),
        group_of(2),
    ]
    made, clients = dispatcher(0.05, 0.05)
    with made:
        generate_at_once(made, groups)
    assert [client.asked for client in clients] == [[0], [1, 2]]


def test_a_group_goes_to_the_engine_that_has_its_prompt() -> None:
    made, clients = dispatcher(0.05, 0.05)
    with made:
        generate_at_once(made, [group_of(n, engine="http://engine1") for n in range(2)])
    assert [client.asked for client in clients] == [[], [0, 1]]


def test_busy_seconds_are_those_in_which_engines_have_work() -> None:
    made, _ = dispatcher(0.1, 0.2)
    busy: list[float] = []
    with made:
        start = time.monotonic()
        made.collect(request(), on_done=lambda _: busy.append(made.busy_seconds()))
        longest = 2 * (time.monotonic() - start)
        after = made.busy_seconds()
    assert busy[0] >= 0.1 and busy == sorted(busy) and busy[-1] <= after <= longest


def test_an_idle_engine_that_is_lost_gets_no_work() -> None:
    made, clients = dispatcher(0.01, 0.01)
    with made:
        made.lose("http://engine1")
        made.collect(request())
    assert clients[0].asked == list(range(12)) and not clients[1].asked


def test_a_group_cancelled_as_it_gets_an_engine_frees_it() -> None:
    made, (client,) = dispatcher(0.02, max_running_requests=1)

    async def cancel_the_second() -> None:
        second = asyncio.create_task(made.generate(group_of(1)))
        await made.generate(group_of(0))
        # It has been given the engine, and does not know it yet.
        second.cancel()
        await asyncio.wait([second])
        await asyncio.wait_for(made.generate(group_of(2)), 5)

    with made:
        made.loop.run(cancel_the_second())
    assert client.asked == [0, 2]


def test_stop_ends_what_runs_and_what_waits() -> None:
    made, (client,) = dispatcher(30.0, max_running_requests=2)
    client.version = 3
    groups = [
        GroupRequest(PROMPTS[n], 2, SAMPLING, 8, 1, weight_version=3, goes_on=True)
        for n in range(4)
    ]

    async def stop() -> list[list[Sample]]:
        tasks = [asyncio.create_task(made.generate(group)) for group in groups]
        while len(client.running) < 4:
            await asyncio.sleep(0.001)
        await made.stop()
        return await asyncio.wait_for(asyncio.gather(*tasks), 5)

    with made:
        answers = made.loop.run(stop())
    assert client.asked == [0, 1] and len(client.aborts[0]) == 4, "all of them at once"
    for group in answers[2:]:
        assert [sample.goes_on for sample in group] == [True, True]
        assert [len(sample.response_ids) for sample in group] == [0, 0]
        assert {(s.weight_version_oldest, s.weight_version) for s in group} == {(3, 3)}


@pytest.mark.parametrize("error", [TryAgain("gone"), RunFailed("refused"), None])
def test_a_cancelled_group_ends_whatever_becomes_of_its_abort(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the engine does not answer."""
    monkeypatch.setattr("vapo_megatron.rollout.dispatcher._ABORT_SECONDS", 0.05)
    made, (client,) = dispatcher(30.0)
    client.abort_error = error
    client.abort_seconds = 30.0 if error is None else 0.0

    async def cancel() -> bool:
        task = asyncio.create_task(made.generate(group_of(0)))
        while not client.running:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        return task.cancelled()

    with made:
        assert made.loop.run(cancel())
    assert len(client.aborts) == 1


def test_who_waits_for_a_step_is_called_meanwhile(look_every: Callable[[float], None]) -> None:
    look_every(0.01)
    made, _ = dispatcher(0.2)
    calls: list[int] = []
    with made:
        made.on_wait = lambda: calls.append(1)
        stream = stream_of(made, StepRule(1, 1), lambda group: None)
        stream.take(lambda _: None)
        stream.close()
    assert len(calls) > 2


def test_tool_calls_are_parsed_where_the_text_was_written() -> None:
    made, _ = dispatcher(0.0, 0.0)
    tools: list[dict[str, Any]] = [{"name": "add"}]
    with made:
        for expected in ("http://engine1", "http://engine0"):
            parsed = made.loop.run(made.parse_tool_calls("http://engine1", "text", tools, "qwen25"))
            assert parsed == (expected, ["text", tools, "qwen25"])
            made.lose("http://engine1")

"""Groups over several servers, without servers: who gets which, which are aborted, which go to
others."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest
from stub_clients import PROMPTS, SAMPLING, dispatcher, request, stream_of

from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.engines.inside.heartbeat import END_PATH
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.rollout.ledger import Ledger, StepRule
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.rollout.stream import GroupStream, Work


@pytest.fixture
def ends() -> Iterator[tuple[list[str], list[str]]]:
    """URLs of three servers that can be asked to end, and the requests so far: which one, and the
    cause."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            path, _, query = self.path.partition("?")
            assert path.endswith(f"/{END_PATH}")
            asked.append(f"{path.split('/')[1]}: {parse_qs(query)['cause'][0]}")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield (
            [f"http://127.0.0.1:{server.server_port}/engine{number}" for number in range(3)],
            asked,
        )
        server.shutdown()


def test_groups_come_in_request_order_and_go_where_there_is_room() -> None:
    made, clients = dispatcher(0.01, 0.2, max_running_requests=2)
    with made:
        done: list[int] = []
        samples = made.collect(request(), done.append)
    assert [(s.group, s.index) for s in samples] == [(g, i) for g in range(12) for i in range(2)]
    assert [s.response_ids[0] for s in samples] == [g for g in range(12) for _ in range(2)]
    assert sum(done) == 24 and len(clients[0].asked) > len(clients[1].asked) > 0
    assert all(asked == sorted(asked) for asked in (c.asked for c in clients))
    assert len({s.seed for s in samples}) == 24
    wrote = [[client.asked.count(g) for client in clients] for g in range(12)]
    assert [s.engine for s in samples[::2]] == [f"http://engine{one.index(1)}" for one in wrote]


def test_what_a_lost_server_had_goes_to_the_others_first_of_all() -> None:
    made, clients = dispatcher(30.0, 0.02, max_running_requests=2)
    with made, ThreadPoolExecutor() as threads:
        work = threads.submit(made.collect, request())
        while len(clients[1].asked) < 4 and not work.done():
            time.sleep(0.001)
        made.lose("http://engine0")
        samples = work.result(timeout=120)
    assert [s.group for s in samples] == [g for g in range(12) for _ in range(2)]
    had = clients[0].asked
    assert had and clients[1].asked[4:][: len(had) + 2].index(had[0]) <= 2, (
        "not behind those that wait"
    )


def test_dead_or_lying_server_gets_no_work_until_used_again(
    ends: tuple[list[str], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    urls, ended = ends
    made, clients = dispatcher(
        0.03, 30.0, 0.01, urls=urls, are_replaced=True, max_running_requests=2
    )
    clients[2].version = 3  # of weights that nobody wants
    with made, ThreadPoolExecutor() as threads:
        work = threads.submit(made.collect, request())
        while not clients[1].asked:
            time.sleep(0.001)
        made.loop.run(clients[1].close())
        samples = work.result(timeout=120)
        assert [s.group for s in samples] == [g for g in range(12) for _ in range(2)]
        assert (
            {s.weight_version for s in samples} == {0}
            and len(clients[1].asked) <= 2
            and len(clients[2].asked) <= 2
        )
        told = time.monotonic() + 5
        while not ended and time.monotonic() < told:
            time.sleep(0.01)
        (cause,) = ended  # the dead one cannot be told to end
        assert cause.startswith("engine2: ") and "of version 3 to 3, expected 0" in cause
        clients[2].version = 0
        asked = len(clients[2].asked)
        made.use([urls[0], urls[2]])
        assert len(made.collect(request())) == 24 and len(clients[2].asked) > asked
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    for why in ("the server is gone", "of version 3 to 3, expected 0"):
        assert any(why in message for message in caplog.messages), "the log has each cause"
    assert all("removed from rotation" in message for message in caplog.messages)


def test_without_any_server_somebody_is_called(look_every: Callable[[float], None]) -> None:
    look_every(0.02)
    made, clients = dispatcher(0.05, 0.05, are_replaced=True)
    calls: list[int] = []

    def bring_back() -> None:
        calls.append(1)
        if len(calls) == 3:
            clients[0].gone.clear()
            made.use(["http://engine0"])

    for client in clients:
        client.gone.set()
    with made:
        made.on_no_engine_left = bring_back
        samples = made.collect(request())
    assert len(calls) == 3 and [s.group for s in samples] == [
        g for g in range(12) for _ in range(2)
    ]


def test_without_a_replacement_the_cause_of_the_last_is_raised(
    ends: tuple[list[str], list[str]],
) -> None:
    urls, ended = ends
    made, clients = dispatcher(0.05, 0.05, urls=urls[:2])
    for client in clients:
        client.gone.set()
    with made:
        made.use(urls[:1])
        with pytest.raises(TryAgain, match="gone"):
            made.collect(request())
        clients[1].gone.clear()
        clients[1].version = 3
        made.use(urls[1:2])
        with pytest.raises(RunFailed, match="of version 3 to 3, expected 0"):
            made.collect(request())
        clients[1].version = 0
        assert len(made.collect(request())) == 24, "it may be asked again"
        clients[0].gone.clear()
        clients[0].version = 3
        made.use(urls)
        assert {sample.weight_version for sample in made.collect(request())} == {0}
        assert clients[0].asked[-1] < 11, "the other one wrote the rest"
        time.sleep(0.1)
    assert not ended, "nobody would start it again"


def test_a_refusal_ends_all_and_what_runs_is_aborted() -> None:
    made, clients = dispatcher(0.1, 30.0)
    clients[0].refusal = RunFailed("generate was refused")
    with made, pytest.raises(RunFailed, match="refused"):
        made.collect(request())
    assert len(clients[1].aborted) == 2 * len(clients[1].asked) > 0 and not clients[1].running


def test_a_collection_has_a_deadline() -> None:
    made, _ = dispatcher(0.01, 30.0, collect_timeout_s=0.5, max_running_requests=1)
    done: list[int] = []
    with made, pytest.raises(TryAgain) as late:
        made.collect(request(), done.append)
    arrived = (
        f"{sum(done)} of 24 responses arrived, and then none for rollout.collect_timeout_s=0.5"
    )
    assert sum(done) > 2 and str(late.value).startswith(arrived)
    assert str(late.value).endswith("http://engine0.log")


def test_a_collection_may_take_long_while_responses_arrive() -> None:
    """Twelve groups one after another take twice the limit; each arrives within it."""
    made, _ = dispatcher(0.1, collect_timeout_s=0.6, max_running_requests=1)
    with made:
        start = time.monotonic()
        assert len(made.collect(request())) == 24
        assert time.monotonic() - start > 1.1


def test_a_step_may_take_long_while_responses_arrive() -> None:
    made, _ = dispatcher(0.1, max_running_requests=1)
    with made:
        stream = stream_of(made, StepRule(8, 1), lambda group: None, timeout_s=0.6)
        start = time.monotonic()
        assert len(stream.take(lambda _: None)) == 8
        assert time.monotonic() - start > 0.7
        stream.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_response_begun_by_older_weights_is_refused(goes_on: bool) -> None:
    made, (client,) = dispatcher(0.01)
    client.version = 3
    client.oldest = 2
    group = GroupRequest(PROMPTS[0], 2, SAMPLING, 8, 1, weight_version=3, goes_on=goes_on)
    with made, pytest.raises(RunFailed, match="of version 2 to 3, expected 3"):
        made.loop.run(made.generate(group))


def test_groups_are_graded_while_others_are_generated() -> None:
    made, clients = dispatcher(0.2, max_running_requests=1)  # one after another
    running_when_graded: list[int] = []

    def grade(group: list[Sample]) -> None:
        running = len(clients[0].running)
        deadline = time.monotonic() + 10
        # The next group starts while this one is graded, or never; after the last there is none.
        while running == 0 and group[0].prompt.cursor < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
            running = len(clients[0].running)
        running_when_graded.append(running)

    with made:
        stream = stream_of(made, StepRule(4, 1), grade)
        groups = stream.take(lambda _: None)
        stream.close()
    assert [group[0].prompt.cursor for group in groups] == [0, 1, 2, 3]
    assert [sample.group for group in groups for sample in group] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert running_when_graded[:2] == [2, 2] and running_when_graded[3] == 0, (
        "the next one is under way"
    )


def test_what_a_step_does_not_need_is_aborted() -> None:
    made, clients = dispatcher(0.01, 30.0)
    with made:
        # Prompts alternate between a fast server and one that never answers.
        stream = stream_of(made, StepRule(1, 2, 4.0, 12), lambda group: None)
        for step in range(2):
            groups = stream.take(lambda _: None)
            assert [group[0].prompt.cursor for group in groups] == [step]
            assert clients[1].aborted and not clients[1].running
            assert stream.ledger.first == step + 1
            stream.advance()
        stream.close()


def test_what_is_not_finished_goes_on_under_the_next_weights() -> None:
    made, (fast, slow) = dispatcher(0.02, 30.0)
    version = 5

    def ask(prompt: Prompt) -> GroupRequest:
        return GroupRequest(prompt, 2, SAMPLING, 8, 1, version, goes_on=True)

    fast.version = slow.version = version
    prompts = PromptSource(PROMPTS, seed=1, shuffle=False)
    rule = StepRule(1, 9, oversampling=2.0, any_order=True, max_age=3)
    with made:
        work = Work(ask, lambda group: None, lambda group: True, 2, 20.0)
        stream = GroupStream(made, prompts, Ledger(rule), work)
        (first,) = stream.take(lambda _: None)
        assert first[0].prompt.cursor == 0 and slow.asked == [1] and not slow.running
        stream.advance()
        packed = pack_groups(stream.state()[1])
        state = json.loads(json.dumps(stream.state()[0]))
        stream.close()

        slow.seconds = 0.02
        fast.version = slow.version = version = 6
        again = GroupStream(made, prompts, Ledger(rule, 0, 1), work)  # as from a checkpoint
        groups = unpack_groups(packed, prompts.at, lambda ids: "text")
        assert list(groups) == [1]
        again.restore(state, groups)
        (group,) = again.take(lambda _: None)
        again.close()
    assert group[0].prompt.cursor == 1 and [s.finish_reason for s in group] == ["stop", "stop"]
    assert ([1, 1, 1, 2], 5) in fast.read + slow.read, (
        "prompt and what there is of the response; five tokens are left"
    )
    assert group[0].response_ids.tolist() == [1, 1, 2, 1, 1]
    assert group[0].rollout_logprobs.tolist() == [-6, -6, -6, -7, -7], (
        "each beside the token that it is of"
    )
    assert group[0].versions == ((5, 3), (6, 2)) and group[1].versions == ((5, 2),)
    assert (group[0].weight_version_oldest, group[0].weight_version) == (5, 6)
    assert group[0].seed != group[1].seed and group[1].response_ids.tolist() == [1, 1], (
        "finished responses stay"
    )


def test_what_a_server_ends_by_itself_goes_on_at_once() -> None:
    made, (client,) = dispatcher(0.3)

    def ask(prompt: Prompt) -> GroupRequest:
        return GroupRequest(prompt, 2, SAMPLING, 8, 1, 0, goes_on=True)

    with made:
        work = Work(ask, lambda group: None, lambda group: True, 2, 10.0)
        stream = GroupStream(
            made, PromptSource(PROMPTS, seed=1, shuffle=False), Ledger(StepRule(1, 1)), work
        )
        client.stopped.set()
        (group,) = stream.take(lambda _: None)
        stream.close()
    assert group[0].response_ids.tolist() == [0, 1, 2, 0, 1] and client.asked == [0, 0]


def test_what_grading_raises_ends_the_step() -> None:
    made, _ = dispatcher(0.01)

    def grade(group: list[Sample]) -> None:
        raise RunFailed("the verifier is gone")

    with made, pytest.raises(RunFailed, match="the verifier is gone"):
        stream_of(made, StepRule(4, 1), grade).take(lambda _: None)

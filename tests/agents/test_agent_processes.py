"""Episodes in processes of their own are those of rank 0's process, and their ends are its ends."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from stub_episodes import TEMPLATE, Engine, agents_of, fresh_engine, make_tokenizer

from vapo_megatron.agents import processes
from vapo_megatron.agents.agent import run_environment
from vapo_megatron.agents.episodes import MOST_BROKEN_GROUPS, Agents
from vapo_megatron.agents.processes import AgentProcesses
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.weights.routed_experts import ExpertChoices

pytestmark = pytest.mark.usefixtures("fresh")
TURNS = 4
ADD_ID = 104  # of the word after w99
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Countdown:
    """Pays a little at each turn."""

    def __init__(self) -> None:
        self.left = TURNS

    async def reset(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return list(task["messages"])

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        self.left -= 1
        return [{"role": "user", "content": f"w{self.left}"}], 0.25, self.left == 0


async def plays(task: dict[str, Any], base_url: str, http_client: Any) -> Any:
    """As the row says."""
    how = task["how"]
    if how == "raises":
        raise KeyError("of the user's")
    if how == "ends its process":
        os._exit(7)
    if how == "forks and ends":
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        fork.start()
        Path(task["pid_file"]).write_text(str(fork.pid))
        os._exit(7)
    if how == "closes its output":
        sys.stdout.close()
        threading.Thread(target=time.sleep, args=(600,)).start()
    if how == "keeps a lock in its row":
        task["notes"].append(threading.Lock())
    if how == "waits":
        await asyncio.sleep(60)
    if how == "countdown":
        return await run_environment(Countdown)(task, base_url, http_client)
    body = {"messages": task["messages"]} | ({"tools": [ADD]} if how == "calls a tool" else {})
    answer = await http_client.post(f"{base_url}/chat/completions", json=body)
    message = answer.json()["choices"][0]["message"]
    if how == "calls a tool":
        return float(len(message["tool_calls"]))
    if how == "tells its path":
        return float(os.environ.get("PYTHONPATH", "") == task["path"])
    return float(os.getpid())


Play = Callable[..., list[Sample]]


class Table:
    """Agents on stub engines."""

    def __init__(self, tokenizer: TextTokenizer, processes: int, timeout_s: float = 60.0) -> None:
        episode = EpisodeConfig(
            max_tokens=200, processes=processes, tool_parser="qwen25", timeout_s=timeout_s
        )
        self.config = RolloutConfig(
            agent=f"{__name__}:plays", episode=episode, max_running_requests=1
        )
        stub: Any = Engine
        addresses = [EngineAddress("http://stub", "")]
        self.dispatcher = Dispatcher(addresses, self.config, [tokenizer.eos_id], client=stub)
        kind: Any = AgentProcesses if processes else Agents
        self.agents = kind(self.dispatcher, tokenizer, self.config)
        self._tokens = tuple(tokenizer.encode_prompt("w3 w4"))

    def request(self, how: str, samples: int = 2, cursor: int = 7, **fields: Any) -> GroupRequest:
        row = {"how": how, "notes": []} | fields.pop("row", {})
        prompt = Prompt("row", "w3 w4", "w9", self._tokens, cursor=cursor, extra=row)
        sampling = SamplingConfig(max_new_tokens=12)
        experts = fields.pop("experts", None)
        return GroupRequest(prompt, samples, sampling, 12, 11, 0, experts, **fields)

    def play(self, *groups: GroupRequest) -> list[list[Sample]]:
        async def play() -> list[list[Sample]]:
            return list(await asyncio.gather(*map(self.agents.generate, groups)))

        return self.dispatcher.loop.run(play(), 240)

    def close(self) -> None:
        self.agents.close()
        self.dispatcher.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    template = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}" + TEMPLATE
    return make_tokenizer(tmp_path_factory.mktemp("words"), template, ["add"])


@pytest.fixture(scope="module")
def others(tokenizer: TextTokenizer) -> Iterator[Table]:
    """Two processes for all tests of this file."""
    fresh_engine()
    table = Table(tokenizer, processes=2)
    yield table
    table.close()


@pytest.fixture
def own(tokenizer: TextTokenizer) -> Iterator[Table]:
    """This process."""
    table = Table(tokenizer, processes=0)
    yield table
    table.close()


def _wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def fields_of(sample: Sample) -> dict[str, Any]:
    """What is trained on, as plain values."""
    arrays = ("response_ids", "rollout_logprobs", "loss_mask", "turn_rewards", "routed_experts")
    values = {name: getattr(sample, name) for name in arrays}
    return {name: None if value is None else value.tolist() for name, value in values.items()} | {
        name: getattr(sample, name)
        for name in ("prompt", "index", "seed", "reward", "finish_reason", "turns", "versions")
    }


@pytest.mark.parametrize("experts", [None, ExpertChoices(1, 2, 256)])
def test_episodes_are_those_of_one_process(
    others: Table, own: Table, experts: ExpertChoices | None
) -> None:
    played = []
    for table in (others, own):
        fresh_engine()
        for cursor in (7, 8):  # one after another: the stub's experts count its calls
            ((sample,),) = table.play(table.request("countdown", 1, cursor, experts=experts))
            played.append(fields_of(sample))
    assert played[:2] == played[2:]
    first = played[0]
    assert first["turn_rewards"] and sum(first["turn_rewards"]) == pytest.approx(0.25 * TURNS)
    assert len(first["turns"]) == TURNS


def test_windows_go_on_with_what_was_recorded(others: Table, own: Table) -> None:
    ends = []
    for table in (others, own):
        (begun,) = table.play(table.request("countdown", window=3))
        assert all(sample.goes_on for sample in begun)
        (ended,) = table.play(table.request("countdown", window=3, begun=begun))
        ends.append([fields_of(sample) for sample in ended])
    assert ends[0] == ends[1] and len(ends[0][0]["turns"]) == TURNS


def test_both_processes_play_and_none_is_rank_0(others: Table) -> None:
    groups = [others.request("once", cursor=cursor) for cursor in range(6)]
    pids = Counter(sample.reward for group in others.play(*groups) for sample in group)
    assert len(pids) == 2 and float(os.getpid()) not in pids
    assert set(pids.values()) == {6}, "each plays half of the groups"


def test_the_engines_parser_reads_tool_calls(others: Table) -> None:
    Engine.script = [[4, ADD_ID, 5, 2], [ADD_ID, 5, ADD_ID, 6, 2]]
    calls = [others.play(others.request("calls a tool", samples=1))[0][0].reward for _ in range(2)]
    assert calls == [1.0, 2.0]


def test_an_agent_may_keep_anything_in_its_row(others: Table) -> None:
    request = others.request("keeps a lock in its row")
    (group,) = others.play(request)
    assert all(sample.reward for sample in group), [sample.grade_reason for sample in group]
    assert [sample.prompt.extra for sample in group] == [request.prompt.extra] * 2


def test_groups_that_break_in_a_row_are_those_of_all(others: Table) -> None:
    others.play(others.request("once"))
    breaking = [others.request("raises", 1, cursor) for cursor in range(MOST_BROKEN_GROUPS - 1)]
    others.play(*breaking)
    others.play(others.request("once"))
    others.play(*breaking)
    with pytest.raises(RunFailed, match="broke in each of 16 groups one after another"):
        others.play(others.request("raises"))
    others.play(others.request("once"), others.request("once"))
    others.agents.broken_metrics(0)


def test_what_breaks_is_counted_by_cause(others: Table) -> None:
    others.agents.broken_metrics(0)
    ((first, *_),) = others.play(others.request("raises", samples=3))
    assert first.grade_reason == "broken: error"
    (once,) = others.play(others.request("once"))
    metrics = others.agents.broken_metrics(len(once))
    assert metrics["agent/broken_error"] == 3.0
    assert metrics["agent/broken"] == pytest.approx(3 / 5)
    assert others.agents.broken_metrics(1)["agent/broken"] == 0.0


@pytest.mark.full
def test_clocks_stop_while_no_engine_has_room(tokenizer: TextTokenizer) -> None:
    table = Table(tokenizer, processes=1, timeout_s=15.0)
    try:
        Engine.seconds = 2.0
        started = time.monotonic()
        (group,) = table.play(table.request("once", samples=20))
        waited = time.monotonic() - started
    finally:
        table.close()
    assert waited > 19.0, "two at a time"
    assert all(sample.reward for sample in group), [sample.grade_reason for sample in group]


def test_a_cancelled_group_aborts_its_requests(others: Table) -> None:
    Engine.hangs = True
    work = others.dispatcher.loop.start(others.agents.generate(others.request("once", samples=1)))
    _wait_until(lambda: Engine.calls > 0)
    work.cancel()
    _wait_until(lambda: Engine.aborted > 0)
    assert Engine.aborted == 1
    assert others.play(others.request("once"))[0][0].reward, "it plays the next group"


@pytest.mark.full
def test_a_process_that_ends_is_told(tokenizer: TextTokenizer) -> None:
    before = set(psutil.Process().children())
    table = Table(tokenizer, processes=1)
    (process,) = set(psutil.Process().children()) - before
    try:
        Engine.seconds = 1.0
        turn = table.dispatcher.loop.start(table.agents.generate(table.request("once")))
        _wait_until(lambda: Engine.calls > 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
        assert turn.result(60)[0].reward == process.pid, "rank 0 decides when it ends"
        with pytest.raises(TryAgain, match=r"rollout\.agent: a process .* lost \(exit code 7\)"):
            table.play(table.request("ends its process"), table.request("waits"))
        with pytest.raises(TryAgain, match="lost"):
            table.play(table.request("once"))
    finally:
        table.close()
    assert not process.is_running()


@pytest.mark.full
def test_a_process_that_leaves_a_fork_is_told(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """The fork holds the connection open."""
    table = Table(tokenizer, processes=1)
    pid_file = tmp_path / "pid"
    try:
        with pytest.raises(TryAgain, match=r"lost \(exit code 7\)"):
            table.play(table.request("forks and ends", 1, row={"pid_file": str(pid_file)}))
    finally:
        table.close()
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


@pytest.mark.full
def test_a_process_starts_and_ends_whatever_is_around_it(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError('a module of the user')\n")
    monkeypatch.chdir(tmp_path)
    own_path = os.environ.get("PYTHONPATH", "")
    table = Table(tokenizer, processes=1)
    try:
        ((told,),) = table.play(table.request("tells its path", 1, row={"path": own_path}))
        assert told.reward == 1.0, "what agents start finds what rank 0's children find"
        table.play(table.request("closes its output", samples=1))
    finally:
        table.close()
    (process,) = table.agents._processes  # type: ignore[union-attr]
    assert process._process.returncode == 0


@pytest.mark.full
def test_processes_that_hang_end_at_one_deadline(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CLOSE_SECONDS", 8.0)
    monkeypatch.setattr(processes, "_END_SECONDS", 0.0)
    before = set(psutil.Process().children())
    table = Table(tokenizer, processes=2)
    hanging = set(psutil.Process().children()) - before
    for process in hanging:
        process.suspend()
    start = time.monotonic()
    table.close()
    assert 8.0 < time.monotonic() - start < 16.0, "8 s each, one after the other"
    assert len(hanging) == 2 and not any(process.is_running() for process in hanging)


@pytest.mark.full
def test_an_agent_that_cannot_be_loaded_is_refused(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "agent_elsewhere.py"
    module.write_text("import os\n\nraise RuntimeError('not here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(psutil.Process().children())
    with (
        pytest.raises(BadInput, match=r"agent_elsewhere:run: cannot be imported \(RuntimeError"),
        agents_of(tokenizer, "agent_elsewhere:run", processes=1),
    ):
        pass
    for ends, code in (("os._exit(9)", 9), ("raise SystemExit(3)", 1)):
        module.write_text(f"import os\n\n{ends}\n")
        with (
            pytest.raises(RunFailed, match=rf"ended while it started \(exit code {code}\)"),
            agents_of(tokenizer, "agent_elsewhere:run", processes=1),
        ):
            pass
    module.write_text("import time\n\ntime.sleep(600)\n")
    with (
        pytest.raises(RunFailed, match=r"did not start within rollout\.start_timeout_s=20 s"),
        agents_of(tokenizer, "agent_elsewhere:run", processes=1, start_timeout_s=20.0),
    ):
        pass
    assert set(psutil.Process().children()) <= before


MODULE = """
import asyncio, signal
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
asyncio.run(asyncio.sleep(0))
async def run(task, base_url, http_client):
    await http_client.post(f"{base_url}/chat/completions", json={"messages": task["messages"]})
    return 1.0
"""


@pytest.mark.full
def test_an_agent_is_loaded_as_in_rank_0(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the main thread, without a running loop."""
    (tmp_path / "agent_of_a_loop.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with agents_of(tokenizer, "agent_of_a_loop:run", processes=1) as group:
        assert [sample.reward for sample in group(2)] == [1.0] * 2


STARTS = """
import sys, time
from pathlib import Path
sys.path += {path!r}
from stub_episodes import TEMPLATE, make_tokenizer
from test_agent_processes import Table
table = Table(make_tokenizer(Path({folder!r}), TEMPLATE), processes=1)
print(int(table.play(table.request("once"))[0][0].reward), flush=True)
time.sleep(600)
"""


@pytest.mark.full
def test_a_process_ends_with_rank_0(tmp_path: Path) -> None:
    code = STARTS.format(path=sys.path, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        player = psutil.Process(int(rank.stdout.readline()))
        rank.kill()
    psutil.wait_procs([player], timeout=60)
    assert not player.is_running()

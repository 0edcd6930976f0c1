"""Agents that end an episode, their thread or the run in ways of their own."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import stub_episodes
from stub_episodes import agents_of

from vapo_megatron.agents import episodes
from vapo_megatron.data.sample import Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.inside.heartbeat import stands_still

pytestmark = pytest.mark.usefixtures("fresh")
TESTS = Path(__file__).parent


async def _one_turn(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    answer = await http_client.post(
        f"{base_url}/chat/completions", json={"messages": task["messages"]}
    )
    assert answer.status_code == 200
    return 1.0


async def well_behaved(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    return await _one_turn(task, base_url, http_client)


async def cancels_itself(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    raise asyncio.CancelledError


async def cancels_its_task(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner
    return 1.0


async def exits(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    sys.exit(3)


async def interrupts(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["cancels_itself", "cancels_its_task", "exits", "interrupts"])
def test_an_episode_that_ends_itself_is_broken(tokenizer: TextTokenizer, name: str) -> None:
    with agents_of(tokenizer, f"{__name__}:{name}", timeout_s=30) as group:
        assert [sample.grade_reason for sample in group(2)] == ["broken: error"] * 2


async def stops_the_loop(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    asyncio.get_running_loop().stop()
    return await _one_turn(task, base_url, http_client)


async def exits_in_a_task(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    return await _one_turn(task, base_url, http_client)


@pytest.mark.parametrize("name", ["stops_the_loop", "exits_in_a_task"])
def test_the_agents_thread_outlives_what_stops_it(tokenizer: TextTokenizer, name: str) -> None:
    samples = stub_episodes.play(tokenizer, f"{__name__}:{name}", timeout_s=30)
    assert [sample.reward for sample in samples] == [1.0] * 3


async def closes_the_client(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    async with http_client:
        reward = await _one_turn(task, base_url, http_client)
    await http_client.aclose()
    return reward


def test_closing_the_client_costs_no_other_episode(tokenizer: TextTokenizer) -> None:
    with agents_of(tokenizer, f"{__name__}:closes_the_client") as group:
        rewards = [sample.reward for _ in range(2) for sample in group(2)]
    assert rewards == [1.0] * 4


async def swallows_its_cancellation(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def sits_in_a_thread(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    await asyncio.to_thread(time.sleep, 600)
    return 1.0


async def blocks_the_loop(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    time.sleep(600)
    return 1.0


# In a process of its own: at the end its threads must not keep the interpreter either.
PROGRAM = """
import subprocess, sys
sys.path[:0] = {path!r}
from pathlib import Path
from stub_episodes import TEMPLATE, agents_of, make_tokenizer
from vapo_megatron.agents import episodes
episodes.CLOSE_SECONDS = episodes._ANSWER_SECONDS = 0.5
tokenizer = make_tokenizer(Path({folder!r}), TEMPLATE)
with agents_of(tokenizer, "test_hostile_agents:{name}", timeout_s=1) as group:
    print([sample.grade_reason for sample in group(1)])
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("swallows_its_cancellation", marks=pytest.mark.full),
        pytest.param("sits_in_a_thread", marks=pytest.mark.full),
        "blocks_the_loop",
    ],
)
def test_a_run_ends_although_an_agent_does_not(name: str, tmp_path: Path) -> None:
    program = PROGRAM.format(path=[str(TESTS), str(TESTS.parent)], folder=str(tmp_path), name=name)
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "['broken: timeout']"


blocked: list[bool] = []


async def blocks_once(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    if not blocked:
        blocked.append(True)
        time.sleep(20)
    return await _one_turn(task, base_url, http_client)


def test_a_blocked_loop_is_replaced(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "_ANSWER_SECONDS", 0.3)
    blocked.clear()
    with agents_of(tokenizer, f"{__name__}:blocks_once", timeout_s=1) as group:
        assert [sample.grade_reason for sample in group(1)] == ["broken: timeout"]
        assert [sample.reward for sample in group(2)] == [1.0] * 2


async def returns_a_typing_error(task: dict[str, Any], base_url: str, http_client: Any) -> Any:
    return {"rewards": await _one_turn(task, base_url, http_client)}


async def returns_too_much(task: dict[str, Any], base_url: str, http_client: Any) -> Any:
    await _one_turn(task, base_url, http_client)
    return 1e39  # finite in float64, infinite in the float32 that is trained on


async def returns_too_much_in_all(task: dict[str, Any], base_url: str, http_client: Any) -> Any:
    await _one_turn(task, base_url, http_client)
    return {"reward": 3e38, "turn_rewards": [3e38]}


@pytest.mark.parametrize(
    "name", ["returns_a_typing_error", "returns_too_much", "returns_too_much_in_all"]
)
def test_a_reward_that_cannot_be_trained_on_breaks(tokenizer: TextTokenizer, name: str) -> None:
    samples: list[Sample] = stub_episodes.play(tokenizer, f"{__name__}:{name}", samples=1)
    assert [sample.grade_reason for sample in samples] == ["broken: error"]


async def leaves_processes(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    """A child, and a daemon whose parent has ended."""
    child = subprocess.Popen(["sleep", "600"])
    daemon = subprocess.run(
        ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True
    )
    print(child.pid, daemon.stdout.strip())
    return await _one_turn(task, base_url, http_client)


LEAVING = """
import subprocess, sys
sys.path[:0] = {path!r}
from pathlib import Path
from stub_episodes import TEMPLATE, agents_of, make_tokenizer
from vapo_megatron.agents.leftovers import leftovers_end
agent = "test_hostile_agents:leaves_processes"
tokenizer = make_tokenizer(Path({folder!r}), TEMPLATE)
earlier = subprocess.Popen(["sleep", "600"])
with leftovers_end(agent), agents_of(tokenizer, agent) as group:
    assert [sample.reward for sample in group(2)] == [1.0] * 2
assert earlier.poll() is None
earlier.kill()
"""


def test_what_an_agent_starts_ends_with_the_run(tmp_path: Path) -> None:
    program = LEAVING.format(path=[str(TESTS), str(TESTS.parent)], folder=str(tmp_path))
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr
    pids = process.stdout.split()
    assert len(pids) == 4 and not [pid for pid in pids if stands_still(int(pid)) is None]
    assert "4 processes that it had started and not ended were killed" in process.stderr

"""The rollout side of a run of agents: episodes are played, counted and evaluated by one and the
same."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from batches import take
from test_rollouts import ahead, steps
from written_rollouts import END, RIGHT

from vapo_megatron.agents.episodes import Agents
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig
from vapo_megatron.data.sample import Sample
from vapo_megatron.monitoring import names
from vapo_megatron.rollout.ledger import StepRule
from vapo_megatron.rollout.request import GenerationRequest, GroupRequest


class Players:
    """What Rollouts asks of Agents: each episode has two turns."""

    def __init__(self) -> None:
        self.asked: list[GroupRequest] = []
        self.closed = 0

    async def generate(self, group: GroupRequest) -> list[Sample]:
        self.asked.append(group)
        ids: Any = [group.prompt.cursor, RIGHT, END]
        samples = [
            Sample(group.prompt, group.group, n, 0, ids, [-1.0] * 3, "stop", 5, 5)
            for n in range(group.samples)
        ]  # type: ignore[arg-type]
        for sample in samples:
            sample.episode = {"turns": 2.0}
            sample.loss_mask = np.array([False, True, True])
            sample.versions = ((5, 2),)
        return samples

    def broken_metrics(self, whole: int) -> dict[str, float]:
        return {"agent/broken": 1 / (1 + whole)}

    def close(self) -> None:
        self.closed += 1


def test_a_step_of_episodes_reports_them_and_those_that_broke() -> None:
    rollouts = ahead()
    players = Players()
    rollouts.agents = players  # type: ignore[assignment]
    rollouts.begin(StepRule(2, 1), 2, 0)
    (samples,), row = steps(rollouts)
    rollouts.end()
    assert [group.prompt.cursor for group in players.asked] == [0, 1], (
        "nothing is requested from the engines"
    )
    assert [sample.reward for sample in samples] == [1.0] * 4
    assert row[names.ROLLOUT_SPEED] == 4 * 2 / 2, "observations are read, not written"
    assert row["agent/turns"] == 2 and row["agent/broken"] == 1 / (1 + 4)
    rollouts.close_agents()
    rollouts.close_agents()
    assert players.closed == 1 and rollouts.agents is None


def test_a_window_of_an_episode_is_a_part_of_its_turns() -> None:
    rollouts = ahead()
    players = Players()
    rollouts.agents = players  # type: ignore[assignment]
    rollouts.agent_settings = RolloutConfig(
        agent=f"{__name__}:plays", episode=EpisodeConfig(max_turns=5)
    )
    rollouts.begin(StepRule(2, 1, windows=2), 2, 0)
    steps(rollouts)
    rollouts.end()
    assert [group.window for group in players.asked] == [3, 3]


def test_agents_are_made_for_the_first_who_asks() -> None:
    rollouts = ahead()
    rollouts.agent_settings = RolloutConfig(agent=f"{__name__}:plays")
    rollouts.tokenizer.messages = "about {}".format  # type: ignore[method-assign]
    rollouts.begin(StepRule(2, 1), 2, 0)
    agents = rollouts.agents
    assert isinstance(agents, Agents)
    rollouts.generator(rollouts.sampling, 11)
    assert rollouts.agents is agents
    tasks.clear()
    prompt = replace(take(rollouts.prompts, 1)[0], extra={"level": 2})  # type: ignore[arg-type]
    (sample,) = rollouts.dispatcher.loop.run(
        agents.generate(GroupRequest(prompt, 1, rollouts.sampling, 24, 1, 5))
    )
    assert (
        sample.grade_reason == "broken: no_turn"
        and tasks[0]["messages"] == f"about {prompt.problem}"
    )
    rollouts.end()
    rollouts.close_agents()


tasks: list[dict[str, Any]] = []


async def plays(task: dict[str, Any], base_url: str, http_client: Any) -> float:
    tasks.append(task)
    return 1.0


def test_evaluation_of_a_run_of_agents_plays_episodes() -> None:
    rollouts = ahead()
    players = Players()
    generates = []
    rollouts.agents = players  # type: ignore[assignment]

    def collect(request: GenerationRequest, on_done: Any, keep: Any, generate: Any = None) -> None:
        generates.append(generate)

    rollouts.engines.collect = collect  # type: ignore[attr-defined]
    assert rollouts.prompts is not None
    prompts = take(rollouts.prompts, 1)
    nobody = SimpleNamespace()
    rollouts.generator(rollouts.sampling, 11)(prompts, 1, nobody, nobody)  # type: ignore[arg-type]
    rollouts.agents = None
    rollouts.generator(rollouts.sampling, 11)(prompts, 1, nobody, nobody)  # type: ignore[arg-type]
    assert generates == [players.generate, None]

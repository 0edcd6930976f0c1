"""The example that learns: its configs are valid, and its tool leads who follows it to the answer."""

import asyncio
import random
from pathlib import Path

import pytest

from examples.agents.learn import OVERRIDES
from examples.agents.lookup import Lookup, demonstrations, problem
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig

FOLDER = Path(__file__).parents[2] / "examples" / "agents"


@pytest.mark.parametrize("method", OVERRIDES)
def test_each_method_has_a_config(method: str) -> None:
    config = load_config(TrainConfig, FOLDER / "lookup.yaml", list(OVERRIDES[method]), PRESETS)
    assert config.algorithm.advantage.credit == ("turn" if method == "turn" else "token")
    assert config.algorithm.uses_critic == config.value_pretraining.enabled == (method != "grpo")


def test_who_follows_the_tool_arrives_at_the_answer() -> None:
    row, environment = problem(random.Random(1), 0), Lookup()
    key, hops = row["problem"].split()
    asyncio.run(environment.reset({"table": row["table"], "messages": []}))
    for left in range(int(hops[1:]), 0, -1):
        (said,), reward, done = asyncio.run(environment.step({"content": f"get {key} h{left}"}))
        assert reward == 0.0 and not done
        key = said["content"]
    assert str(int(key[1:]) % 10) == row["answer"]
    assert asyncio.run(environment.step({"content": "get me"}))[0][0]["content"] == "?"
    assert asyncio.run(environment.step({"content": f"#### {row['answer']}"})) == ([], None, True)
    assert all(turn["response"][:4] in ("get ", "####") for turn in demonstrations(random.Random(1), 50))

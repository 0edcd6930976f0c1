"""The example that learns: its configs are valid, and its tool leads who follows it to the
answer."""

import asyncio
import random
from pathlib import Path

import pytest

from examples.agents import learn
from examples.agents.learn import TASKS
from examples.agents.lookup import Lookup, demonstrations, problem
from vapo_megatron.checks.preflight import cautions
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.sample import Prompt

FOLDER = Path(__file__).parents[2] / "examples" / "agents"
METHODS = TASKS["lookup"].methods


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_config(method: str) -> None:
    config = load_config(TrainConfig, FOLDER / "lookup.yaml", list(METHODS[method]), PRESETS)
    by_turns = method in ("turn", "regression_turn")
    assert config.algorithm.advantage.credit == ("turn" if by_turns else "token")
    assert config.algorithm.uses_critic == (method != "grpo")
    assert config.value_pretraining.enabled == (method in ("turn", "token"))
    assert (config.critic.kind == "regression") == method.startswith("regression")


def test_what_was_interrupted_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has ended is not started again, and any other is resumed where it stopped."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(learn, "command", lambda *arguments: commands.append(arguments))
    monkeypatch.setattr(learn, "read_metrics", lambda run: [{"step": 7}])
    (tmp_path / "token").mkdir()
    (tmp_path / "token" / "metrics.jsonl").touch()
    learn.learn(TASKS["lookup"], "token", 1, tmp_path, 7, [])
    assert commands == []
    learn.learn(TASKS["lookup"], "token", 1, tmp_path, 20, [])
    assert [name for name, *_ in commands] == ["sft", "train"]
    assert all("run.resume=auto" in arguments for arguments in commands)


def test_who_follows_the_tool_arrives_at_the_answer() -> None:
    row = problem(random.Random(1), 0)
    environment = Lookup()
    key, hops = row["problem"].split()
    asyncio.run(environment.reset({"table": row["table"], "messages": []}))
    for left in range(int(hops[1:]), 0, -1):
        (said,), reward, done = asyncio.run(environment.step({"content": f"get {key} h{left}"}))
        assert reward == 0.0 and not done
        key = said["content"]
    assert str(int(key[1:]) % 10) == row["answer"]
    assert asyncio.run(environment.step({"content": "get me"}))[0][0]["content"] == "?"
    assert asyncio.run(environment.step({"content": f"#### {row['answer']}"})) == ([], None, True)
    assert all(
        turn["response"][:4] in ("get ", "####") for turn in demonstrations(random.Random(1), 50)
    )


def test_same_words_with_other_facts_are_no_repetition() -> None:
    config = load_config(TrainConfig, FOLDER / "lookup.yaml", [], PRESETS)
    prompts, unseen = (
        [
            Prompt(str(number), "k1 h2", "4", (1,), extra={"table": [first, number]})
            for number in range(20)
        ]
        for first in (0, 1)
    )
    assert not [line for line in cautions(config, prompts, {"unseen": unseen}) if "data." in line]
    repeated = list(cautions(config, prompts[:1] * 20, {"unseen": prompts[:3] + unseen}))
    assert any("20 rows and 1 different problem:" in line for line in repeated)
    assert any("1 of the 23 problems of unseen are in data.train" in line for line in repeated)
    alone = config.model_copy(update={"rollout": config.rollout.model_copy(update={"agent": None})})
    assert any("20 rows and 1 different problem:" in line for line in cautions(alone, prompts, {}))

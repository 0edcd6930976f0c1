"""A run that trains an agent: from episodes of two turns to weights, killed and resumed."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import End, World, config_of, kill_at, left_behind, live, make_world, metrics
from called import exit_code_of
from tiny_runs import CONTEXT, WORDS, evaluate_config, make_model, write_config

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.megatron import schedule
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, save_tiny_model, word_tokenizer

pytestmark = pytest.mark.full


async def two_turns(task: dict[str, Any], base_url: str, http_client: Any) -> None:
    """Asks again whatever the answer was; the verifier grades the last one."""
    messages = list(task["messages"])
    for _ in range(2):
        answer = await http_client.post(
            f"{base_url}/chat/completions", json={"messages": messages, "max_tokens": 6}
        )
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "1 + 1"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, engine_of_runs: EngineAddress) -> World:
    return make_world(tmp_path_factory.mktemp("agents"), engine_of_runs)


def agent_config(shared: World, name: str, *overrides: str) -> TrainConfig:
    return config_of(
        shared,
        name,
        {},
        f"rollout.agent={__name__}:two_turns",
        "rollout.episode.max_tokens=64",
        "algorithm.advantage.credit=turn",
        "algorithm.advantage.lambda_policy=0.9",
        "data.prompt.chat_template=true",
        "data.max_prompt_tokens=32",
        "run.steps=2",
        "run.resume=auto",
        *overrides,
    )


def test_evaluate_plays_episodes_as_a_command(tmp_path: Path) -> None:
    config = evaluate_config(tmp_path, make_model(tmp_path / "model"))
    config["data"]["max_prompt_tokens"] = 32
    config["rollout"] = {
        "agent": f"{__name__}:two_turns",
        "episode": {"max_tokens": 64},
        "max_total_tokens": 16384,
    }
    config["reward"] = {"answer_format": "auto", "workers": 1}
    assert exit_code_of("evaluate", write_config(tmp_path / "e.yaml", config)) == 0
    lines = (tmp_path / "runs" / "tiny" / "evaluation" / "sums.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert sorted(row["id"] for row in rows) == sorted([f"p{n}" for n in range(4)] * 2)
    for row in rows:
        assert row["episode"].endswith(row["response"]) and len(row["episode"]) > len(
            row["response"]
        )
        assert row["tokens"] <= 12, "two turns of six tokens"
    (figures,) = json.loads((tmp_path / "runs" / "tiny" / "evaluation.json").read_text())["sets"]
    assert figures["avg_at_k"] == pytest.approx(sum(row["correct"] for row in rows) / 8)


def test_episodes_train_and_a_killed_run_goes_on(shared: World) -> None:
    config = agent_config(shared, "agent")
    assert live(shared, config, 1, partial(kill_at, "policy update", 2)).code == 75
    assert live(shared, config, 1) == End(0, "")
    rows = {row["step"]: row for row in metrics(Path(config.run.directory)) if row["step"] > 0}
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        assert (
            row["agent/turns"] == 2
            and row["agent/tokens_observed"] > 0
            and row["agent/tokens_written"] <= 12
        )
        assert row["response_length/mean"] == pytest.approx(row["agent/tokens_written"]), (
            "observations carry no loss"
        )
        by_turn = [row[f"agent/tokens_written/turn_{turn}"] for turn in (1, 2)]
        assert sum(by_turn) == pytest.approx(row["agent/tokens_written"]) and all(by_turn)
        assert row["agent/episodes/turn_2"] == 1 and "agent/episodes/turn_3" not in row
        assert row["agent/cut_by_turns"] == row["agent/cut_by_tokens"] == 0
        assert row["actor/grad_norm"] > 0 and row["critic/value_loss"] > 0
        assert row["rollout/train_infer_logprob_diff"] < 1e-4


def test_episode_trains_over_two_steps_and_kill_changes_nothing(
    shared: World,
) -> None:
    windows = (
        "rollout.windows=2",
        "rollout.episode.max_turns=2",
        "algorithm.shaping.truncated=window",
        "run.steps=3",
    )
    straight, killed = (
        agent_config(shared, name, *windows) for name in ("windows", "killed_windows")
    )
    assert live(shared, straight, 1) == End(0, "")
    # Before a step that goes on with episodes, and before one that begins new ones
    for call in (
        1,
        2,
    ):
        assert live(shared, killed, 1, partial(kill_at, "policy update", call * 2)).code == 75
    assert live(shared, killed, 1) == End(0, "")
    rows, again = (
        [
            {name: value for name, value in row.items() if "seconds" not in name}
            for row in metrics(Path(config.run.directory))
        ]
        for config in (straight, killed)
    )
    assert rows == again
    first, second, third = (row for row in rows if row["step"] > 0)
    assert (
        first["rollout/goes_on_share"] == third["rollout/goes_on_share"] == 1
        and "agent/turns" not in first
    )
    assert (
        second["rollout/goes_on_share"] == 0
        and second["agent/turns"] == 2
        and second["agent/broken"] == 0
    )
    assert second["rollout/age_max"] == 0, (
        "of what this step trains; the first turn is older, and trained"
    )
    for row in (first, second, third):
        assert row["actor/grad_norm"] > 0 and ("critic/value_loss" in row) is (row is second)
    files = [left_behind(Path(config.run.directory)) for config in (straight, killed)]
    assert (
        files[0]["hf/final/actor/model.safetensors"] == files[1]["hf/final/actor/model.safetensors"]
    )


def watch_experts(log: Path, then: Callable[[], None] = lambda: None) -> None:
    """Have ranks write down the tokens of each forward pass that goes through an engine's
    experts."""
    replay = schedule.replay_experts

    def watched(model: Any, experts: Any, *place: int) -> None:
        if experts is not None:
            with log.open("a") as file:
                file.write(f"{len(experts)}\n")
        replay(model, experts, *place)

    schedule.replay_experts = watched
    then()


def test_moe_episodes_replay_experts_and_drop_useless_groups(shared: World, tmp_path: Path) -> None:
    tokenizer = word_tokenizer(WORDS, CONTEXT, CHATML_TEMPLATE)
    shape = {"hidden_size": 64, "intermediate_size": 48, "head_dim": 16, "max_positions": CONTEXT}
    save_tiny_model(
        TinyModel(family="qwen3_moe", vocab_size=len(tokenizer), **shape),
        tokenizer,
        tmp_path / "moe",
    )
    world = replace(shared, folder=tmp_path, model=tmp_path / "moe")
    log = tmp_path / "replayed"
    sampling = "algorithm.dynamic_sampling={max_rounds: 4, oversampling: 1.5}"
    config = agent_config(world, "moe", "rollout.router_replay=true", sampling)
    dies = partial(watch_experts, log, partial(kill_at, "policy update", 2))
    assert live(world, config, 1, dies, own_engines=True).code == 75
    assert live(world, config, 1, partial(watch_experts, log), own_engines=True) == End(0, "")
    rows = {row["step"]: row for row in metrics(Path(config.run.directory)) if row["step"] > 0}
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        assert (
            row["agent/turns"] == 2
            and row["agent/tokens_observed"] > 0
            and row["agent/broken"] == 0
        )
        assert row["dynamic_sampling/prompts"] >= row["dynamic_sampling/kept"] > 0
        assert (
            row["rollout/dropped_no_signal"] == row["dynamic_sampling/prompts"] - 4
            and not row["rollout/dropped_broken"]
        )
        assert row["rollout/train_infer_logprob_diff"] < 1e-4 and row["actor/grad_norm"] > 0
    tokens = sum(map(int, log.read_text().split()))
    assert tokens > 2 * 2 * 16 * 20, (
        "16 episodes of 20 tokens and more, scored and trained in two steps"
    )

"""A real engine of a model with experts tells an episode's, with prefixes in its cache and without
a cache."""

import json
import urllib.request
from collections.abc import Iterator

import pytest
import torch
from stub_episodes import TEMPLATE, make_tokenizer
from test_replayed_episodes import segments_of
from tiny_qwen3 import chosen_experts, make_moe, token_logprobs
from transformers import Qwen3MoeForCausalLM

from vapo_megatron.agents.episodes import Agents, is_whole
from vapo_megatron.config.rollout import EpisodeConfig, RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.weights.routed_experts import ExpertChoices

pytestmark = pytest.mark.full

CHOICES = ExpertChoices(layers=2, experts=6, per_token=2)


@pytest.fixture(scope="module")
def moe() -> Qwen3MoeForCausalLM:
    return make_moe(3, eos_token_id=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, moe: Qwen3MoeForCausalLM) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("moe")
    moe.save_pretrained(folder)
    return make_tokenizer(folder, TEMPLATE)


@pytest.fixture(scope="module", params=[False, True], ids=["cached", "deterministic"])
def config(request: pytest.FixtureRequest) -> RolloutConfig:
    """SGLang caches no prefixes where its inference is deterministic."""
    return RolloutConfig(
        max_running_requests=8,
        max_total_tokens=4096,
        start_timeout_s=240,
        collect_timeout_s=120,
        router_replay=True,
        deterministic=request.param,
        agent="test_replayed_episodes:three_turns",
        episode=EpisodeConfig(max_tokens=200),
    )


@pytest.fixture(scope="module")
def moe_server(
    config: RolloutConfig, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    with EngineServer(tokenizer.directory, config, "float32", log) as running:
        yield running


def play(
    server: EngineServer, tokenizer: TextTokenizer, config: RolloutConfig, agent: str
) -> list[Sample]:
    config = config.model_copy(update={"agent": f"test_replayed_episodes:{agent}"})
    prompt = Prompt(
        "row", "w3 w4 " * 20, "", tuple(tokenizer.encode_prompt("w3 w4 " * 20)), cursor=7
    )
    group = GroupRequest(prompt, 4, SamplingConfig(max_new_tokens=12), 12, 11, 0, CHOICES)
    with Dispatcher([server.address], config, [tokenizer.eos_id]) as dispatcher:
        agents = Agents(dispatcher, tokenizer, config)
        try:
            return dispatcher.loop.run(agents.generate(group))
        finally:
            agents.close()


def cached_tokens(server: EngineServer, tokens: list[int]) -> int:
    """Of a prompt, those that the engine does not compute again."""
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.address.key}"}
    request = urllib.request.Request(
        f"{server.address.url}/generate", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return int(json.load(answer)["meta_info"]["cached_tokens"])


@pytest.mark.parametrize("agent", ["three_turns", "two_contexts"])
def test_experts_of_an_episode_are_the_ones_its_tokens_used(
    moe_server: EngineServer,
    tokenizer: TextTokenizer,
    config: RolloutConfig,
    moe: Qwen3MoeForCausalLM,
    agent: str,
) -> None:
    # The second time, the engine has the prompts of the first turns in its cache
    for _ in range(2):
        samples = play(moe_server, tokenizer, config, agent)
        assert is_whole(samples)
        for sample in samples:
            start = 0
            logprobs = [0.0] * len(sample.prompt.token_ids) + sample.rollout_logprobs.tolist()
            for ids, written, rows in segments_of(sample):
                told = torch.from_numpy(rows).unflatten(1, (2, 2)).sort(-1).values
                assert torch.equal(told, chosen_experts(moe, ids[:-1]).sort(-1).values)
                expected = [0.0, *token_logprobs(moe, ids)]
                drawn = [place for place in range(len(ids)) if written[place]]
                assert [logprobs[start + n] for n in drawn] == pytest.approx(
                    [expected[n] for n in drawn], abs=1e-4
                )
                start += len(ids)
                cached = cached_tokens(moe_server, ids)
                assert cached == 0 if config.deterministic else cached >= len(ids) - 2

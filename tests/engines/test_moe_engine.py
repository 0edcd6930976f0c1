"""A real server of a model with experts: its samples, which experts it says it chose, and which
ones it holds."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_qwen3 import EOS, chosen_experts, largest_difference, make_moe, token_logprobs
from transformers import Qwen3MoeForCausalLM

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport
from vapo_megatron.errors import RunFailed
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.routed_experts import ExpertChoices

pytestmark = pytest.mark.full

# The last two begin alike, so that one finds the other's tokens in the engine's cache.
PROMPTS = [
    Prompt(
        id=str(i), problem="", answer="", token_ids=(*range(3, 40), *range(50 + 9 * i, 50 + 10 * i))
    )
    for i in range(3)
]
CHOICES = ExpertChoices(layers=2, experts=6, per_token=2)
# Without seeds: SGLang caches no prefixes where its inference is deterministic.
CONFIG = RolloutConfig(
    max_running_requests=8,
    max_total_tokens=4096,
    start_timeout_s=240,
    collect_timeout_s=120,
    router_replay=True,
    deterministic=False,
)
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"

Weights = dict[str, torch.Tensor]


@pytest.fixture(
    scope="module", params=[True, False], ids=["normalised-tied", "not-normalised-untied"]
)
def moe(request: pytest.FixtureRequest) -> Qwen3MoeForCausalLM:
    return make_moe(3, norm_topk_prob=request.param, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def moe_path(moe: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    moe.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def moe_server(moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(
        moe_path, CONFIG, "float32", tmp_path_factory.mktemp("logs") / "engine.log"
    ) as running:
        yield running


def read_weights(path: Path) -> Weights:
    tensors = HFTensors(path)
    return {name: tensors[name][:] for name in sorted(tensors.names)}


@pytest.fixture
def weights(moe_path: Path) -> Weights:
    return read_weights(moe_path)


def cached_tokens(server: EngineServer, prompt: Prompt) -> int:
    """Of a prompt, those that the engine does not compute again."""
    body = {"input_ids": prompt.token_ids, "sampling_params": {"max_new_tokens": 1}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.address.key}"}
    request = urllib.request.Request(
        f"{server.address.url}/generate", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        return int(json.load(answer)["meta_info"]["cached_tokens"])


def test_an_engine_says_which_experts_each_token_went_through(
    moe_server: EngineServer, moe: Qwen3MoeForCausalLM, tmp_path: Path
) -> None:
    """Tokens of prompts that it has in its cache as well, and under the weights that it has
    now."""
    other = make_moe(
        4,
        norm_topk_prob=moe.config.norm_topk_prob,
        tie_word_embeddings=moe.config.tie_word_embeddings,
    )
    other.save_pretrained(tmp_path)
    seen = []
    with Dispatcher([moe_server.address], CONFIG, stop_token_ids=[EOS]) as dispatcher:
        for version, model in ((0, moe), (7, other)):
            if version:
                with WeightSync(
                    SharedMemoryTransport(EngineClient(moe_server.address, 120), 1)
                ) as sync:
                    sync.load([list(read_weights(tmp_path).items())], version)
            for _ in range(2):
                for sample in dispatcher.collect(
                    GenerationRequest(
                        PROMPTS, 2, SamplingConfig(max_new_tokens=16), 1, version, CHOICES
                    )
                ):
                    tokens = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
                    expected = token_logprobs(model, tokens)[-len(sample.response_ids) :]
                    assert sample.rollout_logprobs == pytest.approx(expected, abs=1e-4)
                    assert (
                        sample.routed_experts is not None
                        and sample.routed_experts.dtype == torch.uint8
                    )
                    told = sample.routed_experts.unflatten(1, (2, 2)).sort(-1).values.long()
                    assert torch.equal(told, chosen_experts(model, tokens[:-1]).sort(-1).values)
                assert all(
                    cached_tokens(moe_server, prompt) >= len(prompt.token_ids) - 1
                    for prompt in PROMPTS
                )
            seen.append(told[: len(PROMPTS[-1].token_ids) - 1])
    assert not torch.equal(*seen), "the other weights choose other experts"


def test_experts_of_another_model_end_the_collection(moe_server: EngineServer) -> None:
    with Dispatcher([moe_server.address], CONFIG, stop_token_ids=[EOS]) as dispatcher:
        choices = ExpertChoices(layers=3, experts=6, per_token=2)
        message = (
            rf"{moe_server.address.log_file}\): its answer to vapo_generate cannot be read "
            r"\(ValueError: \d+ routed experts came for \d+ tokens, expected 6 for each"
        )
        with pytest.raises(RunFailed, match=message):
            dispatcher.collect(
                GenerationRequest(PROMPTS, 1, SamplingConfig(max_new_tokens=4), 1, 7, choices)
            )


def test_experts_in_each_others_place_are_named(
    moe_server: EngineServer, moe: Qwen3MoeForCausalLM, weights: Weights
) -> None:
    sequence = list(range(10, 60))
    expected = [token_logprobs(moe, sequence)]
    with WeightSync(SharedMemoryTransport(EngineClient(moe_server.address, 120), 1)) as sync:
        sync.load([list(weights.items())], version=1)
        assert largest_difference(sync, [sequence], expected) < 1e-4
        names = [
            (EXPERT.format(0, part), EXPERT.format(4, part)) for part in ("gate", "up", "down")
        ]
        swapped = dict(weights)
        for one, other in names:
            swapped[one], swapped[other] = weights[other], weights[one]
        sync.load([list(swapped.items())], version=2)
        assert largest_difference(sync, [sequence], expected) > 1e-4
        differing = sync.differing_tensors([list(weights.items())])
        assert differing == [
            f"{name} differs" for name in weights if name in {n for pair in names for n in pair}
        ]


def test_an_expert_left_out_is_named(moe_server: EngineServer, weights: Weights) -> None:
    with WeightSync(SharedMemoryTransport(EngineClient(moe_server.address, 120), 1)) as sync:
        del weights[EXPERT.format(3, "up")]
        with pytest.raises(
            RunFailed, match=r"layers\.1\.mlp\.experts\.w13_weight .* was not sent in full"
        ):
            sync.load([list(weights.items())], version=3)


def test_an_expert_too_many_is_named(moe_server: EngineServer, weights: Weights) -> None:
    with WeightSync(SharedMemoryTransport(EngineClient(moe_server.address, 120), 1)) as sync:
        weights[EXPERT.format(6, "up")] = weights[EXPERT.format(5, "up")]
        with pytest.raises(RunFailed, match=r"experts\.6\.up_proj\.weight of shape \[48, 64\]"):
            sync.load([list(weights.items())], version=4)

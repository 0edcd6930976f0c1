"""A real server of a model with experts: what it samples, which experts it says it chose, and which ones it holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_qwen3 import EOS, token_logprobs
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig, SyncConfig
from vapo_megatron.errors import RunFailed
from vapo_megatron.experience.sample import Prompt
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.server import EngineServer
from vapo_megatron.rollout.sync import WeightSync
from vapo_megatron.weights.hf_files import HFTensors

PROMPTS = [Prompt(id=str(i), problem="", answer="", token_ids=tuple(range(3 + i, 9 + 2 * i))) for i in range(3)]
CONFIG = RolloutConfig(
    max_running_requests=8, max_total_tokens=4096, start_deadline=240, collect_deadline=120, router_replay=True
)
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[True, False], ids=["normalised-tied", "not-normalised-untied"])
def moe(request: pytest.FixtureRequest) -> Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=request.param,
        tie_word_embeddings=request.param,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=2,
        initializer_range=0.1,
    )
    return Qwen3MoeForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def moe_path(moe: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    moe.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def moe_server(moe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(moe_path, CONFIG, "float32", tmp_path_factory.mktemp("logs") / "engine.log") as running:
        yield running


@pytest.fixture
def weights(moe_path: Path) -> Weights:
    tensors = HFTensors(moe_path)
    return {name: tensors[name][:] for name in sorted(tensors.names)}


@torch.no_grad()
def chosen_experts(model: Qwen3MoeForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Those of transformers for each token, [tokens, layers, k]."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for layer in model.model.layers
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def test_an_engine_says_which_experts_each_token_went_through(
    moe_server: EngineServer, moe: Qwen3MoeForCausalLM
) -> None:
    with Dispatcher([moe_server.address], CONFIG, stop_token_ids=[EOS]) as dispatcher:
        samples = dispatcher.collect(PROMPTS, 2, SamplingConfig(max_new_tokens=16), 1, 0, routed_experts=True)
    for sample in samples:
        tokens = [*sample.prompt.token_ids, *sample.response_ids]
        expected = token_logprobs(moe, tokens)[-len(sample.response_ids) :]
        assert sample.rollout_logprobs == pytest.approx(expected, abs=1e-4)
        assert sample.routed_experts is not None
        told = sample.routed_experts.unflatten(1, (2, 2)).sort(-1).values
        assert torch.equal(told.long(), chosen_experts(moe, tokens[:-1]).sort(-1).values)


def test_experts_in_each_others_place_are_named(
    moe_server: EngineServer, moe: Qwen3MoeForCausalLM, weights: Weights
) -> None:
    sequence = list(range(10, 60))
    expected = [token_logprobs(moe, sequence)]
    with WeightSync.through_shared_memory(moe_server.address, SyncConfig(deadline=120)) as sync:
        sync.push([list(weights.items())], version=1)
        assert sync.verify([sequence], expected, tolerance=1e-4) < 1e-4
        names = [(EXPERT.format(0, part), EXPERT.format(4, part)) for part in ("gate", "up", "down")]
        swapped = dict(weights)
        for one, other in names:
            swapped[one], swapped[other] = weights[other], weights[one]
        sync.push([list(swapped.items())], version=2)
        with pytest.raises(RunFailed, match="log-probs of engine and trainer differ"):
            sync.verify([sequence], expected, tolerance=1e-4)
        differing = sync.differing_tensors([list(weights.items())])
        assert differing == [f"{name} differs" for name in weights if name in {n for pair in names for n in pair}]


def test_an_expert_left_out_is_named(moe_server: EngineServer, weights: Weights) -> None:
    with WeightSync.through_shared_memory(moe_server.address, SyncConfig(deadline=120)) as sync:
        del weights[EXPERT.format(3, "up")]
        with pytest.raises(RunFailed, match=r"layers\.1\.mlp\.experts\.w13_weight .* was not sent in full"):
            sync.push([list(weights.items())], version=3)


def test_an_expert_too_many_is_named(moe_server: EngineServer, weights: Weights) -> None:
    with WeightSync.through_shared_memory(moe_server.address, SyncConfig(deadline=120)) as sync:
        weights[EXPERT.format(6, "up")] = weights[EXPERT.format(5, "up")]
        with pytest.raises(RunFailed, match=r"experts\.6\.up_proj\.weight of shape \[48, 64\]"):
            sync.push([list(weights.items())], version=4)

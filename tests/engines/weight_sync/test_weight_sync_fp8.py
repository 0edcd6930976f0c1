"""An engine whose weights are in FP8: quantised on the way to it, by the numbers that the loaders
of SGLang read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specs import spec_of
from tiny_qwen3 import largest_difference, make_model, token_logprobs
from transformers import Qwen3ForCausalLM

from vapo_megatron.config.rollout import RolloutConfig, SyncConfig
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.logprob_difference import limits_for
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport
from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.fp8 import SCALE_SUFFIX, BlockFp8, dequantize, quantize

pytestmark = pytest.mark.full

RECIPE = BlockFp8.of(spec_of("qwen3"), power_of_two=True)
CONFIG = RolloutConfig(
    quantization="fp8",
    load_format="dummy",
    max_running_requests=8,
    max_total_tokens=2048,
    start_timeout_s=240,
)
SEQUENCES = [list(range(10, 60)), [5, 9, 77, 31, 64, 8, 100]]

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    wide = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 64}
    return make_model(0, initializer_range=0.05, **wide).bfloat16()


@pytest.fixture(scope="module")
def sync(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightSync]:
    path = tmp_path_factory.mktemp("fp8")
    model.save_pretrained(path)
    device = range(1) if torch.cuda.is_available() else None
    with (
        EngineServer(path, CONFIG, "bfloat16", path / "engine.log", device, fp8=RECIPE) as server,
        WeightSync(SharedMemoryTransport(EngineClient(server.address, 120), 1)) as running,
    ):
        yield running


@pytest.fixture
def weights(model: Qwen3ForCausalLM) -> Weights:
    [converted] = RECIPE.convert([list(model.state_dict().items())])
    return dict(converted)


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model whose weights went through FP8 and back."""
    copy = Qwen3ForCausalLM(model.config).float().eval()
    state = {
        name: dequantize(*quantize(tensor, RECIPE.power_of_two))
        if RECIPE.covers(name)
        else tensor.float()
        for name, tensor in model.state_dict().items()
    }
    copy.load_state_dict(state)
    return copy


def difference_from(sync: WeightSync, model: Qwen3ForCausalLM) -> float:
    return largest_difference(
        sync, SEQUENCES, [token_logprobs(model, tokens) for tokens in SEQUENCES]
    )


def test_weights_arrive_as_values_and_scales(
    sync: WeightSync, model: Qwen3ForCausalLM, weights: Weights
) -> None:
    sync.load([list(weights.items())], version=1)
    assert sync.differing_tensors([list(weights.items())]) == []
    with torch.no_grad():
        spread = float(model(torch.tensor(SEQUENCES[:1])).logits.float().log_softmax(-1).std())
    assert spread > 0.5, "log-probs would be alike whatever the weights"
    assert difference_from(sync, rounded(model)) < limits_for(SyncConfig(), "fp8").quantile
    shuffled = dict(model.state_dict())
    first, last = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 2))
    shuffled[first], shuffled[last] = shuffled[last], shuffled[first]
    other = Qwen3ForCausalLM(model.config).bfloat16().eval()
    other.load_state_dict(shuffled)
    assert difference_from(sync, other) > 3 * difference_from(sync, rounded(model))


def test_a_scale_left_out_is_named(sync: WeightSync, weights: Weights) -> None:
    del weights["model.layers.0.mlp.up_proj.weight" + SCALE_SUFFIX]
    with pytest.raises(
        RunFailed, match=r"layers\.0\.mlp\.gate_up_proj\.weight_scale_inv .* 6 of 12 elements"
    ):
        sync.load([list(weights.items())], version=2)


def test_scales_of_what_is_not_quantised_are_refused(sync: WeightSync, weights: Weights) -> None:
    weights["model.layers.1.input_layernorm.weight" + SCALE_SUFFIX] = torch.ones(2)
    with pytest.raises(
        RunFailed, match=r"layers\.1\.input_layernorm\.weight_scale_inv of shape \[2\] is not known"
    ):
        sync.load([list(weights.items())], version=3)


def test_a_scale_that_differs_is_named(sync: WeightSync, weights: Weights, tmp_path: Path) -> None:
    sync.load([list(weights.items())], version=4)
    name = "model.layers.2.self_attn.k_proj.weight" + SCALE_SUFFIX
    weights[name] = weights[name] * 2
    assert sync.differing_tensors([list(weights.items())]) == [f"{name} differs"]

"""An engine whose experts are in FP8: each with its scales, and each in its place."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specs import spec_of
from tiny_qwen3 import largest_difference, make_moe, token_logprobs
from transformers import Qwen3MoeForCausalLM

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.broadcast_transport import DistributedTransport
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport, Transport
from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.fp8 import SCALE_SUFFIX, BlockFp8, dequantize, quantize
from vapo_megatron.weights.hf_files import HFTensors

pytestmark = pytest.mark.full

RECIPE = BlockFp8.of(spec_of("qwen3_moe"))
CONFIG = RolloutConfig(
    quantization="fp8",
    load_format="dummy",
    max_running_requests=8,
    max_total_tokens=2048,
    start_timeout_s=240,
)
DEADLINE = 240.0
TOKENS = list(range(10, 60))
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def moe() -> Qwen3MoeForCausalLM:
    wide = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "num_experts": 4}
    return make_moe(0, initializer_range=0.05, **wide)


@pytest.fixture(scope="module")
def moe_path(moe: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe_fp8")
    moe.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(moe_path: Path) -> Iterator[EngineServer]:
    device = range(1) if torch.cuda.is_available() else None
    with EngineServer(
        moe_path, CONFIG, "bfloat16", moe_path / "engine.log", device, fp8=RECIPE
    ) as running:
        yield running


@pytest.fixture(params=["shared_memory", "distributed"])
def sync(
    request: pytest.FixtureRequest, server: EngineServer, tmp_path: Path
) -> Iterator[WeightSync]:
    client = EngineClient(server.address, DEADLINE)
    transports: dict[str, Transport] = {
        "shared_memory": SharedMemoryTransport(client, 1),
        "distributed": DistributedTransport([client], 1, DEADLINE),
    }
    with WeightSync(transports[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def originals(moe_path: Path) -> Weights:
    """As the checkpoint names them: a tensor for every expert."""
    tensors = HFTensors(moe_path)
    return {name: tensors[name][:].bfloat16() for name in sorted(tensors.names)}


@pytest.fixture
def weights(originals: Weights) -> Weights:
    [converted] = RECIPE.convert([list(originals.items())])
    return dict(converted)


@pytest.fixture(scope="module")
def rounded(
    moe: Qwen3MoeForCausalLM, originals: Weights, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """Log-probs of the model whose weights went through FP8 and back."""
    path = tmp_path_factory.mktemp("rounded")
    moe.save_pretrained(path)
    from safetensors.torch import save_file

    state = {
        name: dequantize(*quantize(tensor)) if RECIPE.covers(name) else tensor.float()
        for name, tensor in originals.items()
    }
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return token_logprobs(
        Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), TOKENS
    )


def pairs(weights: Weights, one: int, other: int) -> list[tuple[str, str]]:
    """The names of all that two experts have, values and scales."""
    names = [
        EXPERT.format("{}", part) + suffix
        for part in ("gate", "up", "down")
        for suffix in ("", SCALE_SUFFIX)
    ]
    assert all(name.format(one) in weights for name in names), (
        "experts are not quantised one by one"
    )
    return [(name.format(one), name.format(other)) for name in names]


def test_experts_in_each_others_place_are_noticed_and_named(
    sync: WeightSync, weights: Weights, rounded: list[float]
) -> None:
    sync.load([list(weights.items())], version=1)
    assert sync.differing_tensors([list(weights.items())]) == []
    right = largest_difference(sync, [TOKENS], [rounded])
    assert right < 0.2
    swapped = dict(weights)
    names = pairs(weights, 0, 3)
    for one, other in names:
        swapped[one], swapped[other] = weights[other], weights[one]
    sync.load([list(swapped.items())], version=2)
    assert largest_difference(sync, [TOKENS], [rounded]) > 3 * right
    differing = sync.differing_tensors([list(weights.items())])
    assert differing == [
        f"{name} differs" for name in weights if name in {n for pair in names for n in pair}
    ]


def test_a_scale_of_an_expert_left_out_is_named(sync: WeightSync, weights: Weights) -> None:
    del weights[EXPERT.format(2, "up") + SCALE_SUFFIX]
    with pytest.raises(
        RunFailed, match=r"layers\.1\.mlp\.experts\.w13_weight_scale_inv .* 14 of 16 elements"
    ):
        sync.load([list(weights.items())], version=3)

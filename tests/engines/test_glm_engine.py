"""A real server of a GLM-4.5-shaped model: dense layer, shared expert, experts chosen by a sigmoid and a bias."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_qwen3 import EOS, SIZES, largest_difference, token_logprobs
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.client import EngineClient
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.request import GenerationRequest
from vapo_megatron.engines.server import EngineServer
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport
from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.routed_experts import ExpertChoices
from vapo_megatron.weights.spec import read_spec

pytestmark = pytest.mark.full

CONFIG = RolloutConfig(
    load_format="dummy", max_running_requests=8, max_total_tokens=2048, start_timeout_s=240, router_replay=True
)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def glm() -> Glm4MoeForCausalLM:
    torch.manual_seed(3)
    config = Glm4MoeConfig(
        **SIZES,
        moe_intermediate_size=48,
        n_routed_experts=6,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
        num_mtp_layers=0,
    )
    model = Glm4MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):  # which start at 0, where mistakes do not show
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model


@pytest.fixture(scope="module")
def path(glm: Glm4MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    glm.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[EngineServer]:
    with EngineServer(path, CONFIG, "float32", path / "engine.log") as running:
        yield running


def test_what_is_synced_is_what_is_sampled_from(server: EngineServer, glm: Glm4MoeForCausalLM, path: Path) -> None:
    tensors, sequence = HFTensors(path), list(range(10, 60))
    weights = {name: tensors[name][:] for name in sorted(tensors.names)}
    spec = read_spec(path)
    chosen: list[torch.Tensor] = []
    glm.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    with WeightSync(SharedMemoryTransport(EngineClient(server.address, 120), 1)) as sync:
        partial = {name: tensor for name, tensor in weights.items() if name != BIAS}
        with pytest.raises(RunFailed, match=r"layers\.1\.mlp\.gate\.e_score_correction_bias .* was not sent in full"):
            sync.load([list(partial.items())], version=1)
        sync.load([list(weights.items())], version=2)
        assert largest_difference(sync, [sequence], [token_logprobs(glm, sequence)]) < 1e-5
    prompts = [Prompt(id="0", problem="", answer="", token_ids=tuple(range(3, 40)))]
    request = GenerationRequest(prompts, 4, SamplingConfig(max_new_tokens=16), 1, 2, ExpertChoices.of(spec))
    with Dispatcher([server.address], CONFIG, stop_token_ids=[EOS]) as dispatcher:
        for sample in dispatcher.collect(request):
            tokens = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
            expected = token_logprobs(glm, tokens)[-len(sample.response_ids) :]
            assert sample.rollout_logprobs == pytest.approx(expected, abs=1e-5)
            assert sample.routed_experts is not None
            told = sample.routed_experts.unflatten(1, (2, 2))[:, 1].sort(-1).values.long()
            assert torch.equal(told, chosen[-1][:-1].sort(-1).values)

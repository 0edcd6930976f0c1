"""A real server of a small model of each family: strict sync, log-probs, and the experts it
reports."""

from pathlib import Path

import pytest
import torch
import transformers
from family_table import FAMILIES
from hf_models import write_model, write_tensors
from tiny_qwen3 import EOS, SIZES, largest_difference, token_logprobs

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport
from vapo_megatron.errors import RunFailed
from vapo_megatron.models.registry import read_spec
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.carried import open_weights
from vapo_megatron.weights.routed_experts import ExpertChoices

pytestmark = pytest.mark.full

SHAPE = SIZES | {"num_hidden_layers": 4, "head_dim": 16}


# One of each kind of attention, and of state, whose prompts are cached.
SHARED = ("qwen3", "gpt_oss", "deepseek_v3", "qwen3_5_text")


@pytest.mark.parametrize(
    ("family", "shares_prompts"),
    [
        *((name, False) for name, row in FAMILIES.items() if row.served),
        *((name, True) for name in SHARED),
    ],
)
def test_what_is_synced_is_what_is_sampled_from(
    tmp_path: Path, family: str, shares_prompts: bool
) -> None:
    shape = SHAPE
    if "kv_lora_rank" in FAMILIES[family].sizes:  # which has widths of its own
        shape = {key: SHAPE[key] for key in SHAPE if key not in ("head_dim", "num_key_value_heads")}
    if FAMILIES[family].sizes.get("tie_word_embeddings"):  # SGLang knows no other head
        shape = shape | {"tie_word_embeddings": True}
    path = write_model(tmp_path / "model", family, **shape)
    write_tensors(path, round_sinks)
    reference = Reference(path, family)
    spec = read_spec(path)
    settings = RolloutConfig(
        load_format="dummy",
        max_running_requests=8,
        max_total_tokens=2048,
        start_timeout_s=240,
        share_prompts=shares_prompts,
        router_replay=bool(spec.num_experts),
    )
    tensors = open_weights(path, spec)
    weights = {name: tensors[name][:] for name in sorted(tensors.names)}
    sequence = list(range(10, 60))
    expected = [token_logprobs(reference.model, sequence)]
    with EngineServer(path, settings, "float32", tmp_path / "engine.log") as server:
        transport = SharedMemoryTransport(EngineClient(server.address, 120), 1)
        with WeightSync(transport) as sync:
            last = max(name for name in weights if name.startswith("model.layers.3."))
            partial = [(name, tensor) for name, tensor in weights.items() if name != last]
            with pytest.raises(RunFailed, match="was not sent in full"):
                sync.load([partial], version=1)
            sync.load([list(weights.items())], version=2)
            assert largest_difference(sync, [sequence], expected) < reference.near(sequence)
        choices = ExpertChoices.of(spec) if spec.num_experts else None
        prompts = [Prompt(id="0", problem="", answer="", token_ids=tuple(range(3, 40)))]
        sampling = SamplingConfig(max_new_tokens=16)
        request = GenerationRequest(prompts, 4, sampling, 1, 2, choices)
        with Dispatcher([server.address], settings, stop_token_ids=[EOS]) as dispatcher:
            samples = dispatcher.collect(request)
    for sample in samples:
        tokens = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
        wanted = token_logprobs(reference.model, tokens)[-len(sample.response_ids) :]
        assert sample.rollout_logprobs == pytest.approx(wanted, abs=reference.near(tokens))
        if sample.routed_experts is not None:
            assert torch.equal(
                sorted_experts(sample.routed_experts), chosen(reference.model, tokens)
            )
    assert bool(spec.num_experts) == all(sample.routed_experts is not None for sample in samples)


class Reference:
    """What an engine is compared with: transformers. Routers amplify the rounding of delta nets, in
    transformers as well, so that such a model is compared with float64."""

    def __init__(self, path: Path, family: str) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = self._rounded = load(path).eval()
        self._limit = FAMILIES[family].engine
        if FAMILIES[family].experts and "linear_num_key_heads" in FAMILIES[family].sizes:
            self.model = load(path, dtype=torch.float64, experts_implementation="eager").eval()

    def near(self, tokens: list[int]) -> float:
        """How far log-probs of these tokens may be off: eight times as far as transformers' are in
        float32, if that is more than the family's limit. Single tokens were five times as far."""
        exact = torch.tensor(token_logprobs(self.model, tokens))
        rounded = torch.tensor(token_logprobs(self._rounded, tokens))
        return max(self._limit, 8 * float((exact - rounded).abs().max()))


def round_sinks(tensors: dict[str, torch.Tensor]) -> None:
    """Make attention sinks bfloat16's numbers, as SGLang keeps them whatever the model's dtype."""
    for name, tensor in tensors.items():
        if name.endswith(".sinks"):
            tensors[name] = tensor.bfloat16().float()


def sorted_experts(experts: torch.Tensor) -> torch.Tensor:
    """Those of the last layer, [tokens, k]."""
    return experts.unflatten(1, (4, -1))[:, 3].long().sort(-1).values


@torch.no_grad()
def chosen(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Experts of transformers' last layer, of each token but the last, [tokens - 1, k]."""
    outputs: list[torch.Tensor] = []
    mlp = model.model.layers[3].mlp
    gate = mlp.router if hasattr(mlp, "router") else mlp.gate
    hook = gate.register_forward_hook(lambda _, __, output: outputs.append(output[2]))
    model(torch.tensor([tokens]))
    hook.remove()
    return outputs[0][:-1].sort(-1).values

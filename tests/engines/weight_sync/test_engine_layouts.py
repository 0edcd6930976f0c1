"""Engines whose GPUs share out more than columns: copies of key-value heads, experts, attention,
nodes. Each computes what the trainer does after a weight sync by every transport."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qwen3 import chosen_experts, largest_difference, make_moe, token_logprobs
from transformers import Qwen3MoeForCausalLM

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.external_server import ask_health
from vapo_megatron.engines.server.client import Completion, EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.broadcast_transport import DistributedTransport
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport
from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.routed_experts import ExpertChoices

pytestmark = pytest.mark.full

SEQUENCES = [list(range(3, 40)), list(range(50, 80)), list(range(20, 90))]
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"
DEADLINE = 240.0


@pytest.mark.parametrize("server_args", [{"ep_size": 2}, {"attn_dp_size": 2}])
def test_an_engine_computes_what_the_trainer_does(
    tmp_path: Path, server_args: dict[str, Any]
) -> None:
    before, after = (make_moe(seed, num_key_value_heads=2) for seed in (1, 2))
    paths = {model: tmp_path / name for model, name in ((before, "before"), (after, "after"))}
    for model, path in paths.items():
        model.save_pretrained(path)
    tensors = {model: weights(path) for model, path in paths.items()}
    config = RolloutConfig(
        tp=2,
        max_running_requests=8,
        max_total_tokens=4096,
        start_timeout_s=DEADLINE,
        router_replay=True,
        server_args=server_args,
    )
    with EngineServer(paths[before], config, "float32", tmp_path / "engine.log") as server:
        client = EngineClient(server.address, DEADLINE)
        transports = (
            SharedMemoryTransport(client, 2),
            DistributedTransport([client], 2, DEADLINE),
        )
        for version, transport in enumerate(transports, start=1):
            model = after if version % 2 else before
            with WeightSync(transport) as sync:
                sync.load([list(tensors[model].items())], version)
                expected = [token_logprobs(model, sequence) for sequence in SEQUENCES]
                assert largest_difference(sync, SEQUENCES, expected) < 1e-4
                assert sync.differing_tensors([list(tensors[model].items())]) == []
        check_experts(client, before)
        with WeightSync(SharedMemoryTransport(client, 2)) as sync:
            check_refusals(sync, tensors[after])
        health = ask_health(server.address, 10)
        assert health is not None and not health["lost"]


def check_experts(client: EngineClient, model: Qwen3MoeForCausalLM) -> None:
    """Whichever GPUs a request is on, the experts in its response belong to its
    tokens."""
    choices = ExpertChoices(layers=2, experts=6, per_token=2)
    sampling = {"max_new_tokens": 8, "temperature": 1.0}
    for completion, prompt in zip(
        asyncio.run(_generate(client, SEQUENCES * 2, sampling, choices)), SEQUENCES * 2, strict=True
    ):
        tokens = [*prompt, *completion.token_ids.tolist()]
        assert completion.routed_experts is not None
        told = completion.routed_experts.unflatten(1, (2, 2)).sort(-1).values.long()
        assert torch.equal(told, chosen_experts(model, tokens[:-1]).sort(-1).values)


async def _generate(
    client: EngineClient, prompts: list[list[int]], sampling: dict[str, Any], choices: ExpertChoices
) -> list[Completion]:
    try:
        return await client.generate(prompts, [sampling] * len(prompts), choices)
    finally:
        await client.close()


def weights(path: Path) -> dict[str, torch.Tensor]:
    found = HFTensors(path)
    return {name: found[name][:] for name in sorted(found.names)}


def check_refusals(sync: WeightSync, tensors: dict[str, torch.Tensor]) -> None:
    """What one rank alone holds is missed as well."""
    for missing in (0, 5):
        part = {name: tensor for name, tensor in tensors.items() if name != EXPERT.format(missing)}
        with pytest.raises(
            RunFailed, match=r"layers\.1\.mlp\.experts\.w13_weight .* was not sent in full"
        ):
            sync.load([list(part.items())], 7)
    with pytest.raises(RunFailed, match=r"experts\.6\.up_proj\.weight of shape \[48, 64\]"):
        sync.load([list((tensors | {EXPERT.format(6): tensors[EXPERT.format(5)]}).items())], 8)
    with pytest.raises(RunFailed, match=r"model\.nrom\.weight of shape \[64\] is not known"):
        sync.load(
            [list((tensors | {"model.nrom.weight": tensors["model.norm.weight"]}).items())], 9
        )
    sync.load([list(tensors.items())], 10)
    swapped = tensors | {
        EXPERT.format(0): tensors[EXPERT.format(5)],
        EXPERT.format(5): tensors[EXPERT.format(0)],
    }
    assert sync.differing_tensors([list(swapped.items())]) == [
        f"{EXPERT.format(n)} differs" for n in (0, 5)
    ]

"""The engine runs the weights that the trainer has: re-sharded, checked after every weight sync,
and named if not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from batches import random_sequences
from hf_models import write_model
from ranks import run_ranks

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.deadlines import ask
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.placement import TARGETS_FILE, Placement
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.engines.weight_sync.logprob_difference import (
    Limits,
    LogprobDifference,
    probe_batch,
)
from vapo_megatron.errors import RunFailed
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.rollout.dispatcher import connect
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.load import load_hf

VOCAB = 96


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    return write_model(
        path, "qwen2", vocab_size=VOCAB, max_position_embeddings=256, eos_token_id=VOCAB - 1
    )


def generated_tokens(log_dir: Path) -> float:
    """What the engines that are listed for Prometheus have told it, without a key."""
    ((targets, labels),) = (
        entry.values() for entry in json.loads((log_dir / TARGETS_FILE).read_text())
    )
    assert labels == {"job": "sglang"}
    lines: list[str] = []
    for target in targets:
        lines += ask(f"http://{target}/metrics", 240).content.decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("sglang:generation_tokens_total")
    )


def weight_sync_three_times_and_break(
    model_dir: Path, log_dir: Path
) -> tuple[list[LogprobDifference], float, str]:
    spec = read_spec(model_dir)
    layout = LayoutConfig(tp=2, pp=2, sequence_parallel=True)
    mesh = make_mesh(layout)
    model = ModelConfig(path=str(model_dir), dtype="float32")
    actor = Trainable(spec, model, ActorConfig(layout=layout), mesh, "lm", name="actor", seed=1)
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    actor.prepare()
    sequences = random_sequences(3, 20, VOCAB, seed=1)
    config = RolloutConfig(context_length=128, server_args={"enable_metrics": True})
    with (
        EnginePool(config, model_dir, "float32", log_dir) as engines,
        EngineWeights(engines, config, "float32") as weights,
    ):
        engines.start()
        engines.wait_until_ready()
        # As bfloat16 kernels that differ by more than foreseen: a warning while every tensor is
        # equal.
        with patch.object(EngineWeights, "limits", Limits(0.95, 0.0, 0.0, are_estimates=True)):
            differences = [weights.check(actor, sequences)]
        for _ in range(3):
            with torch.no_grad():
                for name, parameter in actor.chunks[0].named_parameters():
                    noise = torch.Generator().manual_seed(dist.get_rank() + len(name))
                    if parameter.ndim == 2:  # norms are the same on every tensor-parallel rank
                        parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.05)
            weights.update_weights(actor)
            differences.append(weights.check(actor, sequences))
        responses = []
        if dist.get_rank() == 0:
            prompts = [
                Prompt(str(i), "", "", tuple(ids[:5]), cursor=i) for i, ids in enumerate(sequences)
            ]
            dispatcher = connect(engines, config, [VOCAB - 1], VOCAB)
            responses = dispatcher.collect(
                GenerationRequest(prompts, 2, SamplingConfig(max_new_tokens=12), 7, weights.version)
            )
            assert {s.weight_version for s in responses} == {3}
            assert generated_tokens(log_dir) >= sum(len(s.response_ids) for s in responses) > 0
        box = [
            [
                ([*s.prompt.token_ids, *map(int, s.response_ids)], s.rollout_logprobs)
                for s in responses
            ]
        ]
        dist.broadcast_object_list(box, src=0)
        batch = probe_batch([ids for ids, _ in box[0]])
        ours = actor.score(batch)[:, 0].split(batch.response_lengths.tolist())
        theirs = [torch.tensor(logprobs) for _, logprobs in box[0]]
        sampled = max(
            float((row[4:] - logprobs).abs().max())
            for row, logprobs in zip(ours, theirs, strict=True)
        )
        # A trainer that continues without a weight sync: the check must say so, and which tensor it
        # is.
        with torch.no_grad():
            for name, parameter in actor.chunks[0].named_parameters():
                if name == "decoder.layers.1.mlp.linear_fc2.weight" and mesh.pp_rank == 0:
                    parameter.mul_(1.5)
        try:
            weights.check(actor, sequences)
            message = "nothing was noticed"
        except RunFailed as error:
            message = str(error)
    return differences, sampled, message


@pytest.mark.full
def test_resharded_weights_arrive_and_a_stale_engine_is_named(
    model_dir: Path, tmp_path: Path
) -> None:
    """Training TP2 PP2 with sequence parallel, engine TP1."""
    answers = run_ranks(4, weight_sync_three_times_and_break, model_dir, tmp_path, deadline=240)
    for differences, sampled, message in answers:
        assert len(differences) == 4 and max(found.largest for found in differences) < 1e-4
        assert sampled < 1e-4, "log-probs of sampled tokens differ from the trainer's"
        assert "after the weight sync of version 3" in message
        assert "model.layers.1.mlp.down_proj.weight differs" in message
        assert message.count("differs") == 1


def placed(model_dir: Path, tp: int) -> list[int] | None:
    """GPUs of this rank's server on nodes of two."""
    device = torch.device("cuda", dist.get_rank() % 2)
    platform: Any = SimpleNamespace(is_cuda=True, device=device, device_count=lambda: 2)
    found = Placement(RolloutConfig(tp=tp), model_dir, "bfloat16", Path("logs"), platform)
    keeper: Any = found.keeper
    return None if keeper is None else list(keeper._server._devices)


@pytest.mark.parametrize(
    ("tp", "devices"), [(1, [[0], [1], [0], [1]]), (2, [[0, 1], None, [0, 1], None])]
)
def test_the_first_of_the_ranks_that_share_an_engine_owns_it(
    model_dir: Path, tp: int, devices: list[list[int] | None]
) -> None:
    assert run_ranks(4, placed, model_dir, tp) == devices

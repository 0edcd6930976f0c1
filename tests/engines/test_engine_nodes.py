"""An engine on two hosts: it gets the weights, generates, and is replaced when it loses a host."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from batches import random_sequences
from hf_models import write_model
from hosts import Host, missing, two_hosts
from ranks import run_ranks

from vapo_megatron.config.model import ActorConfig, LayoutConfig, ModelConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.rollout.dispatcher import Dispatcher, connect
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.load import load_hf

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(reason := missing()), reason=reason or "two hosts"),
]

VOCAB = 96
DEADLINE = 240.0


def trained(model_dir: Path) -> Trainable:
    spec = read_spec(model_dir)
    mesh = make_mesh(LayoutConfig())
    model = ModelConfig(path=str(model_dir), dtype="float32")
    actor = Trainable(spec, model, ActorConfig(), mesh, "lm", name="actor", seed=1)
    load_hf(actor.chunks, spec, model_dir, mesh, "lm")
    with torch.no_grad():
        for name, parameter in actor.chunks[0].named_parameters():
            noise = torch.Generator().manual_seed(len(name))
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.05)
    return actor


def generate(dispatcher: Dispatcher | None, version: int) -> list[tuple[int, int]]:
    """Weight version and length of responses, on rank 0."""
    if dispatcher is None:
        return []
    prompts = [
        Prompt(str(i), "", "", tuple(ids[:5]), cursor=i)
        for i, ids in enumerate(random_sequences(3, 20, VOCAB, seed=1))
    ]
    found = dispatcher.collect(
        GenerationRequest(prompts, 2, SamplingConfig(max_new_tokens=12), 7, version)
    )
    return [(sample.weight_version, len(sample.response_ids)) for sample in found]


def serve_on_two_hosts(
    hosts: Sequence[Host], model_dir: Path, folder: Path
) -> tuple[list[float], list[list[tuple[int, int]]], list[str], str, str]:
    """Largest differences of log-probs, responses, causes of failures; URL and transport."""
    host = hosts[dist.get_rank()]
    host.enter()
    config = RolloutConfig(
        tp=2,
        nodes=2,
        context_length=128,
        start_timeout_s=DEADLINE,
        health={"answer_s": 60},
    )
    actor = trained(model_dir)
    sequences = random_sequences(3, 20, VOCAB, seed=1)
    differences = []
    with (
        EnginePool(config, model_dir, "float32", folder) as engines,
        EngineWeights(engines, config, "float32") as weights,
    ):
        engines.start()
        engines.wait_until_ready()
        dispatcher = None
        if dist.get_rank() == 0:
            dispatcher = connect(engines, config, [VOCAB - 1], VOCAB)
        weights.update_weights(actor)
        differences.append(weights.check(actor, sequences).largest)
        responses = [generate(dispatcher, weights.version)]
        keeper = engines._placement.keeper
        assert keeper is not None
        dist.barrier()  # until rank 0 has its responses
        if dist.get_rank() == 1:  # what runs of the engine on this host is gone at once
            server = keeper._server
            os.killpg(server.pid, signal.SIGKILL)  # type: ignore[union-attr]
        end = time.monotonic() + DEADLINE
        while not keeper.status().failures:
            assert time.monotonic() < end, "nobody noticed"
            time.sleep(0.1)
        dist.barrier()
        weights.update_weights(actor)
        differences.append(weights.check(actor, sequences).largest)
        responses.append(generate(dispatcher, weights.version))
        dist.barrier()
        causes = engines.pop_failures()
        transport = type(weights.session._transport).__name__
        return differences, responses, causes, engines.addresses[0].url, transport


def test_an_engine_on_two_hosts_is_fed_and_replaced(tmp_path: Path) -> None:
    model_dir = write_model(
        tmp_path / "model",
        "qwen2",
        vocab_size=VOCAB,
        max_position_embeddings=256,
        eos_token_id=VOCAB - 1,
    )
    with two_hosts() as hosts:
        ranks = run_ranks(
            2, serve_on_two_hosts, hosts, model_dir, tmp_path / "logs", deadline=3 * DEADLINE
        )
    for differences, _, causes, url, transport in ranks:
        assert len(differences) == 2 and max(differences) < 1e-4
        assert len(causes) == 1 and "its part on node 1 failed: its HTTP server" in causes[0]
        assert url.startswith(f"http://{hosts[0].address}:") and transport == "DistributedTransport"
    (before, after), nothing = ranks[0][1], ranks[1][1]
    assert nothing == [[], []]
    assert [{version for version, _ in found} for found in (before, after)] == [{1}, {2}]
    assert len(before) == len(after) == 6

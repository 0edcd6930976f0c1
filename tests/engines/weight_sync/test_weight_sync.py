"""Training at one layout, engines at another, by every transport of a machine without GPUs: after
each update the engine computes what the trainer does, and nothing that goes wrong on the way goes
unnoticed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import random_sequences
from ranks import run_ranks
from tiny_qwen3 import largest_difference, make_model, token_logprobs
from transformers import Qwen3ForCausalLM

from vapo_megatron.config.model import (
    ActorConfig,
    AdapterConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerSettings,
)
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync import broadcast_transport, sent_buckets
from vapo_megatron.engines.weight_sync.broadcast_transport import DistributedTransport
from vapo_megatron.engines.weight_sync.logprob_difference import probe_batch, split_logprobs
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport, Transport
from vapo_megatron.errors import RunFailed
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.bucket import Bucket, SharedSlots, pack, sum_of_words
from vapo_megatron.weights.changes import changed_words
from vapo_megatron.weights.export import make_slots, stream_hf
from vapo_megatron.weights.load import load_hf

KINDS = ["shared_memory", "distributed"]
DEADLINE = 240.0
VOCAB = 128
SEQUENCES = random_sequences(3, 24, VOCAB, seed=1)
UP = "model.layers.{}.mlp.up_proj.weight"

Tensors = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def wide_server(
    model_path: Path, config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """Two tensor-parallel ranks."""
    log_file = tmp_path_factory.mktemp("logs") / "wide.log"
    with EngineServer(
        model_path, config.model_copy(update={"tp": 2}), "float32", log_file
    ) as running:
        yield running


@pytest.fixture
def restored(server: EngineServer, model: Qwen3ForCausalLM) -> Iterator[EngineServer]:
    """The shared server of one rank, which gets back the weights that other tests expect."""
    yield server
    with make_sync("shared_memory", server.address, 1) as sync:
        sync.load([list(model.state_dict().items())], version=0)


def make_sync(kind: str, address: EngineAddress, engine_tp: int) -> WeightSync:
    client = EngineClient(address, DEADLINE)
    transport: Transport
    if kind == "shared_memory":
        transport = SharedMemoryTransport(client, engine_tp)
    else:
        transport = DistributedTransport([client], engine_tp, DEADLINE)
    return WeightSync(transport)


class LikelihoodLoss:
    """Minus the mean log-prob of response tokens."""

    sums = ("loss",)
    maxima = ()

    def __init__(self, tokens: int) -> None:
        self._weights = torch.full((tokens,), 1.0 / tokens)

    def __call__(
        self, outputs: torch.Tensor, local: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(outputs[:, 0] * local.gather(self._weights)).sum()
        return loss, {"loss": loss.detach()}


def train_and_send(
    model_path: Path,
    layout: LayoutConfig,
    engines: list[tuple[EngineAddress, int]],
    kind: Any = "model",
) -> dict[str, Any]:
    """Three updates, after each a weight sync by every transport to every engine; rank 0 speaks to
    all of them. kind: model or adapters; the trainer adds what adapters compute, and an engine has
    them in its weights."""
    spec = read_spec(model_path)
    mesh = make_mesh(layout)
    model = ModelConfig(path=str(model_path), dtype="float32", adapter=AdapterConfig(rank=4))
    section = ActorConfig(
        kind=kind, layout=layout, optimizer=OptimizerSettings(lr=1e-2, warmup_steps=0)
    )
    actor = Trainable(spec, model, section, mesh, "lm", name="actor", seed=1)
    load_hf(actor.chunks, spec, model_path, mesh, "lm")
    actor.prepare()
    slots = make_slots(torch.device("cpu"))
    batch = probe_batch(SEQUENCES)
    leads = dist.get_rank() == 0
    syncs = [
        (kind, address, make_sync(kind, address, tp))
        for address, tp in engines
        for kind in KINDS
        if leads
    ]
    differences: list[float] = []
    losses = []
    versions = []
    version = 0
    for _ in range(3):
        losses.append(
            actor.train_step(
                batch, range(batch.samples), LikelihoodLoss(batch.response_tokens)
            ).metrics["loss"]
        )
        ours = split_logprobs(batch, actor.score(batch, temperature=1.0)[:, 0])
        for i in range(len(engines) * len(KINDS)):
            version += 1
            # Small buckets: several of them go each way.
            stream = stream_hf(actor.chunks, spec, mesh, "lm", bucket_bytes=60_000, slots=slots)
            if not leads:
                for _ in stream:
                    pass
                continue
            _, address, sync = syncs[i]
            sync.load(stream, version)
            differences.append(largest_difference(sync, SEQUENCES, ours))
            versions.append(sampled_version(address, version))
    for _, _, sync in syncs:
        sync.close()
    dist.barrier()
    slots.close()
    return {"differences": differences, "losses": losses, "versions": versions}


def sampled_version(address: EngineAddress, version: int) -> bool:
    """Whether samples carry a version; the dispatcher itself raises where they do not."""
    config = RolloutConfig(collect_timeout_s=DEADLINE)
    prompts = [Prompt("p", "", "", tuple(SEQUENCES[0][:5]))]
    with Dispatcher([address], config, stop_token_ids=[1]) as dispatcher:
        samples = dispatcher.collect(
            GenerationRequest(
                prompts, 2, SamplingConfig(max_new_tokens=4), 0, weight_version=version
            )
        )
    return all(
        sample.weight_version == sample.weight_version_oldest == version for sample in samples
    )


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.full)])
def test_engines_of_other_layouts_agree_after_every_update(
    model_path: Path, restored: EngineServer, request: pytest.FixtureRequest, wide: bool
) -> None:
    """TP2 PP2 to an engine of one rank, and to it beside one of two."""
    layout = LayoutConfig(tp=2, pp=2, sequence_parallel=True)
    engines = [(restored.address, 1)]
    if wide:
        engines.append((request.getfixturevalue("wide_server").address, 2))
    answers = run_ranks(4, train_and_send, model_path, layout, engines, deadline=240)
    check(answers[0], weight_syncs=6 * len(engines))


@pytest.mark.full
def test_a_trainer_of_one_rank_feeds_an_engine_of_two(
    model_path: Path, wide_server: EngineServer
) -> None:
    engines = [(wide_server.address, 2)]
    answers = run_ranks(1, train_and_send, model_path, LayoutConfig(), engines, deadline=240)
    check(answers[0], weight_syncs=6)


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.full)])
def test_engine_has_adapters_in_its_weights_after_every_update(
    model_path: Path, request: pytest.FixtureRequest, wide: bool
) -> None:
    """TP2 to an engine of one rank and to one of two."""
    engine: EngineServer = request.getfixturevalue("wide_server" if wide else "restored")
    engines = [(engine.address, 1 + wide)]
    layout = LayoutConfig(tp=2, sequence_parallel=True)
    answers = run_ranks(2, train_and_send, model_path, layout, engines, "adapter", deadline=240)
    check(answers[0], weight_syncs=6)


def check(answer: dict[str, Any], weight_syncs: int) -> None:
    assert len(answer["differences"]) == weight_syncs and max(answer["differences"]) < 1e-4
    assert answer["losses"][0] > answer["losses"][1] > answer["losses"][2], (
        "the updates changed nothing"
    )
    assert answer["versions"] == [True] * weight_syncs


@pytest.fixture(scope="module")
def others() -> Tensors:
    """Other weights than the server started with."""
    return list(make_model(7).state_dict().items())


WIDE = [pytest.param((kind, True), id=f"{kind}-2", marks=pytest.mark.full) for kind in KINDS]


@pytest.fixture(params=[*(pytest.param((kind, False), id=kind) for kind in KINDS), *WIDE])
def sync(request: pytest.FixtureRequest) -> Iterator[WeightSync]:
    """To an engine of one rank, or of two."""
    kind, wide = request.param
    engine: EngineServer = request.getfixturevalue("wide_server" if wide else "restored")
    with make_sync(kind, engine.address, 1 + wide) as running:
        yield running


def in_slots(tensors: Tensors, size: int = 5) -> Iterator[Bucket]:
    """Buckets as a stream makes them: in two places of shared memory."""
    slots = SharedSlots()
    for index, start in enumerate(range(0, len(tensors), size)):
        part = tensors[start : start + size]
        yield pack(part, slots, index)
    slots.close()


def test_a_bucket_damaged_on_its_way_is_named(sync: WeightSync, others: Tensors) -> None:
    """One bit of one weight, too little for log-probs to tell."""

    def damage(tensors: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in tensors:
            bucket.checksums()
            for name, tensor in bucket:
                if name == UP.format(1):
                    tensor.view(torch.int32)[3, 5] ^= 1
            yield bucket

    with pytest.raises(
        RunFailed, match=rf"weights were not accepted: {UP.format(1)} arrived damaged[^;]*$"
    ):
        sync.load(damage(in_slots(others)), version=1)


def test_a_tensor_dropped_on_its_way_is_named(sync: WeightSync, others: Tensors) -> None:
    dropped = [(name, tensor) for name, tensor in others if name != UP.format(0)]
    with pytest.raises(
        RunFailed, match=r"layers\.0\.mlp\.gate_up_proj\.weight .* was not sent in full"
    ):
        sync.load(in_slots(dropped), version=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_or_shape_that_the_engine_does_not_take_is_named(
    kind: str, restored: EngineServer, others: Tensors
) -> None:
    """Of an engine that pads no dimensions: one that does fills up what is short
    (strict_loading)."""
    sync = make_sync(kind, restored.address, 1)
    wrong = [(name.replace("1.mlp.up", "1.mlp.upp"), t) for name, t in others]
    with pytest.raises(
        RunFailed, match=r"model\.layers\.1\.mlp\.upp_proj\.weight of shape \[96, 64\] is not known"
    ):
        sync.load(in_slots(wrong), version=1)
    cut = [
        (name, t[:-2] if name.endswith("1.self_attn.k_proj.weight") else t) for name, t in others
    ]
    with pytest.raises(RunFailed, match=r"1\.self_attn\.k_proj\.weight (of shape )?\[30, 64\]"):
        sync.load(in_slots(cut), version=1)


def test_a_session_that_was_broken_off_ends_with_the_next_one(
    restored: EngineServer, others: Tensors
) -> None:
    """The server is one of several, and another one failed in the middle of a weight sync."""
    client = EngineClient(restored.address, DEADLINE)
    with asyncio.Runner() as runner:
        runner.run(client.begin_weight_update())
        runner.run(client.close())
    with make_sync("shared_memory", restored.address, 1) as sync:
        sync.load(in_slots(others), version=1)


def test_layers_in_each_others_place_are_noticed_and_named(
    sync: WeightSync, others: Tensors
) -> None:
    model = make_model(7)
    weights = dict(others)
    swapped = weights | {UP.format(0): weights[UP.format(1)], UP.format(1): weights[UP.format(0)]}
    expected = [token_logprobs(model, sequence) for sequence in SEQUENCES]
    sync.load(in_slots(list(swapped.items())), version=2)
    assert largest_difference(sync, SEQUENCES, expected) > 1e-4
    assert sync.differing_tensors(in_slots(others)) == [
        f"{UP.format(0)} differs",
        f"{UP.format(1)} differs",
    ]
    sync.load(in_slots(others), version=3)
    assert largest_difference(sync, SEQUENCES, expected) < 1e-4
    assert sync.differing_tensors(in_slots(others)) == []


def slightly_other(tensors: Tensors) -> Tensors:
    """One weight in a hundred is another."""
    other = [(name, tensor.clone()) for name, tensor in tensors]
    for _, tensor in other:
        tensor.view(-1)[::100] += 0.01
    return other


def sent_share(sync: WeightSync, tensors: Tensors, version: int) -> float:
    """Sync, compare every tensor, and say how much of them was sent."""
    sync.load(in_slots(tensors), version)
    share = sync.sent_share
    assert share is not None
    assert sync.differing_tensors(in_slots(tensors)) == []
    return share


@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.full)])
def test_only_changes_are_sent_from_the_third_sync_on(
    request: pytest.FixtureRequest, others: Tensors, wide: bool
) -> None:
    engine: EngineServer = request.getfixturevalue("wide_server" if wide else "restored")
    client = EngineClient(engine.address, DEADLINE)
    transport = DistributedTransport([client], 1 + wide, DEADLINE, only_changes=True)
    second = slightly_other(others)
    third = slightly_other(second)
    with WeightSync(transport) as sync:
        assert [sent_share(sync, others, version) for version in (1, 2)] == [1.0, 1.0]
        assert sent_share(sync, second, 3) < 0.05
        assert sent_share(sync, third, 4) < 0.05
        new = make_model(8)
        whole = list(new.state_dict().items())
        assert 0.9 < sent_share(sync, whole, 5) <= 1.0, "all weights are others, but norms"
        expected = [token_logprobs(new, sequence) for sequence in SEQUENCES]
        assert largest_difference(sync, SEQUENCES, expected) < 1e-4
        # Another trainer's weights: what changed since the last sync says nothing of them.
        with make_sync("shared_memory", engine.address, 1 + wide) as another:
            another.load(in_slots(others), version=6)
        assert sent_share(sync, slightly_other(whole), 7) > 1.0, "changes, and then all"
        assert sent_share(sync, whole, 8) == 1.0
        assert sent_share(sync, slightly_other(whole), 9) < 0.05
        sync.serve({})
        sync.serve({engine.address.url: 1})
        assert [sent_share(sync, whole, version) for version in (10, 11)] == [1.0, 1.0]
        assert sent_share(sync, slightly_other(whole), 12) < 0.05


def test_damaged_changes_are_named(
    restored: EngineServer, others: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient(restored.address, DEADLINE)
    with WeightSync(DistributedTransport([client], 1, DEADLINE, only_changes=True)) as sync:
        for version in (1, 2):
            sync.load(in_slots(others), version)

        def damaged(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
            changes = changed_words(before, after)
            if changes is not None:
                sums.append(int(sum_of_words(changes)))
                changes[-1] ^= 1
            return changes

        sums: list[int] = []
        new = slightly_other(others)
        with monkeypatch.context() as patch:
            patch.setattr(sent_buckets, "changed_words", damaged)
            # As if the damage came after the sender had summed
            patch.setattr(broadcast_transport, "sum_of_words", lambda changes: sums[-1])
            with pytest.raises(RunFailed, match=r"the changes of \S+ to \S+ arrived damaged"):
                sync.load(in_slots(new), version=3)
        sync.load(in_slots(new), version=4)
        assert sync.differing_tensors(in_slots(new)) == []

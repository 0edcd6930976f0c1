"""A trainer and an engine of the same tensor-parallel size: nothing is gathered from the third
weight sync on, and nothing goes wrong in silence."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from batches import random_sequences
from hf_models import write_model
from ranks import run_ranks
from synced_engines import Body, with_engines

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.rollout import HealthConfig, RolloutConfig, SyncConfig
from vapo_megatron.engines import engine_weights
from vapo_megatron.engines.engine_weights import EngineWeights
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.weights import export
from vapo_megatron.weights.bucket import Bucket

pytestmark = pytest.mark.full

VOCAB = 128
SEQUENCES = random_sequences(2, 12, VOCAB, seed=1)
BUCKET = 60_000  # bytes: several buckets


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        intermediate_size=64,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        eos_token_id=VOCAB - 1,
    )


def run_engines(
    model_dir: Path, log_dir: Path, layout: LayoutConfig, sync: SyncConfig, body: Body
) -> Any:
    """On each rank: what body returns, given engines of two ranks and the actor."""
    config = RolloutConfig(
        tp=2,
        context_length=128,
        num_engines=2 if layout.pp > 1 else 1,
        max_total_tokens=2048,
        sync=sync,
        health=HealthConfig(answer_s=20, max_failures=2),
    )
    make_buckets_of(BUCKET)
    return with_engines(model_dir, log_dir, layout, config, body)


def make_buckets_of(size: int) -> None:
    SyncConfig.bucket_bytes = lambda self, free: size  # type: ignore[method-assign]


class Sent(NamedTuple):
    """What the streams of a weight sync were; buckets and those of own shares, of the last one."""

    streams: int
    buckets: int
    own: int


class Watched:
    """Watches the streams of weight syncs."""

    def __init__(self) -> None:
        self._sent = Sent(0, 0, 0)
        original = export.stream_hf

        def counted(*args: Any, **kwargs: Any) -> Iterator[Bucket]:
            self._sent = Sent(self._sent.streams + 1, 0, 0)
            for bucket in original(*args, **kwargs):
                streams, buckets, own = self._sent
                self._sent = Sent(streams, buckets + 1, own + bucket.own_shares)
                yield bucket

        engine_weights.stream_hf = counted  # type: ignore[assignment]

    def take(self) -> Sent:
        """What was sent since the last call."""
        sent = self._sent
        self._sent = Sent(0, 0, 0)
        return sent


Syncs = list[tuple[Sent, float]]
"""What each weight sync sent, and how far log-probs are from the engine's after it."""


def change(actor: Trainable, step: int) -> None:
    """Other weights, still the same on all ranks where all have them."""
    with torch.no_grad():
        for chunk in actor.chunks:
            for number, (_, parameter) in enumerate(chunk.named_parameters()):
                parameter.mul_(1.02 + 0.01 * ((number + step) % 3))


def sync_six_times(engines: EnginePool, weights: EngineWeights, actor: Trainable) -> Syncs:
    watched = Watched()
    found = []
    for step in range(6):
        change(actor, step)
        weights.update_weights(actor)
        found.append((watched.take(), weights.check(actor, SEQUENCES).largest))
    assert engines.pop_failures() == []
    return found


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, LayoutConfig(tp=2)), (4, LayoutConfig(tp=2, pp=2, sequence_parallel=True))],
    ids=["tp2", "tp2-pp2-two-engines"],
)
def test_nothing_is_gathered_from_the_third_sync_on(
    model_dir: Path, tmp_path: Path, world_size: int, layout: LayoutConfig
) -> None:
    arguments = (model_dir, tmp_path, layout, SyncConfig(), sync_six_times)
    answers = run_ranks(world_size, run_engines, *arguments, deadline=300)
    for found in answers:
        buckets = found[0][0].buckets
        assert buckets > 3
        assert [sent for sent, _ in found] == [(1, buckets, 0)] * 2 + [(1, buckets, buckets)] * 4
        assert max(difference for _, difference in found) < 1e-4


def test_buckets_that_both_cut_differently_stay_whole(tmp_path: Path) -> None:
    """SGLang rounds a feed-forward of 48 up on CPUs, and its ranks have 32 and 16 rows, where
    Megatron's have 24."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 256, "eos_token_id": VOCAB - 1}
    source = write_model(tmp_path / "model", "qwen3", intermediate_size=48, **sizes)
    arguments = (source, tmp_path / "logs", LayoutConfig(tp=2), SyncConfig(), sync_six_times)
    for found in run_ranks(2, run_engines, *arguments, deadline=300):
        assert all(0 < sent.own < sent.buckets for sent, _ in found[2:])
        assert max(difference for _, difference in found) < 1e-4


def test_whole_tensors_are_sent_where_the_config_says_so(model_dir: Path, tmp_path: Path) -> None:
    arguments = (model_dir, tmp_path, LayoutConfig(tp=2), SyncConfig(gather="always"))
    for found in run_ranks(2, run_engines, *arguments, sync_six_times, deadline=300):
        assert {sent.own for sent, _ in found} == {0}


def die_after_three(engines: EnginePool, weights: EngineWeights, actor: Trainable) -> Syncs:
    """The engine is killed once it takes own shares; once it does so again, buckets grow."""
    watched = Watched()
    found = []
    for step in range(9):
        change(actor, step)
        keeper = engines._placement.keeper
        if step == 3 and keeper is not None:
            os.kill(keeper._server.pid, signal.SIGKILL)
            while keeper.status().state == "serving":
                time.sleep(0.1)
        if step == 6:
            make_buckets_of(2 * BUCKET)
            weights._bucket_bytes = None
        dist.barrier()
        weights.update_weights(actor)
        found.append((watched.take(), weights.check(actor, SEQUENCES).largest))
    return found


def test_restarted_engines_and_other_buckets_are_learnt_again(
    model_dir: Path, tmp_path: Path
) -> None:
    arguments = (model_dir, tmp_path, LayoutConfig(tp=2), SyncConfig(), die_after_three)
    for found in run_ranks(2, run_engines, *arguments, deadline=300):
        assert [sent.streams for sent, _ in found] == [1] * 9
        # The engine is killed before the fourth, and buckets have another size from the seventh on.
        own = [sent.own == sent.buckets for sent, _ in found]
        assert own == [False, False, True, False, False, True, False, False, True]
        assert found[-1][0].buckets < found[0][0].buckets
        assert max(difference for _, difference in found) < 1e-4


def trust_too_early(engines: EnginePool, weights: EngineWeights, actor: Trainable) -> Syncs:
    """Own shares are sent although the engine has not learnt where they go."""
    watched = Watched()
    found = []
    for step in range(3):
        change(actor, step)
        if step == 1:
            weights._own_shares.buckets = frozenset(range(1000))
        weights.update_weights(actor)
        found.append((watched.take(), weights.check(actor, SEQUENCES).largest))
    return found


def test_an_engine_that_cannot_take_own_shares_is_sent_all(model_dir: Path, tmp_path: Path) -> None:
    arguments = (model_dir, tmp_path, LayoutConfig(tp=2), SyncConfig(), trust_too_early)
    for found in run_ranks(2, run_engines, *arguments, deadline=300):
        assert [sent.streams for sent, _ in found] == [1, 2, 1]
        assert [sent.own for sent, _ in found] == [0, 0, 0], "the last of each sync"
        assert max(difference for _, difference in found) < 1e-4


def damage_a_share(engines: EnginePool, weights: EngineWeights, actor: Trainable) -> None:
    """A bit of rank 1's share changes on its way."""
    for step in range(3):
        change(actor, step)
        weights.update_weights(actor)
    original = engine_weights.stream_hf

    def damaged(*args: Any, **kwargs: Any) -> Iterator[Bucket]:
        for bucket in original(*args, **kwargs):
            assert bucket.own_shares
            bucket.checksums()
            for name, tensor in bucket:
                if dist.get_rank() == 1 and name == "model.layers.1.mlp.up_proj.weight":
                    tensor.view(torch.int32)[-1, 5] ^= 1
            yield bucket

    engine_weights.stream_hf = damaged  # type: ignore[assignment]
    weights.update_weights(actor)


def test_a_share_damaged_on_its_way_is_named(model_dir: Path, tmp_path: Path) -> None:
    arguments = (model_dir, tmp_path, LayoutConfig(tp=2), SyncConfig(), damage_a_share)
    with pytest.raises(
        AssertionError, match=r"accepted: \S+1\.mlp\.up_proj\.weight arrived damaged"
    ):
        run_ranks(2, run_engines, *arguments, deadline=300)

"""What context-parallel ranks are sent of samples: the chunks that they compute, with nothing lost,
doubled or changed."""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from batches import make_batch, spread
from ranks import run_ranks
from test_privileged_critic import samples as privileged_samples
from test_shards import rollout
from threads import on_threads

from vapo_megatron.data.balance import Cost, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import MicroBatch, Packed, Share, padded_lengths
from vapo_megatron.training.exchange import rank_and_world
from vapo_megatron.training.shards import ModelInput, ShardedBatch
from vapo_megatron.training.token_rewards import new_tokens

FIELDS = ("values", "returns", "rollout_logprobs")
EXPERTS = 2  # a token goes through


@dataclass
class Ranks:
    """A mesh of tp x cp ranks a replica, on one stage."""

    tp: int
    cp_size: int

    @property
    def dp_size(self) -> int:
        return rank_and_world()[1] // (self.tp * self.cp_size)

    @property
    def dp_rank(self) -> int:
        return self.dp_rank_of(rank_and_world()[0])

    @property
    def cp_rank(self) -> int:
        return self.cp_rank_of(rank_and_world()[0])

    def dp_rank_of(self, rank: int) -> int:
        return rank // (self.tp * self.cp_size)

    def cp_rank_of(self, rank: int) -> int:
        return rank // self.tp % self.cp_size

    def reporter(self, dp_rank: int, cp_rank: int = 0) -> int:
        return (dp_rank * self.cp_size + cp_rank) * self.tp


class Planner:
    """What ShardedBatch.model_input asks of a model."""

    shares_prompts = False

    def __init__(self, tp: int, cp: int, name: str = "actor", replays: bool = False) -> None:
        self.name = name
        self.replays = replays
        self.mesh = Ranks(tp, cp)
        self.alignment = 2 * cp if cp > 1 else 1

    def plan(
        self,
        lengths: torch.Tensor,
        samples: Any,
        segments: torch.Tensor | None = None,
        shared: None = None,
    ) -> Any:
        aligned: Any = {"alignment": self.alignment, "total_alignment": self.alignment * 3}
        return plan_microbatches(
            samples,
            lengths.numpy(),
            dp_size=self.mesh.dp_size,
            max_tokens=1200,
            cost=Cost(1.0, 0.01),
            **aligned,
        )

    def padded(self, positions: list[int]) -> list[int]:
        return padded_lengths(positions, self.alignment, self.alignment * 3)

    def packed(self, batch: ExperienceBatch, share: Share) -> Packed:
        how = (self.alignment, self.alignment * 3, self.mesh.cp_size, self.mesh.cp_rank)
        return Packed(batch, share, *how, EXPERTS * self.replays, self.name == "critic")


def with_noise(batch: ExperienceBatch) -> ExperienceBatch:
    generator = torch.Generator().manual_seed(3)
    for name in ("values", "returns"):
        setattr(batch, name, torch.randn(batch.response_tokens, generator=generator))
    return batch


def plain() -> ExperienceBatch:
    return make_batch([(3, 1), (5, 9), (1, 30), (7, 2), (2, 17), (4, 4), (2, 1)])


def with_windows() -> ExperienceBatch:
    batch = rollout()
    batch.window_starts = torch.arange(batch.samples) * batch.response_lengths // batch.samples
    return batch


def with_experts() -> ExperienceBatch:
    batch = rollout()
    positions = int((batch.lengths - 1).sum())
    batch.routed_experts = torch.arange(positions * 4).remainder(251).to(torch.uint8).view(-1, 4)
    return batch


def with_privileged() -> ExperienceBatch:
    """Some with observations or several segments."""
    return from_samples(privileged_samples())


# The batch, the model that reads it, and whether it goes through the engine's experts
KINDS: dict[str, tuple[Any, str, bool]] = {
    "plain": (plain, "actor", False),
    "observations": (rollout, "actor", False),
    "windows": (with_windows, "actor", False),
    "experts": (with_experts, "actor", True),
    "privileged": (with_privileged, "critic", False),
    "segments": (with_privileged, "actor", False),
}


def columns(micro: MicroBatch, batch: ExperienceBatch) -> dict[str, torch.Tensor]:
    """What a rank computes with, by position."""
    by_position = {"ids": micro.ids, "labels": micro.labels}
    new = new_tokens(batch)
    by_token = {name: getattr(batch, name) for name in FIELDS}
    if new is not None:
        by_token["new"] = new
    if micro.experts is not None:
        by_position["experts"] = micro.experts
    by_position["response"] = micro.response_index >= 0
    return by_position | {name: micro.gather(values) for name, values in by_token.items()}


def check_input(
    batch: ShardedBatch, whole: ExperienceBatch, model: Planner, samples: list[int]
) -> ModelInput:
    part = batch.model_input(model, samples, "values", "returns")  # type: ignore[arg-type]
    mine = [samples[place] for place in part.local_indices.tolist()]
    expected = whole.select(mine)
    share = Share(part.share.microbatches, len(samples))
    packed = model.packed(part.batch, part.share)
    assert len(packed) == len(share.microbatches)
    for found, wanted in zip(packed, model.packed(expected, share), strict=True):
        assert (found.lengths, found.owners) == (wanted.lengths, wanted.owners)
        ours, theirs = columns(found, part.batch), columns(wanted, expected)
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert torch.equal(ours[name], values), name
    return part


def passes(kind: str, tp: int, cp: int) -> None:
    make, name, replays = KINDS[kind]
    whole = with_noise(make())
    batch = spread(with_noise(make()))
    model = Planner(tp, cp, name, replays)
    everything = list(range(whole.samples))
    for samples in (everything, everything[::-2], [2]):
        part = check_input(batch, whole, model, samples)
        outputs = torch.stack((part.batch.values, part.batch.returns), 1)  # type: ignore[arg-type]
        reports = rank_and_world()[0] % tp == 0
        home = batch.return_to_owner(part, outputs if reports else outputs[:0])
        owned = batch.owned_samples(part)
        at_home = range(whole.samples)[batch.local_slice]
        expected = whole.select([sample for sample in at_home if sample in samples])
        assert torch.equal(owned.tokens, expected.tokens)
        assert torch.equal(home[:, 0], expected.values)  # type: ignore[arg-type]
        assert torch.equal(home[:, 1], expected.returns)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "tp", "cp"),
    [(2, 1, 2), pytest.param(4, 1, 4, marks=pytest.mark.full), (8, 2, 2), (9, 1, 3)],
)
def test_a_rank_computes_its_chunks_of_whole_samples(
    kind: str, ranks: int, tp: int, cp: int
) -> None:
    on_threads(ranks, passes, kind, tp, cp)


def received_bytes(tp: int, cp: int, replays: bool) -> int:
    """On one of several ranks: bytes that it is sent of an input of all samples."""
    long = with_noise(make_batch([(30, 700)] * 8))
    if replays:
        long.routed_experts = torch.zeros(len(long.tokens) - 8, 4, dtype=torch.uint8)
    batch = spread(long)
    exchanged = []
    all_to_all = dist.all_to_all_single

    def counted(output: torch.Tensor, *args: Any) -> None:
        exchanged.append(output.nbytes)
        all_to_all(output, *args)

    with patch.object(dist, "all_to_all_single", counted):
        model = Planner(tp, cp, replays=replays)
        batch.model_input(model, range(batch.samples), "values", "returns")  # type: ignore[arg-type]
    return sum(exchanged)


@pytest.mark.parametrize("replays", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_rank_is_sent_its_chunks_alone(replays: bool) -> None:
    whole = run_ranks(4, received_bytes, 4, 1, replays)
    assert len(set(whole)) == 1, "a replica's ranks get the same"
    for cp in (2, 4):
        found = run_ranks(4, received_bytes, 4 // cp, cp, replays)
        # Ranks share the response tokens out evenly, not the prompt's
        assert max(found) < 1.1 * whole[0] / cp
        assert sum(found[:: 4 // cp]) < 1.05 * whole[0], "no part of it twice"

"""Samples on several ranks, as in test_shards.py, on threads: every row goes where it is wanted and
no other does."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import spread
from test_shards import GROUPS, SIZE, check_estimates, rollout
from threads import on_threads

from vapo_megatron.data.balance import Cost, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.training.exchange import exchange, rank_and_world
from vapo_megatron.training.shards import partition_by_tokens, read_local, scatter


@dataclass
class LinedUp:
    """A mesh of so many replicas of as many ranks each: rank r is of replica r // tp, whose last
    rank reports."""

    tp: int
    cp_size = 1

    @property
    def dp_size(self) -> int:
        return rank_and_world()[1] // self.tp

    @property
    def dp_rank(self) -> int:
        return self.dp_rank_of(rank_and_world()[0])

    def dp_rank_of(self, rank: int) -> int:
        return rank // self.tp

    def reporter(self, dp_rank: int) -> int:
        return dp_rank * self.tp + self.tp - 1


class Planner:
    """What ShardedBatch.part asks of a model."""

    name = "actor"
    shares_prompts = False

    def __init__(self, tp: int, replays: bool) -> None:
        self.mesh = LinedUp(tp)
        self.replays = replays

    def plan(
        self,
        lengths: torch.Tensor,
        samples: Any,
        segments: torch.Tensor | None = None,
        shared: None = None,
    ) -> Any:
        cost = Cost(1.0, 0.01)
        return plan_microbatches(
            samples, lengths.numpy(), dp_size=self.mesh.dp_size, max_tokens=600, cost=cost
        )


def scored() -> ExperienceBatch:
    """With experts of two layers, two a token."""
    batch = rollout()
    generator = torch.Generator().manual_seed(7)
    positions = int((batch.cu_seqlens.diff() - 1).sum())
    batch.routed_experts = torch.randint(
        0, 9, (positions, 2, 2), generator=generator, dtype=torch.uint8
    )
    batch.advantages = torch.randn(batch.response_tokens, generator=generator)
    return batch


def assert_same(found: ExperienceBatch, expected: ExperienceBatch, but: set[str]) -> None:
    assert expected.tensors().keys() - found.tensors().keys() == but
    for name, tensor in found.tensors().items():
        assert (
            torch.equal(tensor, expected.tensors()[name])
            and tensor.dtype == expected.tensors()[name].dtype
        ), name


def passes(tp: int, replays: bool) -> Any:
    whole = scored()
    model = Planner(tp, replays)
    batch = spread(scored())
    rank = rank_and_world()[0]
    assert batch.samples == whole.samples and batch.response_tokens == whole.response_tokens
    assert_same(batch.local, whole.select(range(whole.samples)[batch.local_slice]), set())
    computed = []
    for samples in (range(whole.samples), [3, 4, 9, 17, 20, 27], [20, 3, 9, 27]):
        part = batch.model_input(model, samples, "values", "greedy_rewards")  # type: ignore[arg-type]
        mine = [samples[place] for place in part.local_indices.tolist()]
        unsent = {
            "old_logprobs",
            "ref_logprobs",
            "entropies",
            "advantages",
            *["routed_experts"] * (not replays),
        }
        assert_same(part.batch, whole.select(mine), unsent)
        assert torch.equal(part.global_table.lengths, whole.select(list(samples)).table().lengths)
        assert part.share.of == len(samples) and list(part.share) == list(range(len(mine)))
        plan = model.plan(part.global_table.lengths, range(len(samples)))
        assert [part.local_indices[m].tolist() for m in part.share.microbatches] == plan[
            model.mesh.dp_rank
        ]
        for other, reported in enumerate(part.output_samples):
            expected = plan.samples_of(other // tp) if other % tp == tp - 1 else []
            assert [samples[place] for place in expected] == reported.tolist()
        computed.append(mine)
        outputs = part.batch.values
        assert outputs is not None
        outputs = outputs if rank % tp == tp - 1 else torch.full_like(outputs, 99.0)
        owned = batch.owned_samples(part)
        at_home = range(whole.samples)[batch.local_slice]
        expected = whole.select([s for s in at_home if s in samples])
        assert_same(owned, expected, {"routed_experts"})
        assert torch.equal(batch.return_to_owner(part, outputs), owned.values)  # type: ignore[arg-type]
    first = batch.gather_on_rank0(5, "values", "returns")
    expected = whole.select(range(0 if rank else 5))
    assert first.keys() == {"values"} and torch.equal(first["values"], expected.values)  # type: ignore[arg-type]
    assert batch.gather_on_rank0(5, "returns") == {}
    return computed


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (3, 1), (4, 2), (9, 1)])
def test_each_rank_gets_what_it_computes_and_it_comes_home(
    ranks: int, tp: int, replays: bool
) -> None:
    found = on_threads(ranks, passes, tp, replays)
    for number, samples in enumerate((range(GROUPS * SIZE), [3, 4, 9, 17, 20, 27], [3, 9, 20, 27])):
        assert sorted(s for computed in found[::tp] for s in computed[number]) == list(samples)


def passes_of_a_probe() -> Any:
    whole = scored()
    batch = spread(scored())
    probe = Probe.__new__(Probe)
    mine = list(range(whole.samples)[batch.local_slice])
    for samples in (list(range(whole.samples)), [3, 4, 9, 17, 20, 27], [20, 3, 9, 27]):
        part = batch.model_input(probe, samples)
        at_home = [s for s in samples if s in mine]
        assert_same(part.batch, whole.select(at_home), set())
        assert (
            [samples[place] for place in part.local_indices.tolist()]
            == at_home
            == part.output_samples[rank_and_world()[0]].tolist()
        )
        assert sorted(s for reported in part.output_samples for s in reported.tolist()) == sorted(
            samples
        )
        assert part.share.of == len(samples) and part.share.microbatches == [range(len(at_home))]
        assert torch.equal(part.global_table.lengths, whole.select(samples).table().lengths)
        assert part.batch.values is not None
        returned = batch.return_to_owner(part, part.batch.values)
        assert torch.equal(returned, batch.owned_samples(part).values)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_a_probe_computes_what_is_at_home(ranks: int) -> None:
    on_threads(ranks, passes_of_a_probe)


def test_no_number_of_ranks_changes_advantages_or_metrics() -> None:
    check_estimates(on_threads, (3, 9))  # more ranks than groups: some have no sample


def moved(
    held: list[list[int]], wanted: list[list[int]], rows: list[int]
) -> list[list[list[float]]]:
    """Row r of sample s is 100 s + r; the second field has rows of two numbers of another type, one
    row a sample."""
    mine = held[rank_and_world()[0]]
    ids = [np.array(samples, dtype=np.int64) for samples in wanted]
    first = torch.tensor([100 * s + r for s in mine for r in range(rows[s])], dtype=torch.float32)
    second = torch.tensor([[s, -s] for s in mine], dtype=torch.int16).reshape(-1, 2)
    counts = {"first": torch.tensor(rows), "second": torch.ones(len(rows), dtype=torch.int64)}
    places = [np.array(samples, dtype=np.int64) for samples in held]
    found = exchange({"first": first, "second": second}, counts, places, ids)
    assert found["first"].dtype == torch.float32 and found["second"].dtype == torch.int16
    return [found["first"].tolist(), found["second"].tolist()]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ([[2, 0, 1]], [[1, 1, 2]]),
        ([[2, 0], [4, 1], [3]], [[1, 3, 0], [], [4, 2, 2, 1]]),
        ([[], [0, 1, 2, 3, 4], []], [[4], [0], [3, 1]]),
        ([[0, 1], [2, 3], [4]], [[0, 1], [2, 3], [4]]),
    ],
)
def test_a_rank_has_the_rows_that_it_wants_in_their_order(
    held: list[list[int]], wanted: list[list[int]]
) -> None:
    rows = [2, 0, 3, 1, 5]
    for found, samples in zip(
        on_threads(len(held), moved, held, wanted, rows), wanted, strict=True
    ):
        assert found[0] == [100 * s + r for s in samples for r in range(rows[s])]
        assert found[1] == [[s, -s] for s in samples]


@pytest.mark.parametrize(
    ("lengths", "ranks", "expected"),
    [
        ([10, 10, 10, 10], 2, [0, 2, 4]),
        ([10, 10, 10, 100], 2, [0, 4, 4]),
        ([40, 10, 10, 10], 3, [0, 1, 2, 4]),
    ],
)
def test_a_group_is_at_home_where_its_share_of_the_tokens_ends(
    lengths: list[int], ranks: int, expected: list[int]
) -> None:
    table: Any = SimpleNamespace(
        lengths=torch.tensor(lengths), group_ids=torch.arange(len(lengths)), samples=len(lengths)
    )
    assert partition_by_tokens(table, ranks).tolist() == expected


def homes() -> Any:
    batch = scatter(scored() if rank_and_world()[0] == 0 else None)
    batch.fill(shaped_rewards=torch.arange(float(batch.samples)), greedy_rewards=None)
    assert batch.local.greedy_rewards is None and batch.table.greedy_rewards is None
    assert batch.local.shaped_rewards is not None and batch.table.shaped_rewards is not None
    own = batch.local.shaped_rewards.tolist()
    assert (
        batch.gather_samples(batch.local.shaped_rewards[:, None]).squeeze(1).tolist()
        == batch.table.shaped_rewards.tolist()
    )
    read = read_local(
        batch.table,
        partition_by_tokens(batch.table, rank_and_world()[1]),
        lambda chosen: scored().select(chosen.tolist()),
    )
    assert (
        torch.equal(read.local.rewards, batch.local.rewards)
        and read.local_slice == batch.local_slice
    )
    return own, int(batch.sum_over_ranks(torch.tensor(len(own))))


def test_rank_zero_alone_has_to_have_the_batch() -> None:
    found = on_threads(4, homes)
    assert [s for own, _ in found for s in own] == list(range(GROUPS * SIZE))
    assert {total for _, total in found} == {GROUPS * SIZE}


def whole_only(refuse: bool) -> Any:
    batch = spread(scored())
    called = []

    def tokens(whole: ExperienceBatch) -> torch.Tensor:
        called.append(whole)
        if refuse:
            raise BadInput("no")
        assert_same(whole, scored(), set())
        lengths = whole.response_cu_seqlens.diff().repeat_interleave(whole.response_lengths).float()
        return torch.stack((lengths, -lengths), dim=1)

    def samples(whole: ExperienceBatch) -> torch.Tensor:
        return whole.rewards > 0

    by_tokens = batch.scatter_token_columns(tokens, 2)
    by_samples = batch.run_on_rank0(samples)
    lengths = batch.local.response_lengths
    assert torch.equal(by_tokens[:, 0], lengths.repeat_interleave(lengths).float())
    assert torch.equal(by_tokens[:, 1], -by_tokens[:, 0])
    assert torch.equal(by_samples, batch.table.rewards > 0)
    return len(called)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_function_of_all_tokens_is_called_once(ranks: int) -> None:
    assert on_threads(ranks, whole_only, False) == [1] + [0] * (ranks - 1)
    with pytest.raises(BadInput, match="no"):
        on_threads(ranks, whole_only, True)

"""Packing loses nothing, doubles nothing and keeps within its budget."""

import random

import pytest
import torch

from vapo_megatron.data.balance import Cost, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import (
    Packed,
    Share,
    local_positions,
    natural_order,
    pack,
    padded_lengths,
)
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput

COST = Cost(1000.0, 1.0)


def some_batch(seed: int = 0, samples: int = 7) -> ExperienceBatch:
    rng = random.Random(seed)
    rows = []
    for i in range(samples):
        prompt = Prompt(
            str(i), "", "", tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, 6)))
        )
        response = [rng.randrange(50, 99) for _ in range(rng.randint(1, 23))]
        rows.append(
            Sample(
                prompt,
                i // 2,
                i % 2,
                0,
                response,
                [-float(t) for t in response],
                "stop",
                0,
                0,
                reward=1.0,
                correct=True,
            )
        )
    return from_samples(rows)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_cp_ranks_read_every_response_token_once_with_its_label(cp: int) -> None:
    batch = some_batch()
    labels = torch.cat(
        [
            batch.tokens[batch.cu_seqlens[s] + batch.prompt_lengths[s] : batch.cu_seqlens[s + 1]]
            for s in range(batch.samples)
        ]
    )
    samples = [5, 0, 3]
    alignment = 2 * cp if cp > 1 else 1
    seen = torch.zeros(batch.response_tokens, dtype=torch.int64)
    for rank in range(cp):
        micro = pack(batch, samples, alignment, alignment * 2, cp, rank)
        index = micro.response_index[micro.response_index >= 0]
        seen[index] += 1
        assert torch.equal(micro.labels[micro.response_index >= 0], labels[index].long())
        assert torch.equal(
            micro.gather(labels.float())[micro.response_index >= 0], labels[index].float()
        )
        assert micro.gather(labels.float())[micro.response_index < 0].eq(0).all()
        assert sum(micro.lengths) % (alignment * 2) == 0
    expected = torch.zeros_like(seen)
    for s in samples:
        expected[batch.response_cu_seqlens[s] : batch.response_cu_seqlens[s + 1]] = 1
    assert torch.equal(seen, expected)


def test_what_is_read_at_positions_is_written_back_to_its_tokens() -> None:
    batch = some_batch()
    share = Share([[6, 0], [3], []], of=9)
    assert (list(share), len(share), share[0], share.of) == ([0, 3, 6], 3, 0, 9)
    packed = Packed(batch, share, 4, 8, 1, 0)
    assert len(packed) == 3 and [m.lengths for m in packed] == [
        pack(batch, members, 4, 8, 1, 0).lengths for members in share.microbatches
    ]
    values = torch.arange(batch.response_tokens, dtype=torch.float64) + 1
    found = torch.zeros_like(values)
    for micro in packed:
        at = micro.gather(values)
        assert (
            at.dtype == values.dtype
            and len(at) == len(micro.ids)
            and micro.gather(values.long()).dtype == torch.int64
        )
        assert (micro.ids.dtype, micro.labels.dtype, micro.response_index.dtype) == (
            torch.int64,
        ) * 3
        assert torch.equal(
            micro.response_rows,
            at.nonzero()[:, 0] if at.any() else torch.zeros(1, dtype=torch.int64),
        )
        micro.scatter(found, at)
    kept = torch.zeros(batch.samples, dtype=torch.bool)
    kept[list(share)] = True
    assert torch.equal(found, values * kept.repeat_interleave(batch.response_lengths))
    assert packed[2].gather(values[:0]).tolist() == [0] * 8, (
        "a rank may have no response token at all"
    )


def test_an_empty_micro_batch_is_padding_without_response_tokens() -> None:
    micro = pack(some_batch(), [], 4, 8, 2, 1)
    assert micro.lengths == (8,)
    assert micro.response_index.eq(-1).all()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_natural_order_inverts_the_zigzag_partition(cp: int) -> None:
    lengths = [8, 16, 24]
    held = torch.cat([local_positions(lengths, cp, rank) for rank in range(cp)])
    assert torch.equal(held.sort().values, torch.arange(48))
    assert torch.equal(held[natural_order(lengths, cp)], torch.arange(48))


def test_padded_lengths_align_each_sequence_and_the_sum() -> None:
    assert padded_lengths([1, 5, 8], 4, 16) == [4, 8, 20]
    assert padded_lengths([0, 1, 2], 1, 1) == [1, 1, 2]
    assert padded_lengths([], 4, 8) == [8]


@pytest.mark.parametrize(
    "dp_size,alignment,total,multiple", [(1, 1, 1, 1), (3, 4, 8, 1), (4, 1, 2, 2)]
)
def test_plans_hold_every_sample_once_within_the_budget(
    dp_size: int, alignment: int, total: int, multiple: int
) -> None:
    rng = random.Random(3)
    lengths = [min(int(rng.paretovariate(1.2) * 20), 900) for _ in range(200)]
    chosen = list(range(0, 200, 2))
    plan = plan_microbatches(
        chosen,
        lengths,
        dp_size=dp_size,
        max_tokens=1024,
        cost=COST,
        alignment=alignment,
        total_alignment=total,
        multiple_of=multiple,
    )
    assert sorted(s for rank in plan for micro in rank for s in micro) == chosen
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple == 0
    for rank in plan:
        for micro in rank:
            assert sum(padded_lengths([lengths[s] - 1 for s in micro], alignment, total)) <= 1024


def test_ranks_get_nearly_equal_work() -> None:
    rng = random.Random(4)
    lengths = [rng.randint(10, 1000) for _ in range(400)]
    plan = plan_microbatches(range(400), lengths, dp_size=8, max_tokens=4096, cost=COST)
    work = [sum(COST(lengths[s]) for micro in rank for s in micro) for rank in plan]
    assert max(work) <= 1.02 * sum(work) / len(work)


def test_a_sample_above_the_budget_is_refused_with_what_to_raise() -> None:
    with pytest.raises(BadInput, match=r"max_tokens_per_microbatch=16 is below the 39 tokens"):
        plan_microbatches([0, 1], [5, 40], dp_size=1, max_tokens=16, cost=COST)

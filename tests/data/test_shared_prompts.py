"""Samples that begin alike are packed with one prompt and planned into one micro-batch, at most one
budget large, on level ranks."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from grouped_batches import grouped_batch, grouped_samples

from vapo_megatron.data.balance import Cost, MicrobatchPlan, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import MicroBatch, pack
from vapo_megatron.data.shared_prompts import (
    plan_shared_prompts,
    prompt_numbers,
    shared_prompts,
)
from vapo_megatron.errors import BadInput

COST = Cost(1000.0, 1.0)


def packed(batch: ExperienceBatch, *, share: bool, critic: bool = False, **how: Any) -> MicroBatch:
    return pack(batch, range(batch.samples), 1, 4, 1, 0, how.get("experts", 0), critic, share)


def contexts(batch: ExperienceBatch, *, share: bool, critic: bool) -> dict[int, tuple[Any, ...]]:
    """By response token: the tokens that its position reads up to itself, its label and, from the
    beginning of its sequence, its place."""
    micro = packed(batch, share=share, critic=critic)
    starts = [0, *np.cumsum(micro.lengths).tolist()]
    found = {}
    for number, (first, end) in enumerate(pairwise(starts)):
        before = micro.ids[:0]
        if micro.prefixes is not None:
            start, length = micro.prefixes[number]
            before = micro.ids[start : start + length]
        for row in range(first, end):
            token = int(micro.response_index[row])
            if token >= 0:
                read = (*before.tolist(), *micro.ids[first : row + 1].tolist())
                owner = micro.owners[number]
                found[token] = (read, int(micro.labels[row]), owner)
    return found


@pytest.mark.parametrize("critic", [False, True])
def test_each_response_token_reads_what_it_reads_alone(critic: bool) -> None:
    batch = grouped_batch()
    shared = contexts(batch, share=True, critic=critic)
    assert shared == contexts(batch, share=False, critic=critic)
    assert sorted(shared) == list(range(batch.response_tokens))


def test_a_prompt_is_there_once_but_for_its_last_token() -> None:
    batch = grouped_batch()
    alone, shared = (packed(batch, share=share) for share in (False, True))
    # Of four samples with 9 prompt tokens one has two segments, of the others two are saved 8
    # positions each; of four with 14 tokens three are saved 13.
    saved = 2 * 8 + 3 * 13
    assert sum(alone.lengths) - sum(shared.lengths) in range(saved - 3, saved + 4)
    assert shared.prefixes is not None
    assert sorted(prefix.length for prefix in shared.prefixes) == [0] * 12 + [8] * 2 + [13] * 3
    assert alone.prefixes is None
    privileged = packed(batch, share=True, critic=True).prefixes
    assert privileged is not None
    assert sorted(prefix.length for prefix in privileged) == [0] * 9 + [2] * 3 + [12] * 2 + [16] * 3


def test_equal_lengths_of_other_tokens_share_nothing() -> None:
    samples = grouped_samples()
    last = samples[-5]
    ids = (*last.prompt.token_ids[:-1], last.prompt.token_ids[-1] ^ 1)
    samples[-5] = replace(last, prompt=replace(last.prompt, token_ids=ids))
    batch = from_samples(samples)
    assert contexts(batch, share=True, critic=False) == contexts(batch, share=False, critic=False)
    prefixes = packed(batch, share=True).prefixes
    assert prefixes is not None
    assert sorted(prefix.length for prefix in prefixes)[-3:] == [8, 13, 13]
    numbers = prompt_numbers(batch, for_critic=False).tolist()
    assert numbers[8:12] == [8, 8, 8, 11]
    assert numbers[:4] == [0, 0, 2, 0], "of two segments, each with a prompt"


def test_a_critic_that_reads_something_else_first_shares_nothing() -> None:
    samples = grouped_samples()
    other = tuple(number ^ 1 for number in samples[9].prompt.privileged_ids)
    samples[9] = replace(samples[9], prompt=replace(samples[9].prompt, privileged_ids=other))
    batch = from_samples(samples)
    assert contexts(batch, share=True, critic=True) == contexts(batch, share=False, critic=True)
    assert prompt_numbers(batch, for_critic=True).tolist()[8:12] == [8, 9, 8, 8]
    assert prompt_numbers(batch, for_critic=False).tolist()[8:12] == [8] * 4


def test_positions_go_through_the_experts_of_their_sample() -> None:
    batch = grouped_batch()
    positions = int((batch.lengths - 1).sum())
    batch.routed_experts = torch.arange(1, positions + 1).to(torch.int16)[:, None]
    shared = packed(batch, share=True, experts=1)
    assert shared.experts is not None
    chosen = packed(batch, share=False, experts=1)
    assert chosen.experts is not None
    expected = {}
    for row in (chosen.response_index >= 0).nonzero()[:, 0].tolist():
        expected[int(chosen.response_index[row])] = int(chosen.experts[row, 0])
    for row in (shared.response_index >= 0).nonzero()[:, 0].tolist():
        assert int(shared.experts[row, 0]) == expected[int(shared.response_index[row])]
    # The prompt of the first sample, which the others of its group read
    assert shared.experts[:8, 0].tolist() == list(range(1, 9))


def plan_of(batch: ExperienceBatch, **settings: Any) -> MicrobatchPlan:
    table = batch.table()
    shared = shared_prompts(prompt_numbers(batch, for_critic=False), table, for_critic=False)
    given: dict[str, Any] = {"dp_size": 1, "max_tokens": 256, "cost": COST} | settings
    return plan_shared_prompts(range(batch.samples), table.lengths.numpy(), shared, **given)


def tokens_of(batch: ExperienceBatch, members: list[int], alignment: int) -> int:
    return len(pack(batch, members, 1, alignment, 1, 0, share_prompts=True).ids)


@pytest.mark.parametrize(
    ("dp_size", "budget", "alignment", "multiple"), [(1, 96, 1, 1), (2, 300, 4, 2), (3, 64, 8, 1)]
)
def test_plans_hold_each_sample_once_within_the_budget(
    dp_size: int, budget: int, alignment: int, multiple: int
) -> None:
    prompts = [(20 + group, 0) for group in range(9)]
    batch = grouped_batch(8, prompts)
    sizes: dict[str, Any] = {"total_alignment": alignment, "multiple_of": multiple}
    plan = plan_of(batch, dp_size=dp_size, max_tokens=budget, **sizes)
    placed = [s for rank in plan for members in rank for s in members]
    assert sorted(placed) == list(range(batch.samples))
    assert [sorted(s for m in rank for s in m) for rank in plan] == [
        plan.samples_of(rank).tolist() for rank in range(dp_size)
    ]
    assert plan.microbatches % multiple == 0
    assert {len(rank) for rank in plan} == {plan.microbatches}
    fullest = max(tokens_of(batch, members, alignment) for rank in plan for members in rank)
    assert fullest <= budget


def work_of(batch: ExperienceBatch, members: list[int]) -> float:
    """Of the positions that are computed, and of what each of them attends to."""
    micro = pack(batch, members, 1, 1, 1, 0, share_prompts=True)
    prefixes = micro.prefixes or [(0, 0)] * len(micro.lengths)
    return sum(
        COST(length + before + 1) - COST(before)
        for length, (_, before) in zip(micro.lengths, prefixes, strict=True)
    )


def test_groups_stay_whole_where_ranks_are_level_with_them() -> None:
    batch = grouped_batch(8, [(60, 0)] * 32)
    plan = plan_of(batch, dp_size=2, max_tokens=2048)
    for rank in plan:
        groups = [group for members in rank for group in set(batch.group_ids[members].tolist())]
        assert len(groups) == len(set(groups)) == 16
    each = plan_microbatches(
        range(batch.samples), batch.lengths.numpy(), dp_size=2, max_tokens=2048, cost=COST
    )
    assert plan.microbatches < each.microbatches


def test_large_groups_are_split_to_keep_ranks_level() -> None:
    batch = grouped_batch(24, [(6, 0), (5, 0), (3, 0)])
    plan = plan_of(batch, dp_size=4, max_tokens=2048)
    works = [sum(work_of(batch, members) for members in rank) for rank in plan]
    assert max(works) < 1.15 * sum(works) / 4
    # Where parts repeat long prompts and gain little, they are no smaller
    batch = grouped_batch(24, [(60, 0), (20, 0), (3, 0)])
    works = [
        sum(work_of(batch, members) for members in rank)
        for rank in plan_of(batch, dp_size=4, max_tokens=2048)
    ]
    whole = [work_of(batch, list(range(first, first + 24))) for first in (0, 24, 48)]
    assert max(works) <= max(whole)


def test_a_sample_above_the_budget_is_named() -> None:
    batch = grouped_batch(4, [(60, 0)])
    with pytest.raises(BadInput, match="max_tokens_per_microbatch=64 is below the"):
        plan_of(batch, max_tokens=64)

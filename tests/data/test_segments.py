"""An episode whose history was rewritten: models read each segment alone, algorithms read one
response."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from batches import in_segments, with_observation, with_segment

from vapo_megatron.algorithms.gae import decoupled_gae
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import pack, padded_lengths, planned_lengths
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups


def episodes(seed: int, count: int = 5) -> list[Sample]:
    """Episodes of one to four segments, some with observations within them."""
    rng = random.Random(seed)
    samples = []
    for number in range(count):
        prompt = Prompt(
            str(number),
            "",
            "",
            tuple(rng.randrange(90) for _ in range(rng.randint(1, 6))),
            cursor=number,
        )
        length = rng.randint(4, 20)
        ids = [rng.randrange(90) for _ in range(length)]
        logprobs = [-rng.random() for _ in range(length)]
        sample = Sample(prompt, number, 0, 0, ids, logprobs, "stop", 0, 0, reward=1.0, correct=True)  # type: ignore[arg-type]
        sample = with_observation(sample, rng.randint(1, length - 1), rng.randint(1, 3))
        assert sample.loss_mask is not None
        written = np.flatnonzero(sample.loss_mask[:-1] & sample.loss_mask[1:]) + 1
        for after in sorted(
            rng.sample(written.tolist(), min(len(written), rng.randint(0, 3))), reverse=True
        ):
            sample = with_segment(sample, after, rng.randint(1, 5))
        samples.append(sample)
    return samples


def privileged(sample: Sample, count: int) -> Sample:
    """The sample with so many tokens that the critic alone reads."""
    return replace(
        sample, prompt=replace(sample.prompt, privileged_ids=tuple(range(100, 100 + count)))
    )


def written_out(sample: Sample) -> Sample:
    """The sample with them in its prompt."""
    prompt = sample.prompt
    return replace(
        sample,
        prompt=replace(
            prompt, token_ids=prompt.privileged_ids + prompt.token_ids, privileged_ids=()
        ),
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("alignment", "total", "cp"), [(1, 1, 1), (4, 8, 2), (8, 8, 4)])
def test_models_read_every_segment_as_a_sequence_of_its_own(
    seed: int, alignment: int, total: int, cp: int
) -> None:
    samples = episodes(seed)
    whole = from_samples(samples)
    parts = from_samples(in_segments(samples))
    assert torch.equal(whole.rollout_logprobs, parts.rollout_logprobs), (
        "their response tokens are the same"
    )
    for rank in range(cp):
        ours = pack(whole, range(whole.samples), alignment, total, cp, rank)
        theirs = pack(parts, range(parts.samples), alignment, total, cp, rank)
        assert ours.lengths == theirs.lengths
        for name in ("ids", "labels", "response_index"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("alignment", "total", "cp"), [(1, 1, 1), (8, 8, 4)])
def test_critic_reads_the_privileged_field_before_every_segment(
    seed: int, alignment: int, total: int, cp: int
) -> None:
    samples = [privileged(sample, number) for number, sample in enumerate(episodes(seed))]
    whole = from_samples(samples)
    alone = from_samples(in_segments(samples))
    parts = from_samples([written_out(part) for part in in_segments(samples)])
    table = whole.table()
    plain = from_samples(episodes(seed))
    assert table.critic_lengths.sum() == len(parts.tokens) and table.lengths.sum() == len(
        whole.tokens
    )
    planned = planned_lengths(table.critic_lengths, whole.segments, alignment)
    for rank in range(cp):
        how = (alignment, total, cp, rank)
        ours = pack(whole, range(whole.samples), *how, for_critic=True)
        theirs = pack(parts, range(parts.samples), *how)
        assert ours.lengths == theirs.lengths
        for name in ("ids", "labels", "response_index"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert pack(whole, range(whole.samples), *how).ids.equal(
            pack(alone, range(alone.samples), *how).ids
        )
        assert pack(whole, range(whole.samples), *how).ids.equal(
            pack(plain, range(plain.samples), *how).ids
        )
        for sample, length in enumerate(planned.tolist()):
            padded = sum(pack(whole, [sample], alignment, 1, cp, rank, for_critic=True).lengths)
            assert padded <= -(-max(length - 1, 1) // alignment) * alignment


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_a_micro_batch_holds_what_was_planned_for_it(seed: int, alignment: int) -> None:
    batch = from_samples(episodes(seed))
    assert planned_lengths(batch.lengths, None, alignment).equal(batch.lengths), "one segment each"
    for sample, length in enumerate(
        planned_lengths(batch.lengths, batch.segments, alignment).tolist()
    ):
        planned = -(-max(length - 1, 1) // alignment) * alignment
        bounds = batch.segment_bounds(sample)
        assert (
            sum(padded_lengths([end - first - 1 for first, end in pairwise(bounds)], alignment, 1))
            <= planned
        )


def test_advantages_go_on_from_one_segment_to_the_next() -> None:
    """The reward of the end reaches the first segment through the value of the second one's first
    state."""
    prompt = Prompt("0", "", "", (1, 2))
    sample = Sample(
        prompt, 0, 0, 0, [3, 4, 5, 6], [-1.0] * 4, "stop", 0, 0, reward=1.0, correct=True
    )  # type: ignore[arg-type]
    batch = from_samples([with_segment(sample, 2, 7)])
    assert batch.response_lengths.tolist() == [4] and batch.observation_lengths is not None
    assert (
        batch.segments is not None
        and batch.segments.tolist() == [2]
        and batch.observation_lengths.tolist() == [7]
    )
    values = torch.tensor([0.1, 0.2, 0.4, 0.8])
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    advantages, returns = decoupled_gae(
        rewards,
        values,
        batch.response_cu_seqlens,
        lam_policy=torch.zeros(1),
        lam_critic=torch.ones(1),
    )
    assert (
        advantages.tolist() == pytest.approx([0.1, 0.2, 0.4, 0.2]) and returns.tolist() == [1.0] * 4
    )


def test_segments_outlive_a_checkpoint_and_a_selection() -> None:
    samples = episodes(3)
    packed = pack_groups({s.prompt.cursor: [s] for s in samples})
    groups = unpack_groups(packed, lambda number: samples[number].prompt, lambda ids: "")
    assert [groups[s.prompt.cursor][0].segment_starts for s in samples] == [
        s.segment_starts for s in samples
    ]
    batch = from_samples(samples)
    some = batch.select([4, 1])
    assert [some.segment_bounds(0), some.segment_bounds(1)] == [
        batch.segment_bounds(4),
        batch.segment_bounds(1),
    ]
    again = ExperienceBatch(**batch.rollout_tensors())
    assert [again.segment_bounds(s) for s in range(5)] == [
        batch.segment_bounds(s) for s in range(5)
    ]
    joined = from_samples([samples[0]]).table().followed_by(batch.table())
    assert joined.segments is not None and joined.segments[1:].equal(batch.segments)  # type: ignore[arg-type]

"""Random responses as a rollout brings them, for tests that train on them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hf_models import VOCAB

from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.training.shards import ShardedBatch, scatter

LENGTHS = [(3, 1), (5, 9), (1, 30), (7, 2), (2, 17), (4, 4)]  # prompt and response tokens


def random_sequences(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids without any meaning."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = torch.randint(
        0, vocab_size, (count, length), generator=generator
    ).tolist()
    return rows


def take(source: PromptSource, count: int) -> list[Prompt]:
    """The next prompts of a source, and its cursor behind them, as a run leaves it after a step."""
    source.cursor += count
    return [source.at(cursor) for cursor in range(source.cursor - count, source.cursor)]


def make_batch(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    highest: float = -4.0,
    spread: float = 0.0,
    observed: Mapping[int, tuple[int, int]] | None = None,
) -> ExperienceBatch:
    """Groups of one response each, every second one correct and rewarded.

    Rollout log-probs lie evenly between highest and highest - spread. observed: by sample, after
    how many response tokens it is given how many tokens of an observation.
    """
    generator = torch.Generator().manual_seed(5)
    samples = []
    for group, (p, r) in enumerate(lengths):
        ids = torch.randint(0, VOCAB, (p + r,), generator=generator).tolist()
        prompt = Prompt(str(group), "", "", tuple(ids[:p]))
        correct = group % 2 == 1
        logprobs = (highest - spread * torch.rand(r, generator=generator)).tolist()
        sample = Sample(
            prompt,
            group,
            0,
            0,
            ids[p:],
            logprobs,
            "stop",
            0,
            0,
            reward=float(correct),
            correct=correct,
        )  # type: ignore[arg-type]
        samples.append(
            with_observation(sample, *observed[group]) if observed and group in observed else sample
        )
    return from_samples(samples)


def with_observation(sample: Sample, after: int, count: int) -> Sample:
    """A sample that is given `count` tokens after its first `after` ones; their log-probs are
    nobody's."""
    places = np.full(count, after)
    mask = (
        np.ones(len(sample.response_ids), dtype=bool)
        if sample.loss_mask is None
        else sample.loss_mask
    )
    return replace(
        sample,
        response_ids=np.insert(sample.response_ids, places, np.arange(count) % 7),
        rollout_logprobs=np.insert(sample.rollout_logprobs, places, -99.0),
        loss_mask=np.insert(mask, places, False),
    )


def with_segment(sample: Sample, after: int, prompt: int) -> Sample:
    """A sample whose context restarts after its first `after` tokens, with a prompt of so many
    tokens."""
    observed = with_observation(sample, after, prompt)
    return replace(
        observed,
        segment_starts=(*(s + prompt * (s >= after) for s in sample.segment_starts), after),
    )


def in_segments(samples: Sequence[Sample]) -> list[Sample]:
    """Every segment of some samples as a separate sample."""
    parts = []
    for sample in samples:
        ids = [*sample.prompt.token_ids, *sample.response_ids.tolist()]
        mask = sample.loss_mask
        assert mask is not None
        bounds = [
            0,
            *(len(sample.prompt.token_ids) + start for start in sorted(sample.segment_starts)),
            len(ids),
        ]
        written = np.concatenate([np.zeros(len(sample.prompt.token_ids), dtype=bool), mask])
        logprobs = np.concatenate(
            [np.zeros(len(sample.prompt.token_ids), np.float32), sample.rollout_logprobs]
        )
        for first, end in pairwise(bounds):
            own = int(written[first:end].argmax())  # tokens of the segment's prompt
            part = slice(first + own, end)
            prompt = replace(sample.prompt, token_ids=tuple(ids[first : first + own]))
            fields: dict[str, Any] = {"response_ids": ids[part], "rollout_logprobs": logprobs[part]}
            parts.append(
                replace(sample, prompt=prompt, **fields, loss_mask=written[part], segment_starts=())
            )
    return parts


def spread(batch: ExperienceBatch) -> ShardedBatch:
    """Collective: a batch that every rank has, each sample at home on one of them."""
    return scatter(None if dist.is_initialized() and dist.get_rank() else batch)


def whole_of(batch: ShardedBatch) -> ExperienceBatch:
    """Collective: all fields of all samples, on every rank."""
    if not dist.is_initialized():
        return batch.local
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch.local.tensors())
    names = [
        name
        for name in parts[0]
        if name not in vars(batch.table) and not name.endswith("cu_seqlens")
    ]
    return batch.table.batch(**{name: torch.cat([part[name] for part in parts]) for name in names})

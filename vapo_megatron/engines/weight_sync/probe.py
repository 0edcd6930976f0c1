"""Sequences on which trainer and engines are compared."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.data.batch import ExperienceBatch, from_samples
from vapo_megatron.data.sample import Prompt, Sample


def probe_batch(sequences: Sequence[Sequence[int]]) -> ExperienceBatch:
    """Sequences as samples whose prompt is the first token, so that every other token gets a log-prob."""
    samples = []
    for i, ids in enumerate(sequences):
        response, logprobs = np.array(ids[1:], dtype=np.int32), np.zeros(len(ids) - 1, dtype=np.float32)
        samples.append(Sample(Prompt(str(i), "", "", (ids[0],)), i, 0, 0, response, logprobs, "stop", 0, 0, reward=0.0))
    return from_samples(samples)


def split_logprobs(batch: ExperienceBatch, logprobs: Tensor) -> list[list[float]]:
    """A tensor over response tokens [T], sample by sample."""
    return [part.tolist() for part in logprobs.split(batch.response_lengths.tolist())]


def random_sequences(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Sequences to compare on before there are responses."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
    return rows


def sequences_of(batch: ExperienceBatch, count: int, length: int) -> list[list[int]]:
    """The beginnings of the first `count` samples of a rollout: what the policy really sees."""
    starts = batch.cu_seqlens[: min(count, batch.samples)].tolist()
    ends = batch.cu_seqlens[1 : 1 + len(starts)].tolist()
    return [batch.tokens[a : min(b, a + length)].tolist() for a, b in zip(starts, ends, strict=True)]

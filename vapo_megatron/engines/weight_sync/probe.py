"""Sequences on which trainer and engines are compared."""

from collections.abc import Sequence
from itertools import chain, cycle, islice

import numpy as np
from torch import Tensor

from vapo_megatron.data.batch import ExperienceBatch, from_samples
from vapo_megatron.data.prompts import PromptSource
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


def prompt_sequences(prompts: PromptSource, count: int, length: int) -> list[list[int]]:
    """Sequences to compare on before there are responses: the first prompts, one after the other.

    Real text, because on random token ids two correct bfloat16 models may differ by more than the tolerance.
    """
    tokens = chain.from_iterable(prompts.at(cursor).token_ids for cursor in cycle(range(len(prompts))))
    return [list(islice(tokens, length)) for _ in range(count)]


def sequences_of(batch: ExperienceBatch, count: int, length: int) -> list[list[int]]:
    """The beginnings of the first `count` samples of a rollout: what the policy really sees."""
    starts = batch.cu_seqlens[: min(count, batch.samples)].tolist()
    ends = batch.cu_seqlens[1 : 1 + len(starts)].tolist()
    return [batch.tokens[a : min(b, a + length)].tolist() for a, b in zip(starts, ends, strict=True)]

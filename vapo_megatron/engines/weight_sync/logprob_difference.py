"""The difference between log-probs of engine and trainer, and its limits.

In float32 both agree to 1e-4, and the largest difference is judged. In bfloat16 and FP8 a rare
token of small probability may differ by much with correct weights, so a quantile and the mean are
judged: wrong weights move these much more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.config.rollout import SyncConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample

Precision = Literal["float32", "bfloat16", "fp8"]

_QUANTILES = {"float32": 1.0, "bfloat16": 0.95, "fp8": 0.95}
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.5, "fp8": 1.0}
# The limit of the mean, in units of the tolerance.
_MEAN_SHARES = {"float32": 1.0, "bfloat16": 0.2, "fp8": 0.3}

# Rounding does not make the mean difference exceed this multiple of the first warning's, in this
# many consecutive weight syncs.
_GROWTH = 3.0
_SYNCS = 3

# Size of a probe, in sequences and tokens of each.
_SEQUENCES = 4
_LENGTH = 32


class LogprobDifference(NamedTuple):
    """|engine - trainer| over the tokens of a probe, in nats: the largest, a quantile, the mean.

    NaN counts as infinite.
    """

    largest: float
    quantile: float
    mean: float

    @staticmethod
    def worst(differences: Sequence["LogprobDifference"]) -> "LogprobDifference":
        """The largest value of each field; zeros without any."""
        return LogprobDifference(*map(max, zip((0.0, 0.0, 0.0), *differences, strict=True)))


@dataclass(frozen=True)
class Limits:
    """Limits of the differences at a quantile and on average, in nats.

    Attributes:
        share: the quantile, in (0, 1].
        quantile: limit at that quantile.
        mean: limit of the mean.
        are_estimates: whether these are defaults, which correct kernels may exceed, and not set in
            the config.
    """

    share: float
    quantile: float
    mean: float
    are_estimates: bool = False

    def excess(self, difference: LogprobDifference) -> str | None:
        """Which limit is exceeded, in words; None if none is."""
        largest, quantile, mean = difference
        # Written as "not <=" so that NaN exceeds every limit.
        if not quantile <= self.quantile:
            place = f"at the {self.share:g} quantile (at most {largest:.3g})"
            if self.share == 1:
                place = "at most"
            return f"by {quantile:.3g} {place}, rollout.sync.tolerance allows {self.quantile:g}"
        if not mean <= self.mean:
            return f"by {mean:.3g} on average, rollout.sync.tolerance allows {self.mean:g}"
        return None


class DifferenceTrend:
    """Whether differences beyond an estimated limit grow from sync to sync while every tensor is
    equal."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._grown = 0

    def growth(self, mean: float, allowed: float) -> str | None:
        """Add a sync's mean difference.

        Args:
            mean: 0 if no limit is exceeded.
            allowed: the limit of means.

        Returns:
            How much the differences grew, in words, if rounding cannot explain it; otherwise None.
        """
        self._first = self._first or mean or None
        if mean > max(_GROWTH * (self._first or 0.0), allowed):
            self._grown += 1
        else:
            self._grown = 0
        if self._grown < _SYNCS:
            return None
        return (
            f"by {mean:.3g} on average, by {self._first:.3g} at the first warning, "
            f"and above {_GROWTH:g} times that for {self._grown} weight syncs"
        )


def limits_for(config: SyncConfig, precision: Precision) -> Limits:
    """Limits if the coarser of trainer and engine computes in this precision."""
    tolerance = config.tolerance or _TOLERANCES[precision]
    are_estimates = precision != "float32" and config.tolerance is None
    return Limits(
        _QUANTILES[precision], tolerance, _MEAN_SHARES[precision] * tolerance, are_estimates
    )


def compare_logprobs(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], quantile: float
) -> LogprobDifference:
    """Compares two sets of log-probs of the same sequences.

    Args:
        ours: log-probs of each sequence's tokens.
        theirs: the same by the engine.
        quantile: in (0, 1], not interpolated.
    """
    pairs = [pair for rows in zip(ours, theirs, strict=True) for pair in zip(*rows, strict=True)]
    differences = torch.tensor([a - b for a, b in pairs], dtype=torch.float64)
    distances = differences.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return LogprobDifference(
        largest=float(distances.max()),
        quantile=float(distances.quantile(quantile, interpolation="higher")),
        mean=float(distances.mean()),
    )


def probe_batch(sequences: Sequence[Sequence[int]]) -> ExperienceBatch:
    """Sequences as samples whose prompt is the first token: every later token gets a log-prob."""
    samples = []
    for i, ids in enumerate(sequences):
        samples.append(
            Sample(
                prompt=Prompt(str(i), "", "", (ids[0],)),
                group=i,
                index=0,
                seed=0,
                response_ids=np.array(ids[1:], dtype=np.int32),
                rollout_logprobs=np.zeros(len(ids) - 1, dtype=np.float32),
                finish_reason="stop",
                weight_version_oldest=0,
                weight_version=0,
                reward=0.0,
            )
        )
    return from_samples(samples)


def split_logprobs(batch: ExperienceBatch, logprobs: Tensor) -> list[list[float]]:
    """Splits a tensor over response tokens [T] by sample."""
    return [part.tolist() for part in logprobs.split(batch.response_lengths.tolist())]


def prompt_sequences(prompts: PromptSource) -> list[list[int]]:
    """Sequences of a probe before there are responses: the first prompts, concatenated.

    They are real text: on random token ids two correct bfloat16 models may differ by more than the
    tolerance.
    """
    tokens = chain.from_iterable(
        prompts.at(cursor).token_ids for cursor in cycle(range(len(prompts)))
    )
    return [list(islice(tokens, _LENGTH)) for _ in range(_SEQUENCES)]


def sequences_of(batch: ExperienceBatch) -> list[list[int]]:
    """Sequences of a probe from a rollout: the beginnings of its first samples."""
    starts = batch.cu_seqlens[: min(_SEQUENCES, batch.samples)].tolist()
    ends = batch.cu_seqlens[1 : 1 + len(starts)].tolist()
    return [
        batch.tokens[start : min(end, start + _LENGTH)].tolist()
        for start, end in zip(starts, ends, strict=True)
    ]

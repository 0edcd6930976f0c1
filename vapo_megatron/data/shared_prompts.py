"""Prompts that several samples of a micro-batch share and compute once: which samples begin alike,
and plans that keep them together.

A sequence of n tokens has n - 1 positions, of which a prompt of p tokens makes up the first p - 1:
its last token is read where the first response token is predicted. Of samples that begin alike, a
micro-batch has these positions once (data/microbatch.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.data.balance import (
    Cost,
    MicrobatchPlan,
    least_first,
    level_plan,
    token_budget,
)
from vapo_megatron.data.batch import ExperienceBatch, SampleTable

# Samples that begin alike are kept whole, or split into parts of at most so many times the work of
# a rank: smaller parts level ranks, larger ones have fewer copies of the prompt.
_PARTS_OF_RANK = (math.inf, 1 / 2, 1 / 4, 1 / 8)
# Smaller parts are worth it where the rank with most work then has less by this.
_WORTH_IT = 0.02


@dataclass(frozen=True)
class SharedPrompts:
    """Which samples begin alike.

    Attributes:
        numbers: int64 [S], equal for samples that begin with the same tokens.
        positions: int64 [S], the positions that such samples share.
    """

    numbers: Tensor
    positions: Tensor


def first_tokens(batch: ExperienceBatch, sample: int, for_critic: bool) -> Tensor:
    """A sample's prompt, for a critic after its privileged tokens: int32."""
    start = int(batch.cu_seqlens[sample])
    prompt = batch.tokens[start : start + int(batch.prompt_lengths[sample])]
    if not for_critic or batch.privileged_tokens is None:
        return prompt
    begin, end = batch.bounds("privileged")[sample : sample + 2].tolist()
    return torch.cat((batch.privileged_tokens[begin:end], prompt))


def prompt_numbers(batch: ExperienceBatch, for_critic: bool) -> Tensor:
    """For each sample the first one of its group with the same first_tokens, int64 [S].

    A sample of several segments has its own number: each segment has a prompt.
    """
    seen: dict[tuple[int, bytes], int] = {}
    numbers = []
    for sample, group in enumerate(batch.group_ids.tolist()):
        number = sample
        if len(batch.segment_bounds(sample)) == 2:
            tokens = first_tokens(batch, sample, for_critic).numpy().tobytes()
            number = seen.setdefault((group, tokens), sample)
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.int64)


def shared_prompts(numbers: Tensor, table: SampleTable, for_critic: bool) -> SharedPrompts:
    """numbers: int64 [S], as of prompt_numbers; table: of the same samples."""
    prompts = table.prompt_lengths
    if for_critic:
        prompts = prompts + table.rows("privileged")
    return SharedPrompts(numbers, (prompts - 1).clamp(min=0))


def plan_shared_prompts(
    samples: Sequence[int],
    lengths: NDArray[np.int64],
    shared: SharedPrompts,
    *,
    dp_size: int,
    max_tokens: int,
    cost: Cost,
    total_alignment: int = 1,
    multiple_of: int = 1,
) -> MicrobatchPlan:
    """As plan_microbatches, with samples that begin alike in one micro-batch as far as balance over
    ranks and the budget allow. Sequences are not padded."""
    chosen = np.asarray(samples, dtype=np.int64)
    bundles = _Bundles(chosen, lengths[chosen], shared, cost)
    budget = token_budget(bundles.own_tokens + bundles.positions, max_tokens, total_alignment)
    best: MicrobatchPlan | None = None
    for part in _PARTS_OF_RANK if dp_size > 1 else _PARTS_OF_RANK[:1]:
        parts = bundles.parts(part * bundles.work / dp_size, budget)
        plan = level_plan(
            partial(bundles.samples_at, parts),
            np.array([bundles.work_of(members) for members in parts]),
            np.array([bundles.tokens_of(members) for members in parts], dtype=np.int64),
            dp_size=dp_size,
            budget=budget,
            multiple_of=multiple_of,
        )
        if best is None or plan.heaviest < (1 - _WORTH_IT) * best.heaviest:
            best = plan
    assert best is not None
    return best


class _Bundles:
    """Samples that begin alike: members are places in the arrays below.

    Attributes:
        positions: int64 [n], what each shares with those that begin like it.
        own_tokens: int64 [n], what it has without them.
        work: of all, each prompt computed once.
    """

    def __init__(
        self,
        samples: NDArray[np.int64],
        lengths: NDArray[np.int64],
        shared: SharedPrompts,
        cost: Cost,
    ) -> None:
        """samples, lengths: int64 [n]; shared: of all samples by number."""
        self._samples = samples
        self.positions = shared.positions.numpy()[samples]
        self.own_tokens = np.maximum(lengths - 1 - self.positions, 1)
        self._prompt_work = cost(self.positions.astype(np.float64))
        self._own_work = cost(lengths.astype(np.float64)) - self._prompt_work
        places: dict[int, list[int]] = {}
        for place, number in enumerate(shared.numbers.numpy()[samples].tolist()):
            places.setdefault(number, []).append(place)
        self._alike = [np.array(members) for members in places.values()]
        self.work = sum(map(self.work_of, self._alike))

    def work_of(self, members: NDArray[np.int64]) -> float:
        """With their prompt once."""
        return float(self._prompt_work[members[0]] + self._own_work[members].sum())

    def tokens_of(self, members: NDArray[np.int64]) -> int:
        """With their prompt once."""
        return int(self.positions[members[0]] + self.own_tokens[members].sum())

    def samples_at(
        self, parts: Sequence[NDArray[np.int64]], places: list[int]
    ) -> NDArray[np.int64]:
        """The samples of the parts at some places."""
        if not places:
            return self._samples[:0]
        return self._samples[np.concatenate([parts[place] for place in places])]

    def parts(self, most_work: float, budget: int) -> list[NDArray[np.int64]]:
        """Samples that begin alike, in as few parts as have at most so much work and tokens each,
        or in single ones."""
        return [part for members in self._alike for part in self._split(members, most_work, budget)]

    def _split(
        self, members: NDArray[np.int64], most_work: float, budget: int
    ) -> list[NDArray[np.int64]]:
        by_work = math.ceil(self.work_of(members) / most_work)
        by_tokens = math.ceil(self.tokens_of(members) / budget)
        for count in range(max(1, by_work, by_tokens), len(members)):
            bins = least_first(members.tolist(), self._own_work, count)
            parts = [np.array(places) for places in bins]
            if all(self.work_of(p) <= most_work and self.tokens_of(p) <= budget for p in parts):
                return parts
        return [members[place : place + 1] for place in range(len(members))]

"""Which data-parallel rank computes which samples, in which micro-batch."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from vapo_megatron.errors import BadInput


@dataclass(frozen=True)
class Cost:
    """Work of a sequence of n tokens: linear * n + quadratic * n^2, in any one unit."""

    linear: float
    quadratic: float

    def __call__(self, n: int) -> float:
        """The work of n tokens."""
        return self.linear * n + self.quadratic * n * n


def _spread(items: Sequence[tuple[float, int, int]], bins: int, budget: int | None) -> list[list[int]] | None:
    """Longest first, each into the bin with least work that has room; items are (work, tokens, sample).

    None where some item found no room.
    """
    room = [budget if budget is not None else 0] * bins
    members: list[list[int]] = [[] for _ in range(bins)]
    by_work = [(0.0, b) for b in range(bins)]
    for cost, tokens, sample in items:
        full = []
        while by_work and budget is not None and room[by_work[0][1]] < tokens:
            full.append(heapq.heappop(by_work))
        if not by_work:
            return None
        work, best = by_work[0]
        heapq.heapreplace(by_work, (work + cost, best))
        room[best] -= tokens
        members[best].append(sample)
        for entry in full:
            heapq.heappush(by_work, entry)
    return members


def plan_microbatches(
    samples: Sequence[int],
    lengths: Sequence[int],
    *,
    dp_size: int,
    max_tokens: int,
    cost: Cost,
    alignment: int = 1,
    total_alignment: int = 1,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Balance samples over data-parallel ranks and micro-batches.

    Args:
        samples: indices to distribute.
        lengths: tokens of each sample of the batch, by index.
        dp_size: data-parallel ranks.
        max_tokens: most padded tokens of a micro-batch.
        cost: the work of a sequence.
        alignment, total_alignment: padding of a sequence and of a micro-batch, see LayoutConfig.
        multiple_of: the number of micro-batches is a multiple of this (interleaved pipelines).

    Returns:
        [dp rank][micro-batch] -> samples, in ascending order. Every rank has the same number of micro-batches; some
        may be empty.

    Raises:
        BadInput: a single sample is longer than max_tokens.
    """

    def padded(sample: int) -> int:
        return -(-max(lengths[sample] - 1, 1) // alignment) * alignment

    budget = max_tokens - (total_alignment - alignment)
    items = sorted(((cost(lengths[s]), padded(s), s) for s in samples), key=lambda item: (-item[0], item[2]))
    longest = max((tokens for _, tokens, _ in items), default=0)
    if longest > budget:
        raise BadInput(
            f"max_tokens_per_microbatch={max_tokens} is below the {longest + total_alignment - alignment} tokens of "
            "the longest sample, padding included: raise it, or shorten the samples"
        )
    by_sample = {item[2]: item for item in items}
    ranks = _spread(items, dp_size, None)
    assert ranks is not None
    held = [[by_sample[s] for s in members] for members in ranks]
    count = max(1, max(-(-sum(tokens for _, tokens, _ in rank) // budget) for rank in held))
    count = -(-count // multiple_of) * multiple_of
    plans = [_spread(rank, count, budget) for rank in held]
    while any(plan is None for plan in plans):
        # Bins have to be equally many on all ranks; a plan that held in fewer is made anew once, at the end.
        count += multiple_of
        plans = [_spread(rank, count, budget) if plan is None else plan for rank, plan in zip(held, plans, strict=True)]
    final = [
        plan if plan is not None and len(plan) == count else _spread(rank, count, budget)
        for rank, plan in zip(held, plans, strict=True)
    ]
    return [[sorted(members) for members in plan] for plan in final if plan is not None]

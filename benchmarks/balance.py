"""Plans of micro-batches for a heavy-tailed batch, against the largest-differencing method, in one
run.

    python -m benchmarks.balance [--samples 8192] [--ranks 64] [--budget 32768] [--json FILE]

The peer is Karmarkar and Karp's largest-differencing method, which verl and slime balance with:
samples over ranks, then each rank's samples over micro-batches. It knows no budget: "LDM" has as
many micro-batches as the fullest rank's tokens need and may exceed the budget, "LDM within budget"
as many more as it takes to keep it. Columns:

    worst rank      work of the rank with most, over the mean of all ranks, minus 1
    lock step       sum over micro-batches of the slowest rank's work, over the mean, minus 1: what
                    ranks lose that wait for each other in every micro-batch (expert parallelism)
    uneven          a rank's largest micro-batch over its mean one, minus 1, mean over ranks: what a
    pipeline loses unfilled        room of the budget in which no token is
    padding         padded positions beyond real ones
    fullest         tokens of the fullest micro-batch; above the budget a job may run out of memory
    seconds         median, until one rank has its micro-batches: ours shares all samples out and
                    packs that rank's alone, the peer's packs those of all, as its ranks do
    growth          of our seconds with the samples (to eight times as many, over eight times the
    ranks): 1 is linear
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.common import (
    SHAPES,
    growth,
    heavy_tailed_lengths,
    in_turns,
    parser,
    publish,
    ratio_figure,
)
from vapo_megatron.data.balance import Cost, plan_microbatches

Plan = list[list[list[int]]]


def largest_differencing(work: Sequence[float], bins: int) -> list[list[int]]:
    """Indices of `work` over bins: the partitions whose sums differ most are joined first, largest
    with smallest (Karmarkar and Karp, 1982; Michiels, Korst and Aarts, 2003, for more than two
    bins)."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, amount in enumerate(work):
        empty: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(bins - 1)]
        heap.append((-amount, index, [(amount, [index]), *empty]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, order, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, p + q) for (a, p), (b, q) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
    return [members for _, members in heap[0][2]] if heap else [[] for _ in range(bins)]


def peer_plan(
    lengths: Sequence[int], ranks: int, budget: int, cost: Cost, within_budget: bool
) -> Plan:
    """[rank][micro-batch] -> samples, by largest differencing."""
    work = [cost(n) for n in lengths]
    held = largest_differencing(work, ranks)
    count = max(-(-sum(lengths[s] - 1 for s in members) // budget) for members in held)
    while True:
        plan = [
            [
                [members[i] for i in part]
                for part in largest_differencing([work[s] for s in members], count)
            ]
            for members in held
        ]
        if not within_budget or fullest(plan, lengths) <= budget:
            return plan
        count += 1


def positions(samples: Sequence[int], lengths: Sequence[int], alignment: int = 1) -> int:
    """Positions of a micro-batch: a sample of n tokens has n - 1, padded to the alignment."""
    return sum(-(-(lengths[s] - 1) // alignment) * alignment for s in samples)


def fullest(plan: Plan, lengths: Sequence[int], alignment: int = 1) -> int:
    """Positions of the fullest micro-batch of a plan."""
    return max(positions(micro, lengths, alignment) for rank in plan for micro in rank)


def quality(
    plan: Plan, lengths: Sequence[int], cost: Cost, budget: int, alignment: int = 1
) -> dict[str, float]:
    """How good a plan is, see the columns above."""
    work = np.array([[sum(cost(lengths[s]) for s in micro) for micro in rank] for rank in plan])
    ranks = work.sum(1)
    real = sum(positions(micro, lengths) for rank in plan for micro in rank)
    padded = sum(positions(micro, lengths, alignment) for rank in plan for micro in rank)
    return {
        "micro-batches": len(plan[0]),
        "worst rank": float(ranks.max() / ranks.mean() - 1),
        "lock step": float(work.max(0).sum() / ranks.mean() - 1),
        "uneven": float((work.max(1) / work.mean(1)).mean() - 1),
        "unfilled": 1 - padded / (work.size * budget),
        "padding": padded / real - 1,
        "fullest": fullest(plan, lengths, alignment),
    }


def main() -> None:
    """Print a table for two shapes of model."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=8192)
    arguments.add_argument("--ranks", type=int, default=64)
    arguments.add_argument("--mean", type=float, default=6000)
    arguments.add_argument("--longest", type=int, default=20000)
    arguments.add_argument("--budget", type=int, default=32768)
    arguments.add_argument("--alignment", type=int, default=16, help="of a sequence; 16 is CP=8")
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    lengths = heavy_tailed_lengths(given.samples, given.mean, given.longest)
    rows, figures = [], []
    for shape in ("1.5b", "7b"):
        spec = SHAPES[shape].spec()
        cost = Cost(float(spec.parameter_count()), float(spec.attention_width))

        def ours(factor: int = 1, cost: Cost = cost) -> Sequence[list[list[int]]]:
            many = lengths * factor
            sizes = {
                "dp_size": given.ranks * factor,
                "max_tokens": given.budget,
                "alignment": given.alignment,
            }
            plans = plan_microbatches(range(len(many)), many, cost=cost, **sizes)
            plans[0]
            return plans

        def peer(within_budget: bool, cost: Cost = cost) -> Plan:
            return peer_plan(lengths, given.ranks, given.budget, cost, within_budget)

        methods: dict[str, Callable[[], Sequence[list[list[int]]]]] = {
            "ours": ours,
            "LDM": partial(peer, False),
            "LDM within budget": partial(peer, True),
        }
        seconds = in_turns(list(methods.values()), given.repeats)
        alignments = {"ours": given.alignment}
        for (name, method), took in zip(methods.items(), seconds, strict=True):
            found = quality(list(method()), lengths, cost, given.budget, alignments.get(name, 1))
            rows.append(
                {
                    "model": shape,
                    "method": name,
                    "seconds": float(np.median(took)),
                    **found,
                    "growth": "",
                }
            )
        factors = (1, 2, 4, 8)
        more = [float(np.median(in_turns([partial(ours, factor)], 1)[0])) for factor in factors]
        rows[-3]["growth"] = growth(factors, more)
        figures.append(
            ratio_figure(f"{shape}, LDM within budget over our planner", seconds[2], seconds[0])
        )
    title = f"{given.samples} samples over {given.ranks} ranks, budget {given.budget} tokens"
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()

"""What a batch costs the ranks of a machine: bytes per token on each, and seconds until all have
their part.

    python -m benchmarks.batch_copies [--ranks 2 4] [--cp 1 2 4] [--tokens 4000000] [--length 6000]
                                      [--json FILE]

Ranks are processes of this machine, of which rank 0 has the rollout; each trains a part of the
samples (data-parallel) or, of its replica's samples, a part of the tokens (context-parallel, cp
ranks a replica). "a copy a rank" sends every tensor to every rank, which keeps it, as most trainers
do; "shards" is what the trainer does (training/shards.py): a sample has one home rank, and a rank
is sent what it computes. Tokens, the engine's log-probs and per-sample fields are sent. Scoring and
advantages then add these fields: old log-probs, entropies, values, advantages, returns and
importance weights, four bytes per response token each. "shards" also counts the fields of the first
mini-batch in eight that a rank is sent to train on. Memory is the growth of a process's
proportional set size. `copies` is that growth over all ranks, in units of the batch;
`mini-batch copies` is what all ranks have of the mini-batch, in units of the mini-batch. It takes a
minute; a whole rollout of 512 x 16 x 20,000 tokens is --tokens 168000000 --length 20000 --ranks 2
(minutes, 20 GB).
"""

import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import (
    Planner,
    heavy_tailed_lengths,
    over_ranks,
    parser,
    publish,
    sample_batch,
)
from vapo_megatron.collectives import broadcast_value
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.training.shards import scatter

FILLED_IN = ("old_logprobs", "entropies", "values", "advantages", "returns", "importance_weights")
MINIBATCHES = 8
TOKEN_BYTES = 4 + 4 + 4 * len(FILLED_IN)


def proportional_bytes() -> int:
    """The proportional set size of this process."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def a_copy_a_rank(batch: ExperienceBatch | None) -> ExperienceBatch:
    """Collective: rank 0's batch, sent to each rank and held by each."""
    sent = None if batch is None else batch.tensors()
    shapes = broadcast_value(
        None if sent is None else {n: (t.shape, t.dtype) for n, t in sent.items()}
    )
    held = sent or {
        name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()
    }
    for tensor in held.values():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)
    return ExperienceBatch(**held)


def measure(way: str, cp: int, tokens: int, length: int) -> dict[str, Any]:
    """Collective: seconds, and bytes by which the ranks' memory has grown once all of them hold
    their part."""
    planner = Planner(dist.get_world_size() // cp, max_tokens=4 * length + 16, cp_size=cp)
    scatter(make(1000, 100) if dist.get_rank() == 0 else None)  # what is set up once
    torch.zeros(1 << 20)
    dist.barrier()
    before = proportional_bytes()
    dist.barrier()
    rollout = make(tokens, length) if dist.get_rank() == 0 else None
    dist.barrier()
    start = time.perf_counter()
    held: Any
    if way == "shards":
        shards = scatter(rollout)
        del rollout
        dist.barrier()
        seconds, own = time.perf_counter() - start, shards.local
        whole = shards.response_tokens + shards.samples
    else:
        own = a_copy_a_rank(rollout)
        del rollout
        dist.barrier()
        seconds, whole = time.perf_counter() - start, len(own.tokens)
    for name in FILLED_IN:
        setattr(own, name, torch.ones(own.response_tokens))
    if way == "shards":
        chosen = range(0, shards.samples, MINIBATCHES)
        held = shards.model_input(planner, chosen, *FILLED_IN)  # type: ignore[arg-type]
        minibatch = held.batch
        trained = int(shards.table.lengths[::MINIBATCHES].sum())
    else:
        minibatch = held = own.select(range(0, own.samples, MINIBATCHES))
        trained = int(minibatch.lengths.sum())
    sent = torch.tensor(sum(tensor.nbytes for tensor in minibatch.tensors().values()))
    dist.all_reduce(sent)
    for tensor in own.tensors().values():
        tensor.sum()  # its pages are there
    dist.barrier()
    grown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(grown, proportional_bytes() - before)
    del held
    return {
        "ranks": len(grown),
        "cp": cp,
        "way": way,
        "bytes per token and rank": sum(grown) / len(grown) / whole,
        "copies": sum(grown) / whole / TOKEN_BYTES,
        "mini-batch copies": int(sent) / trained / TOKEN_BYTES,
        "s to have it": seconds,
    }


def make(tokens: int, length: int) -> ExperienceBatch:
    """Responses of so many tokens in all."""
    return sample_batch(
        heavy_tailed_lengths(max(1, tokens // length), length, 4 * length), vocab=1000
    )


def main() -> None:
    """A row for each number of ranks and way."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--tokens", type=int, default=4_000_000)
    arguments.add_argument("--length", type=int, default=6000, help="mean tokens of a sample")
    arguments.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4])
    given = arguments.parse_args()
    rows = [
        over_ranks(ranks, measure, way, cp, given.tokens, given.length)
        for ranks in given.ranks
        for way, cp in (("a copy a rank", 1), *(("shards", cp) for cp in given.cp))
        if ranks % cp == 0
    ]
    publish(f"a batch of {given.tokens:,} tokens", rows, given.json)


if __name__ == "__main__":
    main()

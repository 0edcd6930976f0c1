"""What a batch costs the ranks of a machine: bytes per token on each, and seconds until all have it.

    python -m benchmarks.batch_copies [--ranks 2 4] [--tokens 4000000] [--length 6000] [--json FILE]

Ranks are processes of this machine, of which rank 0 has the rollout. "a copy a rank" sends every tensor to every rank,
which keeps it, as most trainers do; "once a machine" is what the trainer does (training/broadcast.py). To what is sent
(tokens, log-probs of the engine and what goes by samples) come the fields that scoring and advantages fill in: old
log-probs, entropies, values, advantages, returns and importance weights, four bytes per response token each. Memory is
the growth of a process's proportional set size: a page that four ranks have mapped counts a quarter for each. `copies a
machine` is that of all ranks together, in units of the batch.
"""

import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import heavy_tailed_lengths, over_ranks, parser, publish, sample_batch
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.training.broadcast import broadcast_batch, broadcast_value, share_fields

FILLED_IN = ("old_logprobs", "entropies", "values", "advantages", "returns", "importance_weights")


def proportional_bytes() -> int:
    """The proportional set size of this process."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def a_copy_a_rank(batch: ExperienceBatch | None) -> ExperienceBatch:
    """Collective: rank 0's batch, sent to each rank and held by each."""
    sent = None if batch is None else batch.tensors()
    shapes = broadcast_value(None if sent is None else {n: (t.shape, t.dtype) for n, t in sent.items()})
    held = sent or {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    for tensor in held.values():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)
    return ExperienceBatch(**held)


def measure(way: str, tokens: int, length: int) -> dict[str, Any]:
    """Collective: seconds, and bytes by which the ranks' memory has grown once all of them hold all fields."""
    once = way == "once a machine"
    broadcast_batch(make(1000, 100) if dist.get_rank() == 0 else None)  # what is set up once
    torch.zeros(1 << 20)
    dist.barrier()
    before = proportional_bytes()
    dist.barrier()
    sent = make(tokens, length) if dist.get_rank() == 0 else None
    dist.barrier()
    start = time.perf_counter()
    batch = broadcast_batch(sent) if once else a_copy_a_rank(sent)
    del sent
    dist.barrier()
    seconds = time.perf_counter() - start
    for name in FILLED_IN:
        setattr(batch, name, torch.ones(batch.response_tokens))
    if once:
        share_fields(batch, *FILLED_IN)
    for tensor in batch.tensors().values():
        tensor.sum()  # every rank reads all of it, and so has its pages
    dist.barrier()
    grown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(grown, proportional_bytes() - before)
    size = sum(tensor.nbytes for tensor in batch.tensors().values())
    return {
        "ranks": len(grown),
        "way": way,
        "bytes per token and rank": sum(grown) / len(grown) / len(batch.tokens),
        "copies a machine": sum(grown) / size,
        "s to have it": seconds,
    }


def make(tokens: int, length: int) -> ExperienceBatch:
    """Responses of so many tokens in all."""
    return sample_batch(heavy_tailed_lengths(max(1, tokens // length), length, 4 * length), vocab=1000)


def main() -> None:
    """A row for each number of ranks and way."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--tokens", type=int, default=4_000_000)
    arguments.add_argument("--length", type=int, default=6000, help="mean tokens of a sample")
    given = arguments.parse_args()
    rows = [
        over_ranks(ranks, measure, way, given.tokens, given.length)
        for ranks in given.ranks
        for way in ("a copy a rank", "once a machine")
    ]
    publish(f"a batch of {given.tokens:,} tokens", rows, given.json)


if __name__ == "__main__":
    main()

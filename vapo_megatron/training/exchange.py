"""Moving samples' rows between ranks: each rank sends what others want of what it holds, all at once."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.data.batch import offsets, stretches

Samples = NDArray[np.int64]


def seat() -> tuple[int, int]:
    """This rank and the number of ranks; 0 and 1 where there are no others."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def exchange(
    fields: Mapping[str, Tensor], rows: Mapping[str, Tensor], held: Sequence[Samples], wanted: Sequence[Samples]
) -> dict[str, Tensor]:
    """Collective: the rows of the samples that this rank wants, in that order.

    From host memory to host memory, over the CPU's backend: the GPUs may belong to the engines.

    Args:
        fields: [rows, ...] of the samples that this rank holds; of one dtype and row shape on all ranks.
        rows: int64 [S], how many rows of each field a sample has, of all S samples by number.
        held: the samples of each rank in the order in which its fields have them; no sample is held twice.
        wanted: the samples that each rank wants; some rank holds each.
    """
    rank, ranks = seat()
    holder, place = np.full((2, len(next(iter(rows.values())))), -1, dtype=np.int64)
    for other, samples in enumerate(held):
        holder[samples], place[samples] = other, np.arange(len(samples))
    sends = [place[samples[holder[samples] == rank]] for samples in wanted]
    bounds = {name: offsets(rows[name][torch.from_numpy(held[rank])]) for name in fields}
    messages = [
        [stretches(field, bounds[name], torch.from_numpy(places)) for name, field in fields.items()] for places in sends
    ]
    if ranks == 1:
        return dict(zip(fields, messages[0], strict=True))
    row_bytes = {name: field[:0].new_empty(1, *field.shape[1:]).nbytes for name, field in fields.items()}
    order = np.argsort(holder[wanted[rank]], kind="stable")
    arrived = torch.from_numpy(wanted[rank][order])
    comes = arrived.split(np.bincount(holder[wanted[rank]], minlength=ranks).tolist())
    sizes = [[int(rows[name][s].sum()) * row_bytes[name] for name in fields] for s in comes]
    sent = torch.cat([_bytes(part) for message in messages for part in message])
    received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8)
    dist.all_to_all_single(
        received, sent, [sum(of_rank) for of_rank in sizes], [sum(part.nbytes for part in m) for m in messages]
    )
    del sent
    parts = received.split([size for of_rank in sizes for size in of_rank])
    found = {}
    for number, (name, field) in enumerate(fields.items()):
        joined = torch.cat(parts[number :: len(fields)]).view(field.dtype).view(-1, *field.shape[1:])
        found[name] = stretches(joined, offsets(rows[name][arrived]), torch.from_numpy(np.argsort(order)))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

"""The all-to-all that carries fields of samples between ranks."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.data.batch import offsets, stretches

Samples = NDArray[np.int64]

NO_SAMPLES: Samples = np.zeros(0, dtype=np.int64)


def rank_and_world() -> tuple[int, int]:
    """This rank and the number of ranks; 0 and 1 without torch.distributed."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def exchange(
    fields: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    held: Sequence[Samples],
    wanted: Sequence[Samples],
) -> dict[str, Tensor]:
    """Collective (all-to-all): the rows of the samples that this rank wants, in that order.

    From host memory to host memory, over the CPU's backend: the GPUs may belong to the engines.

    Args:
        fields: [rows, ...] of the samples that this rank holds; the same dtype and row shape on all
            ranks.
        rows: int64 [S], the number of rows that each of all S samples has in each field.
        held: by rank, the samples that it holds, in the order of its fields; no sample is held
            twice.
        wanted: by rank, the samples that it wants; some rank holds each.
    """
    rank, world = rank_and_world()
    samples_in_all = len(next(iter(rows.values())))
    holder = np.full(samples_in_all, -1, dtype=np.int64)
    place = np.full(samples_in_all, -1, dtype=np.int64)
    for sender, samples in enumerate(held):
        holder[samples] = sender
        place[samples] = np.arange(len(samples))

    leaving = [samples[holder[samples] == rank] for samples in wanted]
    places = torch.from_numpy(place[np.concatenate(leaving)])
    own_samples = torch.from_numpy(held[rank])
    blocks = {
        name: stretches(field, offsets(rows[name][own_samples]), places)
        for name, field in fields.items()
    }
    if world == 1:
        return blocks

    row_bytes = {
        name: field[:0].new_empty(1, *field.shape[1:]).nbytes for name, field in fields.items()
    }
    order = np.argsort(holder[wanted[rank]], kind="stable")
    arriving = wanted[rank][order]
    senders = np.bincount(holder[wanted[rank]], minlength=world)
    sent_sizes = _message_sizes(rows, row_bytes, np.concatenate(leaving), [*map(len, leaving)])
    received_sizes = _message_sizes(rows, row_bytes, arriving, senders)
    # A message has its fields one after the other. Whole fields are cut at once: a Python loop over
    # 1,024 ranks times a dozen fields costs seconds a step.
    pieces = [
        _bytes(blocks[name]).split(sent_sizes[:, number].tolist())
        for number, name in enumerate(fields)
    ]
    sent = torch.cat([piece for message in zip(*pieces, strict=True) for piece in message])
    del blocks, pieces
    received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        received, sent, received_sizes.sum(1).tolist(), sent_sizes.sum(1).tolist()
    )
    del sent

    parts = received.split(received_sizes.ravel().tolist())
    wanted_order = torch.from_numpy(np.argsort(order))
    arriving_samples = torch.from_numpy(arriving)
    results = {}
    for number, (name, field) in enumerate(fields.items()):
        joined = torch.cat(parts[number :: len(fields)])
        joined = joined.view(field.dtype).view(-1, *field.shape[1:])
        results[name] = stretches(joined, offsets(rows[name][arriving_samples]), wanted_order)
    return results


def _message_sizes(
    rows: Mapping[str, Tensor],
    row_bytes: Mapping[str, int],
    samples: Samples,
    by_rank: Sequence[int] | Samples,
) -> Samples:
    """Bytes that each rank's message has of each field: int64 [ranks, fields].

    samples: of all messages, one rank's after the other's; by_rank: how many each rank has.
    """
    ends = np.cumsum(np.concatenate(([0], by_rank)), dtype=np.int64)
    sizes = np.empty((len(ends) - 1, len(row_bytes)), dtype=np.int64)
    for number, (name, width) in enumerate(row_bytes.items()):
        total = np.concatenate(([0], np.cumsum(rows[name].numpy()[samples])))
        sizes[:, number] = np.diff(total[ends]) * width
    return sizes


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

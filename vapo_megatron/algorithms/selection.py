"""Which responses carry loss, and in which mini-batch."""

import zlib
from typing import Literal

import torch
from torch import Tensor

Unit = Literal["samples", "groups"]


def informative_groups(correct: Tensor, group_ids: Tensor) -> Tensor:
    """Responses of groups with 0 < #correct < G: what dynamic sampling keeps (DAPO, arXiv
    2503.14476, eq. 11).

    correct bool [S], group_ids int64 [S] -> bool [S].
    """
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    hits = torch.zeros_like(sizes).index_add_(0, index, correct.to(sizes.dtype))
    return ((hits > 0) & (hits < sizes))[index]


def frac_zero_std_groups(rewards: Tensor, group_ids: Tensor) -> float:
    """Share of groups whose rewards are all equal, which teach a group-relative estimator nothing.

    rewards float32 [S], group_ids int64 [S].
    """
    groups = int(group_ids.max()) + 1
    low = torch.full((groups,), torch.inf).scatter_reduce(0, group_ids, rewards, "amin")
    high = torch.full((groups,), -torch.inf).scatter_reduce(0, group_ids, rewards, "amax")
    present = high >= low
    return float((low == high)[present].float().mean())


def positive_responses(correct: Tensor, truncated: Tensor) -> Tensor:
    """Responses that the language-model loss imitates (VAPO, section 4.3): correct ones that are
    not truncated. bool [S], bool [S] -> bool [S]."""
    return correct & ~truncated


def loss_mask(truncated: Tensor, drop_truncated: bool, *chosen: Tensor | None) -> Tensor:
    """Responses that carry loss: all of them, less the truncated ones under overlong filtering
    (DAPO, section 3.4), less those that any of `chosen` (a user's filter, RAFT's best of a group)
    leaves out.

    truncated bool [S], chosen bool [S] or None -> bool [S].
    """
    if drop_truncated:
        kept = ~truncated
    else:
        kept = torch.ones_like(truncated)
    for choice in chosen:
        if choice is not None:
            kept = kept & choice
    return kept


def minibatch_seed(step_seed: str, salt: int, epoch: int) -> int:
    """Seed of the order of mini-batches, from the step's seed, the model (salt) and the pass over
    the rollout."""
    return zlib.crc32(f"{step_seed}/{salt}/{epoch}".encode())


def split_minibatches(group_ids: Tensor, size: int, unit: Unit, seed: int) -> list[Tensor]:
    """Cut a batch into mini-batches of `size` samples, or of `size` whole groups, in an order
    shuffled by `seed`.

    Args:
        group_ids: int64 [S].
        size: at least 1; the last mini-batch may be smaller.
        unit: whether samples or whole groups are shuffled and counted.
        seed: the order depends only on it and on the number of units.

    Returns:
        int64 indices into [S] on the device of group_ids; every response is in exactly one
        mini-batch, and indices ascend within each.
    """
    if unit == "samples":
        owner = torch.arange(group_ids.numel(), device=group_ids.device)
        units = group_ids.numel()
    else:
        numbers, owner = torch.unique(group_ids, return_inverse=True)
        units = numbers.numel()
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed)).to(
        group_ids.device
    )
    rank = torch.empty_like(order)
    rank[order] = torch.arange(units, device=order.device)
    batch_of = rank[owner] // size
    return [(batch_of == batch).nonzero().squeeze(1) for batch in range(-(-units // size))]

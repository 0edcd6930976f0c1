"""Where the tokens of packed sequences lie under zig-zag context parallelism.

Every sequence (padded to a multiple of 2 * cp) is cut in 2 * cp chunks; rank r holds chunks r and 2 * cp - 1 - r, so
that causal attention costs every rank the same.
"""

import torch
from torch import Tensor


def local_positions(lengths: list[int], cp: int, rank: int) -> Tensor:
    """Positions in natural packed order that a CP rank holds, in the order in which it holds them. int64 [T / cp]."""
    if cp == 1:
        return torch.arange(sum(lengths))
    parts, offset = [], 0
    for n in lengths:
        chunk = n // (2 * cp)
        parts.append(torch.arange(offset + rank * chunk, offset + (rank + 1) * chunk))
        parts.append(torch.arange(offset + n - (rank + 1) * chunk, offset + n - rank * chunk))
        offset += n
    return torch.cat(parts)


def natural_order(lengths: list[int], cp: int) -> Tensor:
    """Index i such that gathered[i] is in natural packed order; gathered is the ranks' tokens, rank by rank. [T]."""
    held = torch.cat([local_positions(lengths, cp, rank) for rank in range(cp)])
    return held.argsort()

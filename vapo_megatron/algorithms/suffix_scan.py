"""Discounted suffix sums of packed responses, y_t = x_t + a y_{t+1}, with a decay `a` for each
response.

The recurrence is cut into chunks of K tokens. Inside a chunk it is a product with the triangular
matrix a^(j - i), all powers of which are at most 1, so that nothing overflows and a = 0 is exact.
The first sums of the chunks form a sequence K times shorter that obeys the same recurrence with
decay a^K: it is scanned in the same way, and the sum of the next chunk is carried into this one.
Work and memory are linear in tokens, the depth is log_K of the longest response, and sums are built
as a tree, so that rounding grows with that depth and not with the length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 16
LONGEST_TILE = 1024


def suffix_scan_(
    x: Tensor, lengths: Tensor, decays: Sequence[Tensor], of: Tensor | None
) -> list[Tensor]:
    """Scan each response from its last token to its first, once for every decay.

    Args:
        x: contiguous [T] floating point, S responses end to end; overwritten with the last result.
        lengths: int64 [S], which sum to T.
        decays: one or more vectors float64 [S] with entries in [0, 1].
        of: int64, the lengths of all responses, if these are only a part of them. How sums are cut
            depends on these lengths alone, so that a response has the same sums to the bit in any
            part. None: these are all.

    Returns:
        For each decay, y [T] with y_t = x_t + decay[s] * y_{t+1} in response s and y_{t+1} = 0
        after its end. Same dtype as x.
    """
    tokens = int(lengths.sum())
    total = lengths if of is None else of
    # A tile is a row of tokens that share one response and so one matrix. Long tiles save matrices,
    # short ones save padding: an eighth of the mean length, or half a chunk.
    mean_length = int(total.sum()) // max(1, total.numel())
    tile = CHUNK
    while tile < LONGEST_TILE and 8 * tile <= mean_length:
        tile *= 2
    tiles = (lengths + (tile - 1)) // tile
    padding = tiles * tile - lengths
    padded = tokens + int(padding.sum())
    slots = (padding.cumsum(0) - padding).repeat_interleave(lengths, output_size=tokens)
    slots += torch.arange(tokens, device=x.device)
    source, work = x.new_zeros((2, padded), dtype=_matmul_dtype(x.dtype))
    source.index_copy_(0, slots, x.to(source.dtype))
    rows = _Rows(tiles, padded // tile, (total + (tile - 1)) // tile)
    scans = [torch.empty_like(x) for _ in decays[1:]] + [x]
    for decay, scan in zip(decays, scans, strict=True):
        rows.scan(source.view(-1, tile), decay, work.view(-1, tile))
        torch.index_select(work.to(x.dtype), 0, slots, out=scan)
    return scans


class _Rows:
    """Responses padded to whole rows: response s has counts[s] of the N rows, one after another.

    of: the counts of all responses, of which these are a part.
    """

    def __init__(self, counts: Tensor, rows: int, of: Tensor) -> None:
        self.counts = counts
        self.of = of
        self.owner = torch.arange(counts.numel(), device=counts.device).repeat_interleave(
            counts, output_size=rows
        )
        self.last = counts[counts > 0].cumsum(0) - 1

    def scan(self, x: Tensor, decay: Tensor, out: Tensor) -> Tensor:
        """Scan x [N, width], width a power of two, with a decay for each response [S], into out [N,
        width]."""
        rows, width = x.shape
        if width == 1:
            out.copy_(x)
            if rows > self.last.numel():
                suffix_scan_(out.view(-1), self.counts, [decay], self.of)
            return out
        size = min(width, CHUNK)
        # Powers come from float64: in float32 the rounding of the decay would be raised to the
        # power as well.
        falling = decay[:, None] ** torch.arange(size, -1, -1, device=x.device)
        falling = falling.to(x.dtype)
        chunks = x.view(rows, width // size, size), out.view(rows, width // size, size)
        torch.bmm(chunks[0], _triangular(falling[:, 1:]).index_select(0, self.owner), out=chunks[1])
        heads = chunks[1][:, :, 0].contiguous()
        carry = self._following(self.scan(heads, decay**size, torch.empty_like(heads)))
        chunks[1].addcmul_(carry.unsqueeze(2), falling.index_select(0, self.owner)[:, None, :-1])
        return out

    def _following(self, x: Tensor) -> Tensor:
        """The entry after each entry of x [N, chunks], 0 at the end of a response."""
        following = x.flatten().roll(-1).view(x.shape)
        following[self.last, -1] = 0
        return following


def _triangular(falling: Tensor) -> Tensor:
    """Powers a^(K-1) .. a^0 [S, K] -> matrices M [S, K, K] with M[j, i] = a^(j - i) where j >= i,
    else 0."""
    size = falling.shape[1]
    padded = torch.nn.functional.pad(falling, (0, size - 1))
    return padded.unfold(1, size, 1).flip(1)


def _matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the process lets float32 products be rounded to TF32 or
    bfloat16."""
    settings = {
        backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)
    }
    return torch.promote_types(
        dtype, torch.float32 if settings <= {"none", "ieee"} else torch.float64
    )

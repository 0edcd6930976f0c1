"""Discounted suffix sums of packed responses, y_t = x_t + a y_{t+1}, with a decay `a` for each response.

The recurrence is cut into chunks of K tokens. Inside a chunk it is a product with the triangular matrix
a^(j - i), all powers of which are at most 1, so that nothing overflows and a = 0 is exact. The first sums
of the chunks form a sequence K times shorter that obeys the same recurrence with decay a^K: it is scanned
by the same function, and what it says of the next chunk is carried into this one. Work and memory are
linear in tokens, the depth is log_K of the longest response, and sums are built as a tree, so that
rounding grows with that depth and not with the length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 16
MAX_CHUNKS_PER_TILE = 64
COPY_FROM_LENGTH = 1024


def suffix_scan(x: Tensor, lengths: Tensor, decays: Sequence[Tensor]) -> list[Tensor]:
    """Scan each response from its last token to its first, once for every decay.

    Args:
        x: [T] floating point, S responses end to end.
        lengths: int64 [S], which sum to T.
        decays: vectors float64 [S] with entries in [0, 1].

    Returns:
        For each decay, y [T] with y_t = x_t + decay[s] * y_{t+1} in response s and y_{t+1} = 0 after its end.
        dtype that of x.
    """
    mean_length = x.numel() // max(1, lengths.numel())
    # A tile is a row of chunks that share one response and so one matrix. Long tiles save matrices, short
    # ones save padding, which is an eighth of the mean length or half a chunk.
    chunks = min(MAX_CHUNKS_PER_TILE, max(1, mean_length // (4 * CHUNK)))
    tiles = (lengths + (chunks * CHUNK - 1)) // (chunks * CHUNK)
    padding = tiles * (chunks * CHUNK) - lengths
    # Few long runs are quicker to copy, many short ones to index.
    layout = _Copied(lengths, padding) if mean_length >= COPY_FROM_LENGTH else _Indexed(lengths, padding)
    filled = layout.pad(x.to(_matmul_dtype(x.dtype))).view(-1, chunks, CHUNK)
    return [layout.unpad(_scan_tiles(filled, tiles, decay).view(-1)).to(x.dtype) for decay in decays]


def _scan_tiles(x: Tensor, tiles: Tensor, decay: Tensor) -> Tensor:
    """Scan responses that are padded to whole tiles: x [N, chunks, K], response s in tiles[s] of the N rows."""
    rows, chunks, _ = x.shape
    # Powers come from float64: in float32 the rounding of the decay would be raised to the power as well.
    falling = decay[:, None] ** torch.arange(CHUNK, -1, -1, device=x.device, dtype=torch.float64)
    falling = falling.to(x.dtype)
    owner = torch.arange(tiles.numel(), device=x.device).repeat_interleave(tiles, output_size=rows)
    y = torch.bmm(x, _triangular(falling[:, 1:])[owner])
    if rows * chunks > int(tiles.count_nonzero()):
        (scanned,) = suffix_scan(y[:, :, 0].flatten(), tiles * chunks, [decay**CHUNK])
        carry = torch.cat([scanned[1:], scanned.new_zeros(1)])
        carry[tiles[tiles > 0].cumsum(0) * chunks - 1] = 0
        y.addcmul_(carry.view(rows, chunks, 1), falling[owner, None, :-1])
    return y


def _triangular(falling: Tensor) -> Tensor:
    """Powers a^(K-1) .. a^0 [S, K] -> matrices M [S, K, K] with M[j, i] = a^(j - i) where j >= i, else 0."""
    padded = torch.nn.functional.pad(falling, (0, CHUNK - 1))
    return padded.unfold(1, CHUNK, 1).flip(1)


class _Copied:
    """Room for padding after each response, by copying one response after another."""

    def __init__(self, lengths: Tensor, padding: Tensor) -> None:
        self.sizes = torch.stack([lengths, padding], dim=1).flatten().tolist()

    def pad(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(max(self.sizes[1::2]))
        pieces: list[Tensor] = []
        for response, padding in zip(x.split(self.sizes[::2]), self.sizes[1::2], strict=True):
            pieces += (response, zeros[:padding])
        return torch.cat(pieces)

    def unpad(self, y: Tensor) -> Tensor:
        return torch.cat(y.split(self.sizes)[::2])


class _Indexed:
    """Room for padding after each response, by the place of every token."""

    def __init__(self, lengths: Tensor, padding: Tensor) -> None:
        ends = lengths.cumsum(0)
        tokens = int(ends[-1]) if ends.numel() else 0
        self.slots = (padding.cumsum(0) - padding).repeat_interleave(lengths, output_size=tokens)
        self.slots += torch.arange(tokens, device=lengths.device)
        self.total = tokens + int(padding.sum())

    def pad(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.total).index_copy_(0, self.slots, x)

    def unpad(self, y: Tensor) -> Tensor:
        return y.index_select(0, self.slots)


def _matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 where the process lets float32 products be rounded to TF32 or bfloat16."""
    settings = {backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)}
    return torch.promote_types(dtype, torch.float32 if settings <= {"none", "ieee"} else torch.float64)

"""Suffix sums whose decay differs from token to token: y_t = x_t + a_t y_{t+1}.

The recurrence is cut into chunks of K tokens, which are scanned side by side in K steps together with the products of
their decays. The first sums of the chunks obey the same recurrence with those products for decays: a sequence K times
shorter, scanned in the same way, says what comes into each chunk. Work and memory are linear in tokens.
"""

import torch
from torch import Tensor

CHUNK = 16


def varying_suffix_scan(x: Tensor, decays: Tensor) -> Tensor:
    """Scan x from its last token to its first.

    Args:
        x: [T] floating point, finite.
        decays: [T], at least 0 and finite, dtype of x; 0 on the last token of each response keeps responses apart.

    Returns:
        y [T] with y_t = x_t + decays_t * y_{t+1} and y_T = 0. What overflows stays at the largest finite number, so
        that no response spoils another.
    """
    if x.numel() <= CHUNK:
        return _scan_rows(x[None], decays[None])[0][0]
    chunks = -(-x.numel() // CHUNK)
    padding = chunks * CHUNK - x.numel()
    rows = [torch.nn.functional.pad(part, (0, padding)).view(chunks, CHUNK) for part in (x, decays)]
    sums, products = _scan_rows(*rows)
    following = varying_suffix_scan(sums[:, 0].contiguous(), products[:, 0].contiguous())
    carry = torch.nn.functional.pad(following[1:], (0, 1))
    return _finite(sums.addcmul_(products, carry[:, None])).reshape(-1)[: x.numel()]


def _scan_rows(x: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
    """Scan each row of x [N, K], nothing following it; also the products of decays from each token to the row's end."""
    # Steps go over rows: K contiguous vectors of N.
    sums, products = (part.t().clone(memory_format=torch.contiguous_format) for part in (x, decays))
    for step in range(sums.shape[0] - 2, -1, -1):
        # Step + 1 holds its own sum and product by now.
        _finite(sums[step].addcmul_(products[step], sums[step + 1]))
        _finite(products[step].mul_(products[step + 1]))
    return sums.t(), products.t()


def _finite(x: Tensor) -> Tensor:
    most = torch.finfo(x.dtype).max
    return x.clamp_(-most, most)

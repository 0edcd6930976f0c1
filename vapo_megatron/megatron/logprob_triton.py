"""Passes over a chunk of logits as Triton kernels: one read of the logits forward; one read, and
one write of the gradient, backward.

Arguments and results are as in logprob_torch.py. Importing this module imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words that a program takes at a time, at most.
_BLOCK = 4096


def statistics(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """As logprob_torch.statistics, which leaves the logits as they are here."""
    rows, words = logits.shape
    found = logits.new_empty(4, rows)
    _statistics_kernel[(rows,)](
        logits,
        labels.contiguous(),
        found,
        1.0 / temperature,
        rows,
        words,
        logits.stride(0),
        BLOCK=_block(words),
        num_warps=8,
    )
    return found


def gradient(
    logits: Tensor,
    top: Tensor | None,
    labels: Tensor,
    temperature: float,
    partition: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As logprob_torch.gradient; top makes no difference."""
    rows, words = logits.shape
    result = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    block = _block(words)
    _gradient_kernel[(rows, triton.cdiv(words, block))](
        logits,
        labels.contiguous(),
        partition.contiguous(),
        entropy.contiguous(),
        of_logprob.contiguous(),
        # Not read where there is no entropy term.
        (of_logprob if of_entropy is None else of_entropy).contiguous(),
        result,
        1.0 / temperature,
        words,
        logits.stride(0),
        result.stride(0),
        HAS_ENTROPY=of_entropy is not None,
        BLOCK=block,
        num_warps=8,
    )
    return result


def _block(words: int) -> int:
    """Words at a time, a power of two as Triton needs."""
    return int(min(_BLOCK, triton.next_power_of_2(words)))


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits, labels, found, scale, rows, words, stride, BLOCK: tl.constexpr
):
    """One program a row: the online softmax, with the sum of p (x - top) beside the sum of p.

    When top grows by d, a term e^(x - top) (x - top) becomes e^-d (e^(x - top) (x - top) - d
    e^(x - top)).
    """
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    # Finite, so that the first step multiplies sums of 0 by a finite distance.
    top = -3.0e38
    total = 0.0
    weighted = 0.0
    for first in range(0, words, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_word = columns < words
        x = tl.load(start + columns, mask=is_word, other=-float("inf")) * scale
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = top - new_top
        shrink = tl.exp(shift)
        p = tl.exp(x - new_top)
        weighted = shrink * (weighted + shift * total) + tl.sum(
            tl.where(is_word, p * (x - new_top), 0.0), 0
        )
        total = shrink * total + tl.sum(p, 0)
        top = new_top
    label = tl.load(labels + row)
    is_here = (label >= 0) & (label < words)
    label_logit = tl.load(start + label, mask=is_here, other=0.0) * scale
    tl.store(found + row, top)
    tl.store(found + rows + row, total)
    tl.store(found + 2 * rows + row, weighted)
    tl.store(found + 3 * rows + row, label_logit)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    labels,
    partition,
    entropy,
    of_logprob,
    of_entropy,
    result,
    scale,
    words,
    stride,
    result_stride,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and block of words. It may write where it reads."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = columns < words
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=is_word, other=0.0)
    log_p = x * scale - tl.load(partition + row)
    weight = tl.load(of_logprob + row)
    factor = weight
    if HAS_ENTROPY:
        factor += tl.load(of_entropy + row) * (log_p + tl.load(entropy + row))
    grad = tl.where(columns == tl.load(labels + row), weight, 0.0) - tl.exp(log_p) * factor
    tl.store(
        result + row.to(tl.int64) * result_stride + columns,
        (grad * scale).to(result.dtype.element_ty),
        mask=is_word,
    )

"""Log-probs and entropy of the output layer without whole logits."""

import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.config.model import LogProbKernel
from vapo_megatron.megatron import logprob_torch

# Rows of a weight's gradient that a product makes in fp32 at a time, where it cannot add to a sum.
_CAST_ROWS = 4096
# exp of it is 0 in fp32: stands for the distance to the top of a rank without words.
_FAR_BELOW = -1e4


class LogProbs(torch.autograd.Function):
    """log p(label) and entropy of softmax(h W^T / temperature), with W cut along the vocabulary
    over a group.

    Forward and backward hold fp32 logits of at most `chunk` rows, in one buffer. The last chunk's
    logits are kept from forward to backward, which begins with them; the other chunks' are
    recomputed and, with the log-partition of each row, need no collective.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        real: int,
        temperature: float,
        group: Any,
        chunk: int,
        kernel: LogProbKernel = "torch",
    ) -> tuple[Tensor, Tensor]:
        """Collective over the group, which holds the vocabulary in order, equally many rows on each
        rank.

        Args:
            h: hidden states [t, width], the same on all ranks; their gradient is this rank's part
                of a sum.
            weight: [w, width], this rank's rows of the output layer.
            labels: int64 [t].
            real: words over all ranks; rows beyond are padding.
            chunk: rows of logits held at once, in fp32.
            kernel: which code passes over the logits.

        Returns:
            Both float32 [t], the same on all ranks.
        """
        first = group.rank() * weight.shape[0]
        local_labels = labels - first
        states = _operand(h)
        words = _operand(weight[: max(real - first, 0)])
        logits = _buffer(states, words, chunk)
        columns = [logits.new_empty(3, 0)]
        top = logits.new_empty(0)
        for start in range(0, len(h), chunk):
            part = slice(start, start + chunk)
            found = _statistics(
                _logits(states[part], words, logits), local_labels[part], temperature, kernel
            )
            top = found[0]
            columns.append(_outputs(found, group))
        logprob, entropy, partition = torch.cat(columns, -1)
        ctx.save_for_backward(h, weight, local_labels, entropy, partition)
        # Not among the saved tensors, which all live until the end of backward.
        ctx.kept = (logits, top) if any(ctx.needs_input_grad) else None
        ctx.rest = len(words), temperature, chunk, kernel
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = grads
        h, weight, labels, entropy, partition = ctx.saved_tensors
        real, temperature, chunk, kernel = ctx.rest
        states, words = _operand(h), _operand(weight[:real])
        # Most losses have no entropy term, whose gradient would cost more.
        through_entropy = bool(grad_entropy.count_nonzero())
        grad_h = torch.zeros_like(states)
        # Nobody asks for it where the head is frozen.
        size = weight.shape if ctx.needs_input_grad[1] else (0, weight.shape[1])
        grad_weight = torch.zeros(size, dtype=torch.float32, device=weight.device)
        logits, top = ctx.kept or (_buffer(states, words, chunk), None)
        ctx.kept = None
        for start in reversed(range(0, len(h) if real else 0, chunk)):
            part = slice(start, start + chunk)
            if top is None:
                _logits(states[part], words, logits)
            grad = _passes(kernel).gradient(
                logits[: len(states[part])],
                top,
                labels[part],
                temperature,
                partition[part],
                entropy[part],
                grad_logprob[part],
                grad_entropy[part] if through_entropy else None,
                states.dtype,
            )
            torch.mm(grad, words, out=grad_h[part])
            if len(grad_weight):
                _add_product(grad_weight[:real], grad.t(), states[part])
            del grad  # else it lives on beside the next chunk's
            top = None
        of_weight = grad_weight.to(weight.dtype) if len(grad_weight) else None
        return grad_h.to(h.dtype), of_weight, None, None, None, None, None, None


def _passes(kernel: LogProbKernel) -> ModuleType:
    """The module with `statistics` and `gradient`."""
    if kernel == "triton":
        from vapo_megatron.megatron import logprob_triton

        return logprob_triton
    return logprob_torch


def _statistics(
    logits: Tensor, labels: Tensor, temperature: float, kernel: LogProbKernel
) -> Tensor:
    """This rank's statistics [4, rows] (logprob_torch.statistics) of its logits [rows, words]."""
    if logits.shape[1]:
        found: Tensor = _passes(kernel).statistics(logits, labels, temperature)
        return found
    # A rank of padding alone has no word: it adds nothing to any sum.
    found = logits.new_zeros(4, len(logits))
    found[0] = float("-inf")
    return found


def _outputs(found: Tensor, group: Any) -> Tensor:
    """Collective: log p(label), entropy and log-partition [3, rows] from each rank's statistics
    [4, rows]."""
    top, total, weighted, label_logit = found
    if group.size() > 1:
        top = top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shift = (found[0] - top).clamp_min(_FAR_BELOW)
        shrink = shift.exp()
        sums = torch.stack((shrink * total, shrink * (weighted + shift * total), label_logit))
        dist.all_reduce(sums, group=group)
        total, weighted, label_logit = sums
    log_total = total.log()
    return torch.stack(
        (label_logit - top - log_total, log_total - weighted / total, log_total + top)
    )


def _operand(matrix: Tensor) -> Tensor:
    """A matrix as products take it. A CPU multiplies in fp32: it has no products of narrow types
    with sums in fp32, and without AMX or AVX-512 narrow products are a hundred times slower."""
    return matrix if matrix.is_cuda else matrix.float()


def _buffer(states: Tensor, words: Tensor, chunk: int) -> Tensor:
    """Room for a chunk's logits, float32 [rows, words]: one for all chunks, since the first touch
    of fresh memory takes a CPU as long as a softmax."""
    rows = min(chunk, len(states))
    return torch.empty(rows, len(words), dtype=torch.float32, device=states.device)


def _logits(states: Tensor, words: Tensor, buffer: Tensor) -> Tensor:
    """The logits of a chunk [rows, words], accumulated in fp32, in the first rows of the buffer."""
    out = buffer[: len(states)]
    if states.dtype == out.dtype:
        return torch.mm(states, words.t(), out=out)
    if _writes_narrow_products(out.device):
        return torch.mm(states, words.t(), out_dtype=torch.float32, out=out)
    return out.copy_(torch.mm(states, words.t(), out_dtype=torch.float32))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in fp32 whatever the type of a and b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _adds_narrow_products(total.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        for rows, into in zip(a.split(_CAST_ROWS), total.split(_CAST_ROWS), strict=True):
            into += torch.mm(rows, b, out_dtype=torch.float32)


@functools.cache
def _writes_narrow_products(device: torch.device) -> bool:
    """Whether a product of bfloat16 matrices can be added to existing fp32 memory."""
    product = torch.zeros(16, 16, device=device)
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=product)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(product, torch.full_like(product, 16.0))


@functools.cache
def _adds_narrow_products(device: torch.device) -> bool:
    """Whether a product of bfloat16 matrices can be added to an fp32 sum in place: older torch
    refuses the sum's type."""
    total = torch.full((16, 16), 2.0**-12, device=device)
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    expected = total + 16  # not a bfloat16 number
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(total, expected)

"""Passes over a chunk of logits in plain torch, in blocks that stay in a core's cache on a CPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of logits in a block.
_BLOCK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 26}
_TINY = torch.finfo(torch.float32).tiny


def statistics(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """What log-probs and entropies are made of, for x = logits / temperature.

    Args:
        logits: float32 [rows, words], at least one word. They become exp(x - top), from which
            `gradient` starts.
        labels: int64 [rows], index of each row's label; outside 0..words-1 if another rank has it.

    Returns:
        float32 [4, rows]: the largest x of each row (top), sum of exp(x - top), sum of
        exp(x - top) (x - top), and the label's x (0 if another rank has it).
    """
    found = logits.new_empty(4, len(logits))
    index, is_here = _in_shard(labels, logits.shape[1])
    label_logits = logits.gather(1, index[:, None])[:, 0] / temperature
    found[3] = label_logits.where(is_here, 0.0)
    for block in _blocks(logits):
        x = logits[block]
        if temperature != 1.0:
            x.div_(temperature)
        torch.amax(x, -1, out=found[0, block])
        below_top = x - found[0, block, None]
        torch.exp(below_top, out=x)
        torch.sum(x, -1, out=found[1, block])
        torch.sum(below_top.mul_(x), -1, out=found[2, block])
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
    """Gradient of the logits, which it may overwrite.

    d log p(label) / d x = [label] - p and d entropy / d x = -p (log p + entropy).

    Args:
        logits: float32 [rows, words].
        top: float32 [rows], as `statistics` returned it if it has gone over these logits; None if
            they are fresh from the product.
        labels, temperature: as in `statistics`.
        partition, entropy: float32 [rows], over all ranks' words.
        of_logprob, of_entropy: float32 [rows], gradients of a row's outputs; None if the loss has
            no entropy term.
        dtype: of the result.

    Returns:
        [rows, words].
    """
    of_logprob = of_logprob / temperature
    of_entropy = None if of_entropy is None else of_entropy / temperature
    same = logits.dtype == dtype
    result = logits if same else torch.empty_like(logits, dtype=dtype)
    index, is_here = _in_shard(labels, logits.shape[1])
    of_label = of_logprob * is_here
    for block in _blocks(logits):
        x = logits[block]
        if top is None:
            if temperature != 1.0:
                x.div_(temperature)
            p = x.sub_(partition[block, None]).exp_()
            share = torch.ones_like(partition[block])
        else:
            p = x
            share = (top[block] - partition[block]).exp()
        if of_entropy is None:
            p.mul_((-of_logprob[block] * share)[:, None])
        else:
            p.mul_(share[:, None])
            # A p of 0 adds nothing; its logarithm would make it NaN.
            log_p = p.clamp_min(_TINY).log_()
            constant = of_logprob[block] + of_entropy[block] * entropy[block]
            p.mul_(log_p.mul_(-of_entropy[block, None]).sub_(constant[:, None]))
        x.scatter_add_(1, index[block, None], of_label[block, None])
        if not same:
            result[block] = x
    return result


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows of logits [rows, words]."""
    row_bytes = logits.element_size() * max(1, logits.shape[1])
    rows = max(1, _BLOCK_BYTES[logits.device.type] // row_bytes)
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _in_shard(labels: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Indices that exist in a shard of so many words, and which of them are the labels."""
    return labels.clamp(0, words - 1), (labels >= 0) & (labels < words)

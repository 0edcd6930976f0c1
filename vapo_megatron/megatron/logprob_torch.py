"""Passes over a chunk of logits in plain torch, in blocks that stay in a core's cache on a CPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of logits in a block.
_BLOCK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 26}


def statistics(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """What log-probs and entropies are made of, for x = logits / temperature.

    Args:
        logits: float32 [rows, words], at least one word; left as they are.
        labels: int64 [rows], index of each row's label; outside 0..words-1 if another rank has it.

    Returns:
        float32 [4, rows]: the largest x of each row (top), sum of exp(x - top), sum of
        exp(x - top) (x - top), and the label's x (0 if another rank has it).
    """
    found = logits.new_empty(4, len(logits))
    for block in _blocks(logits):
        x = _scaled(logits[block], temperature)
        torch.amax(x, -1, out=found[0, block])
        x = x - found[0, block, None]
        p = x.exp()
        torch.sum(p, -1, out=found[1, block])
        torch.sum(p.mul_(x), -1, out=found[2, block])
    index, is_here = _in_shard(labels, logits.shape[1])
    label_logits = _scaled(logits.gather(1, index[:, None])[:, 0], temperature)
    found[3] = label_logits.where(is_here, 0.0)
    return found


def gradient(
    logits: Tensor,
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
        logits, labels, temperature: as in `statistics`.
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
    for block in _blocks(logits):
        x = logits[block]
        if temperature != 1.0:
            x.div_(temperature)
        x.sub_(partition[block, None])
        if of_entropy is None:
            x.exp_().mul_(-of_logprob[block, None])
        else:
            p = x.exp()
            constant = of_logprob[block] + of_entropy[block] * entropy[block]
            x.mul_(-of_entropy[block, None]).sub_(constant[:, None]).mul_(p)
        index, is_here = _in_shard(labels[block], logits.shape[1])
        x.scatter_add_(1, index[:, None], (of_logprob[block] * is_here)[:, None])
        if not same:
            result[block] = x
    return result


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Runs of rows of logits [rows, words]."""
    row_bytes = logits.element_size() * max(1, logits.shape[1])
    rows = max(1, _BLOCK_BYTES[logits.device.type] // row_bytes)
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _scaled(x: Tensor, temperature: float) -> Tensor:
    return x if temperature == 1.0 else x / temperature


def _in_shard(labels: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Indices that exist in a shard of so many words, and which of them are the labels."""
    return labels.clamp(0, words - 1), (labels >= 0) & (labels < words)

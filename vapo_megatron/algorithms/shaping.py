"""Rewards that depend on length, per response."""

import torch
from torch import Tensor


def soft_overlong(lengths: Tensor, max_length: int, cache_length: int) -> Tensor:
    """Penalty for long responses, to be added to the reward (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - cache_length tokens, falling linearly to -1 at max_length, -1 beyond.
    lengths [S] -> float32 [S]; 0 < cache_length <= max_length.
    """
    return ((max_length - cache_length - lengths.double()) / cache_length).clamp(-1, 0).float()


_BASE = 1_000_003  # of a polynomial hash, modulo 2^64


def repeated_share(tokens: Tensor, cu_seqlens: Tensor, n: int = 16) -> float:
    """Share of the n-grams of S responses that occur earlier in the same response.

    Near 0 for ordinary text, which rarely repeats sixteen tokens in a row; near 1 for a response
    that loops. Responses of fewer than n tokens have no n-grams; 0 where there are none at all.

    Args:
        tokens: int [T], of packed responses.
        cu_seqlens: int64 [S + 1], where each response begins in tokens.
        n: a power of two.
    """
    if len(tokens) < n:
        return 0.0
    grams = tokens.long()
    power = _BASE
    width = 1
    while width < n:  # each pass doubles the tokens that a hash stands for
        grams = grams[:-width] * power + grams[width:]
        power = power * power % 2**61
        width = 2 * width
    response = torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff())
    inside = response[: len(grams)] == response[n - 1 :]
    grams = grams[inside] * _BASE + response[: len(grams)][inside]
    if len(grams):
        return 1 - len(grams.unique()) / len(grams)
    return 0.0

"""Weights that turn token losses into one loss, from global counts.

The weights are computed over the whole mini-batch before its responses are distributed, so that

    loss = sum over tokens of w[response of t] * L_t

is the same sum on any layout and with any micro-batches: each adds its part, and none divides.
"""

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    lengths: Tensor, mode: Mode, constant: float | None = None, selected: Tensor | None = None
) -> Tensor:
    """Weight of every loss-carrying token of each response of a mini-batch: [S] -> float32 [S].

    With |o_i| the length, S the number of responses, both over the selected responses that are not
    empty:
        token_mean:    1 / sum_i |o_i|      (DAPO, VAPO)
        sequence_mean: 1 / (S |o_i|)        (GRPO, PPO as the VAPO paper has it)
        constant:      1 / (S constant)     (Dr. GRPO: the longest response; 1 sums over tokens:
            RLOO)

    Args:
        lengths: [S] tokens of each response that carry loss (`segments.response_lengths` with the
            loss mask).
        mode: as above.
        constant: positive, for mode "constant".
        selected: bool [S]; responses with False get weight 0 and do not count. None: all.
    """
    if selected is None:
        counted = lengths > 0
    else:
        counted = (lengths > 0) & selected.bool()
    tokens = torch.where(counted, lengths, 0).double()
    responses = counted.sum().clamp(min=1).double()
    if mode == "token_mean":
        weights = (1 / tokens.sum().clamp(min=1)).expand_as(tokens)
    elif mode == "sequence_mean":
        weights = 1 / (responses * tokens.clamp(min=1))
    else:
        assert constant is not None, "aggregation=constant comes with its constant"
        weights = (1 / (responses * constant)).expand_as(tokens)
    return torch.where(counted, weights, 0).float()


def nll_weights(lengths: Tensor, correct: Tensor) -> Tensor:
    """1 / (tokens of all correct responses) for a correct response, else 0 (VAPO, section 4.3): [S]
    -> float32 [S].

    All 0 where none is correct.
    """
    return token_weights(lengths, "token_mean", selected=correct)

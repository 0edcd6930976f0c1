"""Megatron's description of where the sequences of a micro-batch begin and end."""

from collections.abc import Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams

# Tokens; shorter sequences are not told apart.
_LEAST = 1024


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """For attention and rotary embedding of packed sequences; lengths: tokens of each over all context-parallel ranks,
    padding included."""
    starts = torch.tensor((0, *lengths), dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    longest = longest_position(max(lengths))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def longest_position(length: int) -> int:
    """A number that no sequence is longer than, of which there are few: two an octave.

    Megatron's rotary tables, those of layers with Transformer Engine, are made and kept for each such number, and
    cuDNN's attention before version 9.6 plans its execution for each. All take the lengths themselves from where the
    sequences begin; a bound above the longest one is as good as its length.
    """
    step = max((1 << length.bit_length()) >> 2, _LEAST // 2)
    return max(-(-length // step) * step, _LEAST)

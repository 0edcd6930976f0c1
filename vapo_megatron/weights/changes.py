"""The words of a bucket that changed since it was last sent, and no others.

After an update with a small learning rate most bfloat16 weights round to what they were before.
Related work: PULSE (arXiv 2602.03839).
"""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NEEDS_WHOLE = "changes came for a bucket that the engine does not hold"
"""An engine's answer to changes that it cannot apply: the whole bucket is sent instead."""

# A gap between two positions is stored in 16 bits: no gap is longer, because every word at a
# multiple of this number is sent, changed or not.
_LONGEST_GAP = (1 << 16) - 1
_BYTES_OF_A_WORD = 2
_WORDS_AT_ONCE = 4
# Changes are sent only where they take at most this share of the bucket's bytes.
_LARGEST_SHARE = 0.5


class Difference(NamedTuple):
    """What a message says of changes beside their bytes.

    Attributes:
        base: digest of the bucket that they change.
        result: digest of the bucket that they lead to.
        nbytes: bytes of the changes.
    """

    base: str
    result: str
    nbytes: int


def digest_of(checksums: Sequence[int]) -> str:
    """Names the content of a bucket, by the checksums of its tensors."""
    return hashlib.sha256(json.dumps(list(checksums)).encode()).hexdigest()


def changed_words(before: Tensor, after: Tensor) -> Tensor | None:
    """The changes that lead from one buffer to another: uint8 [4 n], on their device.

    n gaps of 16 bits between the positions of words, then n words. None where they would take more
    than half of the buffer's bytes.

    Args:
        before: uint8 [bytes], a multiple of 8, on the device of `after`.
        after: uint8 [bytes].
    """
    old = before.view(torch.int16)
    new = after.view(torch.int16)
    # Eight bytes at once first: most are equal.
    is_near = before.view(torch.int64) != after.view(torch.int64)
    always = torch.arange(0, len(new), _LONGEST_GAP, device=new.device)
    is_near[always // _WORDS_AT_ONCE] = True
    near = is_near.nonzero() * _WORDS_AT_ONCE
    near = (near + torch.arange(_WORDS_AT_ONCE, device=new.device)).flatten()
    positions = near[(old[near] != new[near]) | (near % _LONGEST_GAP == 0)]
    if 2 * _BYTES_OF_A_WORD * len(positions) > _LARGEST_SHARE * after.numel():
        return None
    # int16 holds the lower 16 bits; apply_changes() reads them without a sign.
    gaps = positions.diff(prepend=positions.new_zeros(1)).to(torch.int16)
    return torch.cat((gaps, new[positions])).view(torch.uint8)


def apply_changes(buffer: Tensor, changes: Tensor) -> None:
    """Write the words of changed_words() into a buffer: uint8 [bytes], on the same device.

    Raises:
        ValueError: they are not of a buffer of this size.
    """
    gaps, words = changes.view(torch.int16).chunk(2)
    target = buffer.view(torch.int16)
    positions = (gaps.long() & _LONGEST_GAP).cumsum(0)
    if len(gaps) != len(words) or (len(positions) and int(positions[-1]) >= len(target)):
        raise ValueError(f"the changes are not of a bucket of {buffer.numel()} bytes")
    target[positions] = words

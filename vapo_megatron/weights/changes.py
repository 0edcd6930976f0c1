"""The words of a bucket that changed since it was last sent, and no others.

After an update with a small learning rate most bfloat16 weights round to the same values as before.
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
_BYTES_OF_A_CHANGE = 4  # a gap and a word
# Changes are sent only where they take at most this share of the bucket's bytes.
_LARGEST_SHARE = 0.5
# Words, or changes, that are looked at together: each needs several times its own bytes meanwhile.
_PIECE = 4 << 20


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
    """The changes that lead from one buffer to another: uint8 [4 n], on the device of `after`.

    n gaps of 16 bits between the positions of words, then n words. None where they would take more
    than half of the buffer's bytes.

    Args:
        before: uint8 [bytes], an even number, on any device.
        after: uint8 [bytes].
    """
    old = before.view(torch.int16)
    new = after.view(torch.int16)
    most = int(_LARGEST_SHARE * after.numel()) // _BYTES_OF_A_CHANGE
    total = 0
    last = torch.zeros(1, dtype=torch.int64, device=new.device)
    gaps = []
    words = []
    for first in range(0, len(new), _PIECE):
        piece = new[first : first + _PIECE]
        is_sent = old[first : first + _PIECE].to(piece.device) != piece
        is_sent[-first % _LONGEST_GAP :: _LONGEST_GAP] = True
        positions = is_sent.nonzero().squeeze(1)
        total += len(positions)
        if total > most:
            return None
        # int16 holds the lower 16 bits; apply_changes() reads them without a sign.
        gaps.append((positions + first).diff(prepend=last).to(torch.int16))
        words.append(piece[positions])
        if len(positions):
            last = positions[-1:] + first
    return torch.cat((*gaps, *words)).view(torch.uint8)


def apply_changes(buffer: Tensor, changes: Tensor) -> None:
    """Write the words of changed_words() into a buffer: uint8 [bytes], on the same device.

    Raises:
        ValueError: they are not of a buffer of this size.
    """
    gaps, words = changes.view(torch.int16).chunk(2)
    target = buffer.view(torch.int16)
    last = torch.zeros(1, dtype=torch.int64, device=target.device)
    for piece, changed in zip(gaps.split(_PIECE), words.split(_PIECE), strict=True):
        positions = (piece.long() & _LONGEST_GAP).cumsum(0) + last
        last = positions[-1:]
        if int(last) >= len(target):
            raise ValueError(f"the changes are not of a bucket of {buffer.numel()} bytes")
        target[positions] = changed


def placed_sum(raw: Tensor) -> int:
    """The sum of 64-bit words, each times an odd number of its place, modulo 2^64: a word that
    changes, or changes places, changes it.

    raw: uint8 [bytes], contiguous, a multiple of 8.
    """
    words = raw.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for first in range(0, len(words), _PIECE):
        piece = words[first : first + _PIECE]
        places = torch.arange(first, first + len(piece), device=raw.device)
        total += (piece * (2 * places + 1)).sum()
    return int(total)

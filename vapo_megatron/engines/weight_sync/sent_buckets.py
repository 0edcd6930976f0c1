"""What the engines were sent last, in host memory, so that only changes need to be sent again."""

import logging
from dataclasses import dataclass

from torch import Tensor

from vapo_megatron.weights.bucket import Bucket, Place
from vapo_megatron.weights.changes import Difference, changed_words, digest_of

_logger = logging.getLogger(__name__)

# An engine learns where a bucket's tensors go at its first sync and verifies that at its second.
_WHOLE_FIRST = 2
_MOST_REFUSALS = 2


@dataclass
class _Sent:
    """A bucket as it was sent last.

    Attributes:
        content: uint8 [bytes], in host memory.
        digest: of its checksums.
        times_whole: how often it was sent whole since changes were refused.
        refusals: how often engines could not apply its changes.
    """

    content: Tensor
    digest: str
    times_whole: int = 0
    refusals: int = 0


class SentBuckets:
    """The buckets that some engines have, by the places of their tensors."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Place, ...], _Sent] = {}

    def forget(self) -> None:
        """Other engines are fed from now on."""
        self._sent.clear()

    def changes_to(self, bucket: Bucket) -> tuple[Tensor, Difference] | None:
        """The changes of a bucket since it was sent last, on its device; None: send it whole."""
        sent = self._sent.get(tuple(bucket.places))
        if sent is None or sent.times_whole < _WHOLE_FIRST:
            return None
        changes = changed_words(sent.content, bucket.buffer)
        if changes is None:
            return None
        return changes, Difference(sent.digest, digest_of(bucket.checksums()), changes.numel())

    def was_refused(self, bucket: Bucket) -> None:
        """The engines hold something else. They may learn the bucket again; after a second refusal
        it is sent whole from now on."""
        sent = self._sent[tuple(bucket.places)]
        sent.times_whole = 0
        sent.refusals += 1
        if sent.refusals == _MOST_REFUSALS:
            sent.content = bucket.buffer.new_empty(0)
            _logger.warning(
                "the engines cannot apply changes of %s to %s: these weights are sent whole",
                bucket[0][0],
                bucket[-1][0],
            )

    def keep(self, bucket: Bucket, whole: bool) -> None:
        """The engines have this bucket now; whole: they were sent all of it."""
        places = tuple(bucket.places)
        sent = self._sent.get(places)
        if sent is None:
            content = bucket.buffer.to("cpu", copy=True)
            sent = self._sent[places] = _Sent(content, "")
        elif sent.refusals >= _MOST_REFUSALS:
            return
        else:
            sent.content.copy_(bucket.buffer)
        sent.digest = digest_of(bucket.checksums())
        sent.times_whole += whole

    def drop(self, bucket: Bucket) -> None:
        """The engines have it in part, or damaged."""
        self._sent.pop(tuple(bucket.places), None)

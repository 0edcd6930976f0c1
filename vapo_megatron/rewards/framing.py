"""Messages between the pool and its workers: a four-byte length, then that much JSON in UTF-8."""

import json
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


def encode(message: dict[str, Any]) -> bytes:
    """One message with its length before it."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Puts messages together from pieces of any size."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """Take a piece; return the messages that it completes. Raises ValueError on what is not JSON."""
        self._pending += piece
        messages = []
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            end = _LENGTH.size + length
            if len(self._pending) < end:
                break
            messages.append(json.loads(self._pending[_LENGTH.size : end]))
            del self._pending[:end]
        return messages

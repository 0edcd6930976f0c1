"""Responses as a server hands them to its trainer: columns of numbers. In JSON they take rank 0 forty times as long.

A message is a length (uint32), so many bytes of JSON, which has an entry for each response, and then the columns of one
response after the other: token ids, log-probs, and the experts of each token, if they were asked for. All of it is
little-endian.
"""

import base64
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.weights.routed_experts import ExpertChoices

PATH = "vapo_generate"
"""Where a server takes what SGLang takes under /generate, for a list of prompts, and answers with columns."""
ABORT_PATH = "vapo_abort"
"""Where it takes a list of the names of responses that are to end."""
MEDIA_TYPE = "application/octet-stream"

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Columns:
    """One response.

    meta: SGLang's finish_reason and weight_versions, and `wrong_experts`: what is wrong with the experts, if any.
    experts: what ExpertChoices.decode found; None without.
    The arrays share the message's memory.
    """

    meta: dict[str, Any]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    experts: NDArray[Any] | None


def pack(
    answers: Sequence[dict[str, Any]], choices: ExpertChoices | None = None, prompts: Sequence[Sequence[int]] = ()
) -> bytes:
    """A message of SGLang's answers to a list of prompts. A log-prob that is none becomes NaN.

    choices: of the model whose experts were asked for; prompts are needed then. Where they cannot be, meta says why.
    """
    rows = []
    for place, answer in enumerate(answers):
        meta = answer["meta_info"]
        ids = np.array(answer["output_ids"], dtype="<i4")
        logprobs = np.array([entry[0] for entry in meta.get("output_token_logprobs", ())], dtype="<f4")
        meta_kept = {name: meta[name] for name in ("finish_reason", "weight_versions")}
        experts = None
        if choices is not None:
            try:
                experts = choices.decode(_numbers(meta.get("routed_experts")), len(prompts[place]) + len(ids) - 1)
            except ValueError as error:
                meta_kept["wrong_experts"] = str(error)
        rows.append(Columns(meta_kept, ids, logprobs, experts))
    return join(rows)


def join(responses: Sequence[Columns]) -> bytes:
    """The message of some responses."""
    entries = [
        {
            "tokens": len(row.token_ids),
            "logprobs": len(row.logprobs),
            "experts": None if row.experts is None else [len(row.experts), row.experts.dtype.str],
            "meta": row.meta,
        }
        for row in responses
    ]
    arrays = [array for row in responses for array in (row.token_ids, row.logprobs, row.experts) if array is not None]
    head = json.dumps(entries, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *(array.tobytes() for array in arrays)))


def unpack(message: bytes) -> list[Columns]:
    """The responses of a message.

    Raises:
        ValueError: it is not one, or not whole.
    """
    if not isinstance(message, bytes) or len(message) < _LENGTH.size:
        raise ValueError(f"no message: {str(message)[:80]!r}")
    start = _LENGTH.size + _LENGTH.unpack_from(message)[0]
    rows = []

    def column(count: int, dtype: str) -> NDArray[Any]:
        nonlocal start
        values = np.frombuffer(message, dtype, count, start)
        start += values.nbytes
        return values

    for entry in json.loads(message[_LENGTH.size : start]):
        ids, logprobs = column(entry["tokens"], "<i4"), column(entry["logprobs"], "<f4")
        experts = None if entry["experts"] is None else column(*entry["experts"])
        rows.append(Columns(entry["meta"], ids, logprobs, experts))
    if start != len(message):
        raise ValueError(f"{len(message)} bytes came, {start} were announced")
    return rows


def _numbers(encoded: str | None) -> NDArray[np.int32] | None:
    """SGLang's experts, int32 in base64."""
    return None if encoded is None else np.frombuffer(base64.b64decode(encoded), dtype="<i4")

"""Responses as a server sends them to the trainer: arrays instead of JSON, which takes rank 0 forty
times as long.

A message is a safetensors file: "meta" (JSON, one entry per response), and for response i the
arrays "i/token_ids", "i/logprobs" and, if requested, "i/experts".
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vapo_megatron.weights.routed_experts import ExpertChoices

PATH = "vapo_generate"
"""Takes what SGLang takes under /generate for a list of prompts; the answer is a message."""
ABORT_PATH = "vapo_abort"
"""Takes a list of the names of responses that are to end."""
MEDIA_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Columns:
    """One response.

    meta: SGLang's finish_reason and weight_versions, and `wrong_experts`: why the experts are
        invalid, if they are.
    experts: what ExpertChoices.decode returned; None without.
    """

    meta: dict[str, Any]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    experts: NDArray[Any] | None


def pack(
    answers: Sequence[dict[str, Any]],
    choices: ExpertChoices | None = None,
    prompts: Sequence[Sequence[int]] = (),
) -> bytes:
    """The message of SGLang's answers to a list of prompts. A missing log-prob becomes NaN.

    choices: the model's, if experts were requested; prompts are needed then. If the experts are
        invalid, meta says why.
    """
    rows = []
    for place, answer in enumerate(answers):
        meta = answer["meta_info"]
        ids = np.array(answer["output_ids"], dtype=np.int32)
        logprobs = np.array(
            [entry[0] for entry in meta.get("output_token_logprobs", ())], dtype=np.float32
        )
        meta_kept = {name: meta[name] for name in ("finish_reason", "weight_versions")}
        experts = None
        if choices is not None:
            try:
                tokens = len(prompts[place]) + len(ids) - 1 - choices.start
                experts = choices.decode(_numbers(meta.get("routed_experts")), tokens)
            except ValueError as error:
                meta_kept["wrong_experts"] = str(error)
        rows.append(Columns(meta_kept, ids, logprobs, experts))
    return join(rows)


def join(responses: Sequence[Columns]) -> bytes:
    """The message of some responses."""
    meta = json.dumps([row.meta for row in responses]).encode()
    arrays: dict[str, NDArray[Any]] = {"meta": np.frombuffer(meta, np.uint8)}
    for i, row in enumerate(responses):
        arrays |= {f"{i}/token_ids": row.token_ids, f"{i}/logprobs": row.logprobs}
        if row.experts is not None:
            arrays[f"{i}/experts"] = row.experts
    message: bytes = save(arrays)
    return message


def unpack(message: bytes) -> list[Columns]:
    """The responses of a message.

    Raises:
        ValueError: it is not one, or not whole.
    """
    try:
        arrays = load(message)
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"no message ({error}): {str(message)[:80]!r}") from None
    return [
        Columns(meta, arrays[f"{i}/token_ids"], arrays[f"{i}/logprobs"], arrays.get(f"{i}/experts"))
        for i, meta in enumerate(json.loads(arrays["meta"].tobytes()))
    ]


def _numbers(encoded: str | None) -> NDArray[np.int32] | None:
    """SGLang's experts, int32 in base64."""
    if encoded is None:
        return None
    return np.frombuffer(base64.b64decode(encoded), dtype="<i4")

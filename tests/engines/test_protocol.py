"""What engines and trainers say to each other, held to the protocol version that it
stands for."""

import asyncio
import json
from dataclasses import fields
from typing import Any

import numpy as np
from safetensors import deserialize

from vapo_megatron.engines.inside import columns, heartbeat
from vapo_megatron.engines.inside.strict_updates import BROADCAST_GROUP, LOAD_FORMAT
from vapo_megatron.engines.remote_engines import PROTOCOL
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient, LoadAnswer
from vapo_megatron.weights.bucket import Place, announce
from vapo_megatron.weights.changes import Difference
from vapo_megatron.weights.routed_experts import ExpertChoices

SAID: dict[int, dict[str, Any]] = {
    10: {
        "bucket": ["first", "last", "places", "purpose", "size"],
        "changes": ["base", "result", "nbytes"],
        "place": ["name", "dtype", "shape", "start"],
        "loaded": ["problems", "seconds", "checksums"],
        "ways": [
            "vapo_strict",
            "vapo_weights",
            "vapo_generate",
            "vapo_abort",
            "vapo_health",
            "vapo_end",
        ],
        "health": ["lost", "requests", "silent_s", "paused", "batches"],
        "asked": [
            "expert_choices",
            "input_ids",
            "return_logprob",
            "return_routed_experts",
            "rid",
            "routed_experts_start_len",
            "sampling_params",
        ],
        "choices": ["layers", "experts", "per_token", "start"],
        "answer": {
            "0/experts": "U8 0203",
            "0/logprobs": "F32 0000003f",
            "0/token_ids": "I32 07000000",
            "meta": [{"a": 1}],
        },
    }
}


def said() -> dict[str, Any]:
    asked: dict[str, Any] = {}

    class Client(EngineClient):
        async def _call(self, path: str, body: dict[str, Any] | None, **_: Any) -> Any:
            asked.update(body or {})
            return columns.join([])

    choices = ExpertChoices(*(1 for _ in fields(ExpertChoices)))
    asyncio.run(Client(EngineAddress("", ""), 1.0).generate([], [], choices, ids=[]))
    one = columns.Columns(
        {"a": 1}, np.array([7], "<i4"), np.array([0.5], "<f4"), np.array([2, 3], np.uint8)
    )
    arrays = {
        name: (array["dtype"], array["data"]) for name, array in deserialize(columns.join([one]))
    }
    meta = json.loads(arrays.pop("meta")[1])
    return {
        "bucket": sorted(announce(None, "load", first=True, last=True)),
        "changes": list(Difference._fields),
        "place": list(Place._fields),
        "loaded": [f.name for f in fields(LoadAnswer)],
        "ways": [
            LOAD_FORMAT,
            BROADCAST_GROUP,
            columns.PATH,
            columns.ABORT_PATH,
            heartbeat.HEALTH_PATH,
            heartbeat.END_PATH,
        ],
        "health": list(asyncio.run(heartbeat.Heartbeat(tuple).health())),
        "asked": sorted(asked),
        "choices": [f.name for f in fields(ExpertChoices)],
        "answer": {name: f"{dtype} {data.hex()}" for name, (dtype, data) in arrays.items()}
        | {"meta": meta},
    }


def test_what_is_said_is_that_of_the_version() -> None:
    assert said() == SAID[PROTOCOL], (
        "raise remote_engines.PROTOCOL, and write here what is said now"
    )

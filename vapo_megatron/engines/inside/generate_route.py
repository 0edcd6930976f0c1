"""The server's own ways to generate and abort, for trainers: columns instead of JSON (columns.py), many at once."""

import asyncio

import orjson
from fastapi import Request, Response
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import GenerateReqInput

from vapo_megatron.engines.inside.columns import MEDIA_TYPE, pack
from vapo_megatron.weights.routed_experts import ExpertChoices


async def generate(request: Request) -> Response:
    """Take the JSON that SGLang's /generate takes for a list of prompts of token ids; a refusal is JSON, as there.

    expert_choices: the fields of an ExpertChoices, where experts are asked for.
    """
    try:
        body = orjson.loads(await request.body())
        choices = body.pop("expert_choices", None)
        asked = GenerateReqInput(**body)
        answers = await anext(get_global_state().tokenizer_manager.generate_request(asked, request))
    except (ValueError, TypeError) as error:
        refusal = orjson.dumps({"error": {"message": str(error)}})
        return Response(refusal, status_code=400, media_type="application/json")
    # In a thread: experts of a group take a second, in which other requests go on.
    experts = None if choices is None else ExpertChoices(**choices)
    message = await asyncio.to_thread(pack, answers, experts, body["input_ids"])
    return Response(message, media_type=MEDIA_TYPE)


async def abort(request: Request) -> None:
    """Take a JSON list of names of responses, and end those of them that run: SGLang's own way takes one a request."""
    for name in orjson.loads(await request.body()):
        get_global_state().tokenizer_manager.abort_request(name)

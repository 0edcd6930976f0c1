"""The server's own way to generate, for trainers: columns instead of JSON (columns.py)."""

import orjson
from fastapi import Request, Response
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import GenerateReqInput

from vapo_megatron.engine.columns import MEDIA_TYPE, pack


async def generate(request: Request) -> Response:
    """Take the JSON that SGLang's /generate takes for a list of prompts of token ids; a refusal is JSON, as there."""
    try:
        asked = GenerateReqInput(**orjson.loads(await request.body()))
        answers = await anext(get_global_state().tokenizer_manager.generate_request(asked, request))
    except (ValueError, TypeError) as error:
        body = orjson.dumps({"error": {"message": str(error)}})
        return Response(body, status_code=400, media_type="application/json")
    return Response(pack(answers), media_type=MEDIA_TYPE)

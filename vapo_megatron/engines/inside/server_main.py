"""Entry of a server subprocess:

    python -m vapo_megatron.engines.inside.server_main LISTEN_FD OWNER_PID SCRATCH IDENTITY [SGLang
    args] python -m vapo_megatron.engines.inside.server_main check [SGLang args]

LISTEN_FD is a bound TCP socket, inherited from the owner so that no other process can take the port
in between. The owner's guard (owner_guard) ends this process with the owner, and removes the
directory SCRATCH. IDENTITY, JSON, is the answer at IDENTITY_PATH; HEALTH_PATH reports on the
server's processes (heartbeat.py). The key that requests must carry is in the environment; SGLang
does not get it, as it would write it into its log.

With `check` no server starts: the exit code is 0 if SGLang takes the arguments; if not, the reason
is the last line of standard error.
"""

import argparse
import asyncio
import functools
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing import set_start_method
from typing import Any

from vapo_megatron.engines.inside.heartbeat import END_PATH, HEALTH_PATH, Heartbeat
from vapo_megatron.engines.inside.owner_guard import is_guarded

KEY_VARIABLE = "VAPO_ENGINE_KEY"
IDENTITY_PATH = "vapo_engine"


def main(argv: list[str]) -> None:
    listen_fd, owner_pid, scratch, identity, *engine_args = argv
    key = os.environ.pop(KEY_VARIABLE, "")
    # Slurm sends its signals to every process of a job; the owner decides when a server ends. They
    # are blocked rather than ignored because SGLang sets its own handlers, and its children inherit
    # this.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP})
    if not is_guarded(int(owner_pid), scratch):
        return
    listener = socket.socket(fileno=int(listen_fd))
    gc.disable()  # it takes a fifth of the time of the imports below, which are most of a start

    from vapo_megatron.engines.inside import cpu_shim

    on_cpu = cpu_shim.install()

    import uvicorn
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.entrypoints.http_server import app, get_global_state, launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.auth import add_api_key_middleware

    from vapo_megatron.engines.inside import processes

    gc.freeze()
    gc.enable()
    uvicorn.Server.run = functools.partialmethod(uvicorn.Server.run, sockets=[listener])  # type: ignore[method-assign,assignment]
    identified = json.loads(identity)
    app.add_api_route(f"/{IDENTITY_PATH}", lambda: identified)

    def manager() -> Any:
        return get_global_state().tokenizer_manager

    _answer_in_columns(app, manager)
    heartbeat = Heartbeat(lambda: manager().rid_to_state, lambda: manager().is_pause)
    app.add_api_route(f"/{HEALTH_PATH}", heartbeat.health)
    app.add_api_route(f"/{END_PATH}", heartbeat.end, methods=["POST"])
    # SGLang asks its own server to freeze, without our key.
    http_server._freeze_gc_after_server_warmup = lambda _: gc.freeze()
    if key:
        add_api_key_middleware(app, api_key=key, admin_api_key=None)
    if on_cpu:
        engine._set_envs_and_config = _then_fork(engine._set_envs_and_config)
    launch_server(
        prepare_server_args(engine_args),
        run_scheduler_process_func=processes.run_scheduler,
        run_detokenizer_process_func=processes.run_idle_detokenizer,
    )


def _answer_in_columns(app: Any, manager: Callable[[], Any]) -> None:
    """Routes to generate with an answer in columns instead of JSON (columns.py), and to abort many
    requests at once."""
    import orjson
    from fastapi import Request, Response
    from sglang.srt.managers.io_struct import GenerateReqInput

    from vapo_megatron.engines.inside import columns
    from vapo_megatron.weights.routed_experts import ExpertChoices

    async def generate(request: Request) -> Response:
        """Takes the JSON that SGLang's /generate takes for a list of prompts of token ids; a
        refusal is JSON as well.

        expert_choices: the fields of an ExpertChoices, if experts are requested.
        """
        try:
            body = orjson.loads(await request.body())
            choices = body.pop("expert_choices", None)
            answers = await anext(manager().generate_request(GenerateReqInput(**body), request))
        except (ValueError, TypeError) as error:
            refusal = orjson.dumps({"error": {"message": str(error)}})
            return Response(refusal, status_code=400, media_type="application/json")
        # In a thread: packing a group's experts takes a second, which must not block other
        # requests.
        if choices is None:
            experts = None
        else:
            experts = ExpertChoices(**choices)
        message = await asyncio.to_thread(columns.pack, answers, experts, body["input_ids"])
        return Response(message, media_type=columns.MEDIA_TYPE)

    async def abort(request: Request) -> None:
        """Takes a JSON list of names of responses and ends those that run; SGLang's own route takes
        one name."""
        for name in orjson.loads(await request.body()):
            manager().abort_request(name)

    app.add_api_route(f"/{columns.PATH}", generate, methods=["POST"])
    app.add_api_route(f"/{columns.ABORT_PATH}", abort, methods=["POST"])


def _then_fork(set_envs_and_config: Callable[[object], None]) -> Callable[[object], None]:
    """SGLang spawns its children because of CUDA; without CUDA, a fork saves importing everything
    again."""

    def run(server_args: object) -> None:
        set_envs_and_config(server_args)
        set_start_method("fork", force=True)

    return run


def check_arguments(argv: Sequence[str]) -> None:
    """Have SGLang parse the arguments of a server; ends this process if it refuses them."""
    from vapo_megatron.engines.inside import cpu_shim

    cpu_shim.install()
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    # The trainer reads arguments by their whole names
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    parser.parse_args(argv)
    prepare_server_args(list(argv))


if __name__ == "__main__":
    check_arguments(sys.argv[2:]) if sys.argv[1] == "check" else main(sys.argv[1:])

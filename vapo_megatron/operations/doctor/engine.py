"""Whether an engine starts on a node and answers."""

import asyncio
import tempfile
import time
from pathlib import Path

import psutil

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.client import EngineClient
from vapo_megatron.engines.server import EngineAddress, EngineServer
from vapo_megatron.engines.weight_sync.quantization import engine_fp8
from vapo_megatron.operations.doctor.report import Line
from vapo_megatron.operations.hardware import GIB
from vapo_megatron.weights.spec import read_spec

_PROMPT = [1, 2, 3, 4]
_NEW_TOKENS = 8


def check_engine(config: TrainConfig, gpus: int) -> list[Line]:
    """Start a server as the run would, have it write a few tokens, end it. gpus: of this node, 0 on the CPU.

    Raises:
        BadInput: the model's sizes do not suit rollout.quantization, or SGLang refuses rollout.server_args.
        RunFailed, TryAgain: it does not start, or does not answer; the cause in its log is named.
    """
    if config.rollout.external_urls:
        return [Line("not applicable", "the run's engines are elsewhere (rollout.external_urls)")]
    spec = read_spec(Path(config.model.path))
    needed, free = 2 * spec.parameter_count(), psutil.virtual_memory().available
    if not gpus and needed > free / 2:
        found = (
            f"no GPU here, where an engine takes more than {needed / GIB:.0f} of {free / GIB:.0f} GiB of free memory"
        )
        return [Line("skipped", found, "have doctor look at a node of the job")]
    devices = range(config.rollout.tp) if gpus else None
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vapo-doctor-") as folder:
        log = Path(folder) / "engine.log"
        fp8 = engine_fp8(config.rollout, config.actor.precision, spec)
        server = EngineServer(config.model.path, config.rollout, config.model.dtype, log, devices, fp8=fp8)
        server.check_arguments()
        with server:
            ready = time.monotonic() - started
            asyncio.run(_ask(server.address, config.rollout.sync.request_timeout_s))
    seconds = time.monotonic() - started - ready
    return [Line("ok", f"TP{config.rollout.tp} started in {ready:.0f} s, {_NEW_TOKENS} tokens in {seconds:.1f} s")]


async def _ask(address: EngineAddress, deadline: float) -> None:
    client = EngineClient(address, deadline)
    try:
        sampling = {"max_new_tokens": _NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        await client.generate([_PROMPT], [sampling])
    finally:
        await client.close()

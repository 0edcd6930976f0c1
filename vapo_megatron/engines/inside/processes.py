"""The functions that SGLang runs in the child processes of a server.

They are pickled by name: a spawned child imports this module, and with it the CPU shim, before it uses SGLang.
"""

import os
import signal
import tempfile
import uuid
from typing import Any

from vapo_megatron.engines.inside import cpu_shim

_on_cpu = cpu_shim.install()

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.distributed.device_communicators import shm_broadcast  # noqa: E402
from sglang.srt.managers import load_snapshot  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process  # noqa: E402
from sglang.srt.utils.common import kill_itself_when_parent_died  # noqa: E402

from vapo_megatron.engines.inside.cache_by_version import cache_by_version  # noqa: E402
from vapo_megatron.engines.inside.cpu_fp8 import install_cpu_fp8  # noqa: E402
from vapo_megatron.engines.inside.heartbeat import beats_with, register  # noqa: E402
from vapo_megatron.engines.inside.strict_loading import install_strict_loading  # noqa: E402

# Servers are killed, not ended: a file in /dev/shm would stay. The folder of temporary files goes with the server.
load_snapshot.shm_path_for = lambda instance: f"{tempfile.gettempdir()}/loads_{instance}.shm"
# Memory that processes of a server share needs a name in /dev/shm: with the server's own number in it, whoever ends the
# server finds it (owner_guard.remove_shared_memory).
shm_broadcast.make_shm_name = parallel_state.make_shm_name = lambda kind: (
    f"sgl_shm_{kind}_{os.getpgrp()}_{uuid.uuid4().hex[:8]}"
)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler, with weight updates that name what they could not place."""
    beats_with(Scheduler, register("scheduler"))
    cache_by_version(Scheduler)
    install_strict_loading()
    if _on_cpu:
        install_cpu_fp8()
        cpu_shim.shard_as_on_gpus()
    run_scheduler_process(*args, **kwargs)


def run_idle_detokenizer(*_: Any, **__: Any) -> None:
    """Stands where SGLang wants a detokenizer: token-in token-out servers never send it anything."""
    kill_itself_when_parent_died()
    register("detokenizer")
    while True:
        signal.pause()

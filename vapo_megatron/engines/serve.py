"""`vapo-megatron engine`: an engine on devices of its own, which serves one trainer after another until it is ended."""

import logging
import socket
import threading
import time
from pathlib import Path

from vapo_megatron.config.run_directory import check_room
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.engine_limits import engine_fp8, first_engine_devices
from vapo_megatron.engines.keeper import EngineKeeper
from vapo_megatron.engines.node_part import WHOLE, NodePart, check_nodes, not_replaced
from vapo_megatron.engines.remote_engines import identity_of_engine, what_must_agree
from vapo_megatron.engines.server import EngineServer
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.signals import listen, stop_requested
from vapo_megatron.weights.spec import read_spec

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve_engine(config: TrainConfig, host: str, port: int, part: NodePart = WHOLE) -> None:
    """Start the engine of a training config on this machine, and return once SIGTERM or SIGUSR1 asks for its end.

    It takes the first rollout.tp GPUs that this process sees, or its share of so many nodes. Its log is
    run.root/<run.name>-engines/<host>_<port>.log.

    Args:
        config: that of the trainer.
        host: address of this machine to listen on.
        port: likewise; 0: a free one.
        part: of an engine on several nodes; a trainer is given the address of the first. None of them is started again.

    Raises:
        BadInput: the config cannot work here, or it would listen on a network without a key.
        RunFailed: the engine did not start.
        TryAgain: it failed and was started again too often (rollout.health.max_failures).
    """
    listen()
    check_nodes(config.rollout.tp, part)
    key = config.rollout.api_key()
    if key is None and host not in _LOOPBACK:
        raise BadInput(
            f"--host {host} without rollout.api_key_variable: whoever reaches the engine could run programs on this "
            "machine: name an environment variable that holds a key of yours"
        )
    rollout = config.rollout if part.of == 1 else not_replaced(config.rollout)
    devices = first_engine_devices(rollout.tp // part.of, current_platform())
    spec = read_spec(Path(config.model.path))
    fp8 = engine_fp8(rollout, config.actor.precision, spec)
    check_room(Path(config.run.directory))
    folder = Path(config.run.directory).with_name(f"{config.run.name}-engines")
    log_file = (folder / f"{socket.gethostname()}_{port or time.time_ns()}.log").absolute()
    agreed = what_must_agree(rollout, spec, config.model.dtype, fp8)
    server = EngineServer(
        config.model.path,
        rollout,
        config.model.dtype,
        log_file,
        devices,
        host=host,
        fp8=fp8,
        port=port,
        key=key or "",
        identity=identity_of_engine(agreed, devices is not None, str(log_file)),
        part=part,
    )
    server.check_arguments()
    keeper = EngineKeeper(server, rollout)
    try:
        keeper.start()
        keeper.wait_until_ready()
        which = "engine" if part.leads else f"part {part.index} of {part.of} of an engine"
        _logger.info("%s at %s, log %s", which, keeper.address.url, log_file)
        idle = threading.Event()
        while stop_requested() is None:
            if (kept := keeper.look()).state == "given up":
                raise TryAgain(
                    f"{log_file}: the engine failed {kept.in_a_row} times in a row, the last time {kept.cause} "
                    "(rollout.health.max_failures)"
                )
            idle.wait(_POLL_SECONDS)
    finally:
        keeper.stop()

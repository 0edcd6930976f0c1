"""Engines of our own that have read a checkpoint, started for an evaluation (or probes) and ended with it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vapo_megatron.config.model import ModelConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.server import EngineServer
from vapo_megatron.monitoring.console import RunConsole

# Engines that read a checkpoint and are never handed weights stay at the version they start with.
WEIGHT_VERSION = 0


@contextmanager
def engines_of(
    model: ModelConfig,
    rollout: RolloutConfig,
    devices: Sequence[range | None],
    stop_tokens: Sequence[int],
    log_dir: Path,
    console: RunConsole,
) -> Iterator[Dispatcher]:
    """A server on each of some devices (None: the CPU) that has read model.path; all of them end with the block.

    Raises:
        RunFailed, TryAgain: one does not start.
    """
    # There is no trainer to give memory to.
    config = rollout.model_copy(update={"memory_saver": False})
    servers = [
        EngineServer(model.path, config, model.dtype, log_dir / f"engine_{index}.log", place, WEIGHT_VERSION)
        for index, place in enumerate(devices)
    ]
    with ExitStack() as stack:
        with console.phase("starting engines", total=len(servers)) as advance:
            for server in servers:
                stack.callback(server.stop)
                server.start()
            for server in servers:
                server.wait_until_ready()
                advance(1)
        yield stack.enter_context(Dispatcher([server.address for server in servers], rollout, stop_tokens))

"""Engines of our own, started for an evaluation and ended with it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vapo_megatron.evaluation.check import EvaluatedModel, Evaluation
from vapo_megatron.evaluation.evaluator import EngineGenerator
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.server import EngineServer

# Engines that read a checkpoint and are never handed weights stay at the version they start with.
_WEIGHT_VERSION = 0


@contextmanager
def own_engines(
    plan: Evaluation, model: EvaluatedModel, log_dir: Path, console: RunConsole
) -> Iterator[EngineGenerator]:
    """Servers that have read the model.

    Raises:
        RunFailed, TryAgain: one does not start.
    """
    settings = plan.settings
    with ExitStack() as stack:
        servers = _servers(plan, model, log_dir)
        with console.phase("starting engines", total=len(servers)) as advance:
            for server in servers:
                stack.callback(server.stop)
                server.start()
            for server in servers:
                server.wait_until_ready()
                advance(1)
        addresses, stop_tokens = [server.address for server in servers], model.tokenizer.eos_token_ids
        dispatcher = stack.enter_context(Dispatcher(addresses, settings.rollout, stop_tokens))
        decode = model.tokenizer.decode
        yield EngineGenerator(dispatcher.collect, decode, settings.sampling, settings.run.seed, _WEIGHT_VERSION)


def _servers(plan: Evaluation, model: EvaluatedModel, log_dir: Path) -> list[EngineServer]:
    settings = plan.settings
    assert settings.model is not None
    # There is no trainer to give memory to.
    config = settings.rollout.model_copy(update={"memory_saver": False})
    path, dtype = settings.model.path, settings.model.dtype
    return [
        EngineServer(path, config, dtype, log_dir / f"engine_{index}.log", devices, _WEIGHT_VERSION)
        for index, devices in enumerate(model.engine_devices)
    ]

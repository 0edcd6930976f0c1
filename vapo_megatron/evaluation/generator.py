"""Responses from engines of our own, started for an evaluation and ended with it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from vapo_megatron.evaluation.check import Checkpoint, Evaluation
from vapo_megatron.evaluation.responses import Response, response_of
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.mcore.platform import Platform
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.rollout.server import EngineServer

# Engines that read a checkpoint and are never handed weights stay at the version they start with.
_WEIGHT_VERSION = 0


class Generator(Protocol):
    """Whatever gives k responses to each prompt; on_group gets those of one prompt together, in order of index."""

    def collect(
        self,
        prompts: Sequence[Prompt],
        k: int,
        on_group: Callable[[list[Response]], None],
        advance: Callable[[int], None],
    ) -> None:
        """Answer all of them; advance is called for each."""


class EngineGenerator:
    """Our own servers."""

    def __init__(self, plan: Evaluation, checkpoint: Checkpoint, dispatcher: Dispatcher) -> None:
        self._settings, self._decode, self._dispatcher = plan.settings, checkpoint.tokenizer.decode, dispatcher

    def collect(
        self,
        prompts: Sequence[Prompt],
        k: int,
        on_group: Callable[[list[Response]], None],
        advance: Callable[[int], None],
    ) -> None:
        """See Generator."""

        def keep(samples: list[Sample]) -> None:
            on_group([response_of(sample, self._decode(sample.response_ids.tolist())) for sample in samples])
            advance(len(samples))

        sampling, seed = self._settings.sampling, self._settings.run.seed
        self._dispatcher.collect(GenerationRequest(prompts, k, sampling, seed, _WEIGHT_VERSION), on_group=keep)


@contextmanager
def own_engines(
    plan: Evaluation, checkpoint: Checkpoint, log_dir: Path, platform: Platform, console: RunConsole
) -> Iterator[Generator]:
    """Servers that have read the checkpoint.

    Raises:
        RunFailed, TryAgain: one does not start.
    """
    with ExitStack() as stack:
        servers = _servers(plan, checkpoint, log_dir, platform)
        with console.phase("starting engines", total=len(servers)) as advance:
            for server in servers:
                stack.callback(server.stop)
                server.start()
            for server in servers:
                server.wait_until_ready()
                advance(1)
        addresses = [server.address for server in servers]
        stop_tokens = checkpoint.tokenizer.eos_token_ids
        dispatcher = stack.enter_context(Dispatcher(addresses, plan.settings.rollout, stop_tokens))
        yield EngineGenerator(plan, checkpoint, dispatcher)


def _servers(plan: Evaluation, checkpoint: Checkpoint, log_dir: Path, platform: Platform) -> list[EngineServer]:
    settings = plan.settings
    assert settings.model is not None
    # There is no trainer to give memory to.
    config = settings.rollout.model_copy(update={"memory_saver": False})
    return [
        EngineServer(
            settings.model.path,
            config,
            settings.model.dtype,
            log_dir / f"engine_{index}.log",
            range(index * config.tp, (index + 1) * config.tp) if platform.is_cuda else None,
            _WEIGHT_VERSION,
        )
        for index in range(checkpoint.engines)
    ]

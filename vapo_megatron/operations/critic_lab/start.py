"""The start of both critic commands: all that can be refused before anything is written, then the
verifiers and engines."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vapo_megatron.agents.leftovers import leftovers_end
from vapo_megatron.checks.sizes import check_train_numbers
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.run_directory import check_room
from vapo_megatron.data.sample import Prompt
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.engines.engine_limits import check_context, engine_devices
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.evaluation.command import engines_of
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.monitoring.console import RunConsole
from vapo_megatron.operations.critic_lab.probe_rollouts import FOLDER
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.run.ranks import machine_default_ranks


class Start(NamedTuple):
    """What a config needs that has passed the checks of both commands.

    ranks: of the model that is measured. devices: of each engine; None: the CPU. folder: where the
    page goes.
    """

    ranks: int
    specs: dict[str, ModelSpec]
    devices: Sequence[range | None]
    folder: Path
    tokenizer: TextTokenizer


def checked_start(config: ProbedRunConfig, model_size: int) -> Start:
    """model_size: the fewest ranks of the model that is measured.

    Raises:
        BadInput: something in the config cannot work; nothing was written.
    """
    ranks = config.cluster.ranks or machine_default_ranks([model_size])
    specs = check_train_numbers(config, ranks)
    if config.rollout.agent is None:  # whose turns are repeated whole
        most = config.sampling.max_new_tokens
        check_context(
            config.data.max_prompt_tokens,
            "sampling.max_new_tokens",
            most,
            config.rollout,
            specs["actor"].max_position_embeddings,
            fewest=most - int(max(config.critic_probes.quantiles) * most),
        )
    devices = engine_devices(config.rollout, current_platform())
    EngineServer(
        config.model.path, config.rollout, config.model.dtype, Path(os.devnull), devices[0]
    ).check_arguments()
    folder = Path(config.run.directory) / FOLDER
    check_room(folder)
    tokenizer = TextTokenizer(Path(config.model.path), config.data.prompt)
    tokenizer.check_vocabulary(specs["actor"].vocab_size)
    return Start(ranks, specs, devices, folder, tokenizer)


@contextmanager
def verifier_and_engines(
    config: ProbedRunConfig,
    start: Start,
    prompts: Sequence[Prompt],
    stop_tokens: Sequence[int],
    console: RunConsole,
) -> Iterator[tuple[VerifierPool, Dispatcher]]:
    """Both end with the block, in a cancelled job too.

    Raises:
        BadInput: the verifiers cannot grade the prompts.
        RunFailed, TryAgain: an engine does not start.
    """
    # A cancelled job must unwind this block too.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with leftovers_end(config.rollout.agent), VerifierPool(config.reward) as verifier:
            verifier.check(prompts)
            logs = start.folder / "logs"
            with engines_of(
                config.model, config.rollout, start.devices, stop_tokens, logs, console
            ) as engines:
                yield verifier, engines
    finally:
        signal.signal(signal.SIGTERM, previous)

"""From a validated config to running ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vapo_megatron.cluster.ranks import (
    environment_place,
    is_rank_zero,
    machine_default_ranks,
    run_as_rank,
    start_ranks,
)
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.training.broadcast import broadcast_value

Settings = TrainConfig | SftConfig


def launch(settings: Settings, body: Callable[[Path], None], check: Callable[[Any, int], None]) -> None:
    """Check everything, make the run directory, run body(run_dir) on all ranks.

    Where torchrun or Slurm started this process it is one of their ranks; else the ranks of this machine are started.

    Raises:
        BadInput: something in the config cannot work; nothing was written.
        VapoError: what the first failing rank said.
    """
    place = environment_place()
    sizes = [settings.actor.layout.model_size] if isinstance(settings, SftConfig) else settings.model_sizes.values()
    count = place.world_size if place else settings.cluster.ranks or machine_default_ranks(list(sizes))
    check(settings, count)
    run_dir = Path(settings.run.directory)
    if place is None:
        make_run_dir(settings, settings.run)
        start_ranks(count, partial(body, run_dir), settings.cluster.timeout_minutes)
    else:
        run_as_rank(place, partial(_in_run_dir, settings, body, run_dir), settings.cluster.timeout_minutes)


def _in_run_dir(settings: Settings, body: Callable[[Path], None], run_dir: Path) -> None:
    """Collective: make the run directory on rank 0, then body; a refusal ends every rank, and rank 0 tells of it."""
    refusal: str | None = None
    if is_rank_zero():
        try:
            make_run_dir(settings, settings.run)
        except BadInput as error:
            refusal = str(error)
    refusal = broadcast_value(refusal)
    if refusal is not None:
        raise BadInput(refusal if is_rank_zero() else "")
    body(run_dir)

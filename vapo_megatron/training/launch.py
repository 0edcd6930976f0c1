"""From a validated config to running ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vapo_megatron.cluster.ranks import (
    environment_place,
    is_rank_zero,
    machine_default_ranks,
    run_as_foreign_rank,
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
    run_dir, timeout = Path(settings.run.directory), settings.cluster.timeout_minutes
    if place is None:
        check(settings, count)
        make_run_dir(settings, settings.run)
        start_ranks(count, partial(body, run_dir), timeout)
    else:
        run_as_foreign_rank(place, partial(_checked, settings, body, partial(check, settings, count), run_dir), timeout)


def _checked(settings: Settings, body: Callable[[Path], None], check: Callable[[], None], run_dir: Path) -> None:
    """Collective: check and make the run directory on rank 0, then body; a refusal ends all, and rank 0 tells of it."""
    refusal: str | None = None
    if is_rank_zero():
        try:
            check()
            make_run_dir(settings, settings.run)
        except BadInput as error:
            refusal = str(error)
    refusal = broadcast_value(refusal)
    if refusal is not None:
        raise BadInput(refusal if is_rank_zero() else "")
    body(run_dir)

"""From a validated config to running ranks."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vapo_megatron.cluster.ranks import environment_place, machine_default_ranks, run_as_rank, start_ranks
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput

Settings = TrainConfig | SftConfig


def launch(settings: Settings, body: Callable[[Path], None], check: Callable[[..., int], None]) -> None:
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
        make_run_dir(settings, run_dir)
        start_ranks(count, partial(body, run_dir), settings.cluster.timeout_minutes)
        return
    if place.rank == 0:
        make_run_dir(settings, run_dir)
    run_as_rank(place, partial(body, run_dir), settings.cluster.timeout_minutes)


def make_run_dir(settings: Settings, run_dir: Path) -> None:
    """Make the run directory with config.yaml in it.

    Raises:
        BadInput: there is a run of this name already and run.overwrite is not set, or nothing can be written there.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        if not settings.run.overwrite:
            raise BadInput(
                f"run.name={settings.run.name}: {run_dir} exists: choose another name, or set run.overwrite=true"
            )
        if not (run_dir / "config.yaml").is_file():
            raise BadInput(f"run.overwrite: {run_dir} is no run directory (it has no config.yaml): remove it yourself")
        shutil.rmtree(run_dir)
    dump_config(settings, run_dir / "config.yaml")

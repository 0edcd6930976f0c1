"""Starts the ranks of a validated config."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import latest_checkpoint
from vapo_megatron.checkpoint.host_memory import copies_left, job_memory
from vapo_megatron.checkpoint.lease import Lease
from vapo_megatron.checkpoint.nodes import find_copy
from vapo_megatron.checkpoint.resume import Start
from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.errors import Interrupted
from vapo_megatron.run.place import place_from_environment
from vapo_megatron.run.ranks import machine_default_ranks, run_as_external_rank
from vapo_megatron.run.restarts import find_left_copy, run_ranks
from vapo_megatron.run.start import Settings, prepare_from_copy, prepare_start
from vapo_megatron.signals import listen

_logger = logging.getLogger(__name__)

Body = Callable[[Path, Start], None]


def launch(settings: Settings, body: Body, check: Callable[[Any, int], None]) -> bool:
    """Check everything, make the run directory or find the saved state in it, run body(run_dir, start) on all
    ranks.

    Where torchrun or Slurm started this process it is one of their ranks; else the ranks of this machine are started.
    A run that is finished already is logged, and nothing is started.

    Returns:
        Whether this process now has a run to report on: it started the ranks or was rank 0, and there were steps to do.

    Raises:
        BadInput: something in the config cannot work, or the saved state cannot be used; nothing was written.
        TryAgain: the run was asked to stop, and is saved.
        VapoError: what the first failing rank said.
    """
    listen()
    place = place_from_environment()
    sizes = [settings.actor.layout.model_size] if isinstance(settings, SftConfig) else settings.model_sizes.values()
    count = place.world_size if place else settings.cluster.ranks or machine_default_ranks(list(sizes))
    run_dir, timeout = Path(settings.run.directory), settings.cluster.collective_timeout_s
    prepare = partial(prepare_start, settings, partial(check, settings, count))
    if place is not None:
        started: list[bool] = []
        is_first = place.local_rank == 0
        run_as_external_rank(place, partial(_prepared, settings, prepare, body, is_first, started), timeout)
        return place.rank == 0 and any(started)
    with Lease(run_dir) as lease:
        copy = find_left_copy(settings, lease)
        if copy is None:
            start = prepare(lease.take)
        else:
            check(settings, count)
            start = replace(prepare_from_copy(settings, copy, lease.take), memory=copies_left(run_dir))
            _logger.info("%s: left by a starter that was killed, and newer than the last checkpoint", copy)
        if not start.finished:
            try:
                run_ranks(settings, count, partial(body, run_dir), start, lease)
            except KeyboardInterrupt:
                raise Interrupted(_how_to_go_on(run_dir)) from None
        return not start.finished


def _prepared(
    settings: Settings,
    prepare: Callable[[Callable[[], None]], Start],
    body: Body,
    is_first: bool,
    started: list[bool],
) -> None:
    """Collective: check and prepare on rank 0, then body, noted in `started`; a refusal ends all ranks.

    is_first: whether this rank is the first of its node.
    """
    run_dir = Path(settings.run.directory)
    memories = gather_values(job_memory(run_dir, is_first))
    memory = None if None in memories else memories[dist.get_rank()]
    with Lease(run_dir) as lease:
        copy = find_copy(memory, run_dir) if memory is not None and settings.run.resume == "auto" else None
        if copy is None:
            start = on_rank_zero(partial(prepare, lease.take))
        else:
            start = on_rank_zero(partial(prepare_from_copy, settings, copy.path, lease.take))
            start = replace(start, checkpoint=copy.path, copy=copy)
        if not start.finished:
            body(run_dir, replace(start, memory=memory))
        started.append(not start.finished)


def _how_to_go_on(run_dir: Path) -> str:
    saved = latest_checkpoint(run_dir)
    if saved is None:
        return f"interrupted; {run_dir} has no checkpoint yet: the same command with run.overwrite=true starts anew"
    return f"interrupted; saved up to {saved}: the same command with run.resume=auto goes on from there"

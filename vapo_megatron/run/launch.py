"""Starts the ranks of a validated config, and lost ranks again from a copy of the run's state in
host memory."""

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import (
    CHECKPOINT_FOLDER,
    latest_checkpoint,
    list_checkpoints,
    remove_leftovers,
)
from vapo_megatron.checkpoint.host_memory import (
    copies_left,
    host_memory,
    host_memory_of,
    job_memory,
    make_folder,
)
from vapo_megatron.checkpoint.lease import Lease
from vapo_megatron.checkpoint.manifest import Damaged, check_structure, read_manifest
from vapo_megatron.checkpoint.nodes import find_copy
from vapo_megatron.checkpoint.resume import Start
from vapo_megatron.collectives import gather_values, on_rank_zero
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.errors import BadInput, Interrupted, VapoError
from vapo_megatron.logs import outlive_output
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.run.launch_env import place_from_environment
from vapo_megatron.run.ranks import (
    RankKilled,
    machine_default_ranks,
    run_as_external_rank,
    start_ranks,
)
from vapo_megatron.run.start import Settings, is_finished, prepare_from_copy, prepare_start
from vapo_megatron.run.watchdog import Hang
from vapo_megatron.signals import listen, stop_requested

_logger = logging.getLogger(__name__)

Body = Callable[[Path, Start], None]


def launch(settings: Settings, body: Body, check: Callable[[Any, int], None]) -> bool:
    """Check everything, make the run directory or find the saved state in it, run body(run_dir,
    start) on all ranks.

    Where torchrun or Slurm started this process it is one of their ranks; else the ranks of this
    machine are started. A run that is finished already is logged, and nothing is started.

    Returns:
        Whether this process now has a run to report on: it started the ranks or was rank 0, and
        there were steps to do.

    Raises:
        BadInput: something in the config cannot work, or the saved state cannot be used; nothing
            was written.
        TryAgain: the run was asked to stop, and is saved.
        VapoError: what the first failing rank said.
    """
    listen()
    outlive_output()
    place = place_from_environment()
    if isinstance(settings, SftConfig):
        sizes = [settings.actor.layout.model_size]
    else:
        sizes = list(settings.model_sizes.values())
    if place:
        count = place.world_size
    else:
        count = settings.cluster.ranks or machine_default_ranks(sizes)
    run_dir = Path(settings.run.directory)
    timeout = settings.cluster.collective_timeout_s
    prepare = partial(prepare_start, settings, partial(check, settings, count))
    if settings.cluster.cpu_threads is not None:
        body = partial(_with_threads, settings.cluster.cpu_threads, body)
    if place is not None:
        started: list[bool] = []
        is_first = place.local_rank == 0
        run_as_external_rank(
            place, partial(_prepared, settings, prepare, body, is_first, started), timeout
        )
        return place.rank == 0 and any(started)
    with Lease(run_dir) as lease:
        copy = find_left_copy(settings, lease)
        if copy is None:
            start = prepare(lease.take)
        else:
            check(settings, count)
            start = replace(
                prepare_from_copy(settings, copy, lease.take), memory=copies_left(run_dir)
            )
            _logger.info(
                "%s: left by a starter that was killed, and newer than the last checkpoint", copy
            )
        if not start.finished:
            try:
                run_ranks(settings, count, partial(body, run_dir), start, lease)
            except KeyboardInterrupt:
                raise Interrupted(_how_to_go_on(run_dir)) from None
        return not start.finished


def _with_threads(threads: int, body: Body, run_dir: Path, start: Start) -> None:
    current_platform().use_threads(threads)
    body(run_dir, start)


def _prepared(
    settings: Settings,
    prepare: Callable[[Callable[[], None]], Start],
    body: Body,
    is_first: bool,
    started: list[bool],
) -> None:
    """Collective: check and prepare on rank 0, then body, noted in `started`; a refusal ends all
    ranks.

    is_first: whether this rank is the first of its node.
    """
    run_dir = Path(settings.run.directory)
    memories = gather_values(job_memory(run_dir, is_first))
    if None in memories:
        memory = None
    else:
        memory = memories[dist.get_rank()]
    with Lease(run_dir) as lease:
        if memory is not None and settings.run.resume == "auto":
            copy = find_copy(memory, run_dir)
        else:
            copy = None
        if copy is None:
            start = on_rank_zero(partial(prepare, lease.take))
        else:
            start = on_rank_zero(partial(prepare_from_copy, settings, copy.path, lease.take))
            start = replace(start, checkpoint=copy.path, copy=copy)
        if not start.finished:
            body(run_dir, replace(start, memory=memory))
        started.append(not start.finished)


def _how_to_go_on(run_dir: Path) -> str:
    if (kept := latest_checkpoint(host_memory_of(run_dir))) is not None:
        return f"interrupted; saved in host memory, {kept}: rerun the command with run.resume=auto"
    saved = latest_checkpoint(run_dir)
    if saved is None:
        return (
            f"interrupted; {run_dir} has no checkpoint yet: rerun the command with "
            f"run.overwrite=true"
        )
    return f"interrupted; saved up to {saved}: rerun the command with run.resume=auto"


def run_ranks(
    settings: Settings, count: int, body: Callable[[Start], None], start: Start, lease: Lease
) -> None:
    """Start the ranks, and again where one was killed or hangs: `cluster.restarts` times from one
    state.

    Copies of the run's state in host memory outlive them.

    Raises:
        VapoError: see start_ranks.
    """
    left = settings.cluster.restarts
    timeout = settings.cluster.collective_timeout_s
    with ExitStack() as stack:
        run_dir = Path(settings.run.directory)
        memory = stack.enter_context(host_memory(run_dir, start.is_copy))
        if start.is_copy and (memory is None or not list_checkpoints(memory)):
            start = prepare_start(settings, lambda: None, lease.take)
        if left and memory is not None:
            start = replace(start, memory=memory)
        while not start.finished:
            if memory is not None and not memory.is_dir():
                with suppress(OSError):
                    make_folder(run_dir, memory)
                _logger.warning(
                    "%s was removed, and its copies with it (RemoveIPC=yes of systemd-logind?)",
                    memory,
                )
            try:
                return start_ranks(count, partial(body, start), timeout, memory)
            except (RankKilled, Hang, Damaged) as error:
                try:
                    again = _start_after(error, settings, start, lease)
                except (
                    OSError
                ) as refusal:  # the disk with the run is gone, and the ranks for that reason
                    raise error from refusal
                if again.checkpoint != start.checkpoint:
                    left = settings.cluster.restarts
                if left == 0 or stop_requested():
                    raise
                left = left - 1
                start = again
                origin = start.checkpoint or "the beginning"
                _logger.warning(
                    "%s; ranks are started again in this process, from %s", _cause(error), origin
                )


def _start_after(error: VapoError, settings: Settings, start: Start, lease: Lease) -> Start:
    """The state from which restarted ranks begin. Raises `error` if a restart does not help."""
    if isinstance(error, Damaged):
        if not start.is_copy:
            raise error
        assert start.memory is not None
        shutil.rmtree(start.memory / CHECKPOINT_FOLDER, ignore_errors=True)
    if is_finished(settings):
        return replace(start, finished=True)
    copy = _copy_in(start.memory, settings)
    if copy is None:
        run = settings.run.model_copy(update={"resume": "auto", "overwrite": False})
        prepared = prepare_start(settings.model_copy(update={"run": run}), lambda: None, lease.take)
        return replace(start, checkpoint=prepared.checkpoint, finished=prepared.finished)
    return replace(start, checkpoint=copy)


def _copy_in(memory: Path | None, settings: Settings) -> Path | None:
    """The copy to continue from; None if there is none, or if a checkpoint is newer."""
    if memory is None or not memory.is_dir():
        return None
    remove_leftovers(memory)
    copy = latest_checkpoint(memory)
    newest = max(list_checkpoints(Path(settings.run.directory)), default=None)
    if copy is None or (newest is not None and newest > max(list_checkpoints(memory))):
        _logger.warning("%s: no copy that is newer than the last checkpoint", memory)
        return None
    try:
        check_structure(copy, read_manifest(copy))
    except BadInput as error:
        _logger.warning("%s; it is left aside", _cause(error))
        shutil.rmtree(copy, ignore_errors=True)
        return None
    return copy


def find_left_copy(settings: Settings, lease: Lease) -> Path | None:
    """The copy that a starter of this run, killed on this machine, has left; None where a new start
    has none to use.

    Raises BadInput where somebody else works in the run directory.
    """
    run_dir = Path(settings.run.directory)
    if settings.run.resume == "auto" and run_dir.is_dir():
        memory = copies_left(run_dir)
    else:
        memory = None
    if memory is None or latest_checkpoint(memory) is None:
        return None
    lease.take()  # a resumed run writes its copies there
    return _copy_in(memory, settings)


def _cause(error: VapoError) -> str:
    """The line of an error without what a person would have to do about it."""
    return str(error).partition(": start the same")[0].partition(": the checkpoint is damaged")[0]

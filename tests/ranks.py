"""Run a function on several ranks, forked from this process, which has imported everything
already."""

import faulthandler
import multiprocessing
import os
import queue
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import megatron.core  # noqa: F401
import torch
import torch.distributed as dist
import transformers  # noqa: F401
from staged_group import use_staged_groups
from torch.distributed import distributed_c10d

from vapo_megatron.megatron import cpu_torch, mesh, model  # noqa: F401
from vapo_megatron.megatron.platform import current_platform

cpu_torch.install()


def _rank(
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    cuda: bool,
) -> None:
    with open(_stacks_of(store, rank), "w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        _answer(rank, world_size, store, results, fn, args, cuda)


def _answer(
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    cuda: bool,
) -> None:
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if world_size > torch.cuda.device_count():
            use_staged_groups()
    backend = current_platform().world_backend if cuda else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    try:
        with _one_world() if world_size == 1 and not cuda else nullcontext():
            results.put((rank, True, fn(*args)))
        dist.barrier()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    results.close()
    results.join_thread()
    # Without the interpreter's exit: the parent's atexit handlers are not this rank's.
    os._exit(0)


def _in_this_process(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """One rank in this process: its coverage is seen by a tool that watches this
    one."""
    if not dist.is_initialized():
        store = tempfile.mkdtemp() + "/store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with _one_world():
        return fn(*args)


@contextmanager
def _one_world() -> Iterator[None]:
    """Every group of a single rank is its world: gloo's threads outlive its groups, and a file of
    tests would have thousands of them."""
    new_group = dist.new_group
    dist.new_group = distributed_c10d.new_group = lambda *args, **kwargs: dist.group.WORLD
    try:
        yield
    finally:
        dist.new_group = distributed_c10d.new_group = new_group


def one_rank_in_process() -> bool:
    """Whether a single rank is not forked (tools/mutants.py)."""
    return bool(os.environ.get("RANKS_IN_PROCESS"))


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, deadline: float = 240, cuda: bool = False
) -> list[Any]:
    """fn(*args) on each of world_size gloo ranks; its results, by rank.

    No tensors: they would not outlive the rank. With cuda every rank has a GPU, as in training, or
    shares one with others where there are too few (staged_group.py); it is started afresh, because
    CUDA does not survive a fork, so fn has to be a module's.

    A rank's exception fails the test, and so does a rank that dies: its peers lose a connection,
    and the exit codes say whose it was. With RANKS_IN_PROCESS in the environment (tools/mutants.py)
    a single rank is not forked.
    """
    if world_size == 1 and not cuda and one_rank_in_process():
        return [_in_this_process(fn, args)]
    if dist.is_initialized():  # by _in_this_process: ranks have their own world
        dist.destroy_process_group()
    context: Any = multiprocessing.get_context("spawn" if cuda else "fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(
                target=_rank, args=(rank, world_size, store, results, fn, args, cuda), daemon=True
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        answers: dict[int, Any] = {}
        end = time.monotonic() + deadline
        try:
            while len(answers) < world_size:
                try:
                    rank_id, good, value = results.get(timeout=max(0.1, end - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError(
                        f"{world_size} ranks: only {sorted(answers)} answered within {deadline} s"
                        + _stacks(store, ranks)
                    ) from None
                if not good:
                    _raise_first_cause({rank_id: value}, results, ranks)
                answers[rank_id] = value
        finally:
            for rank in ranks:
                rank.join(timeout=5 if len(answers) == world_size else 0.1)
                if rank.is_alive():
                    rank.kill()
                    rank.join()
    return [answers[rank] for rank in range(world_size)]


def _stacks_of(store: str, rank: int) -> str:
    return f"{store}.{rank}.stacks"


def _stacks(store: str, ranks: list[Any]) -> str:
    """Where each rank that still runs is, from a second of asking: what a deadline leaves
    unsaid."""
    running = [(number, rank.pid) for number, rank in enumerate(ranks) if rank.is_alive()]
    for _, pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(1)
    return "".join(
        f"\nrank {number}:\n{Path(_stacks_of(store, number)).read_text(encoding='utf-8')}"
        for number, _ in running
    )


def _raise_first_cause(failures: dict[int, str], results: Any, ranks: list[Any]) -> None:
    """A rank whose peer died reports the broken connection: another's report, within two seconds,
    says more."""
    broken = re.compile(r"Connection (reset|closed|refused) by peer|Broken pipe")
    end = time.monotonic() + 2
    while all(broken.search(failure) for failure in failures.values()) and time.monotonic() < end:
        with suppress(queue.Empty):
            rank_id, good, value = results.get(timeout=0.1)
            failures |= {} if good else {rank_id: value}
    for rank_id, failure in failures.items():
        if not broken.search(failure):
            raise AssertionError(f"rank {rank_id} failed:\n{failure}")
    codes = [rank.exitcode for rank in ranks]
    raise AssertionError(
        f"ranks {sorted(failures)} lost a peer, exit codes "
        f"{codes}:\n{next(iter(failures.values()))}"
    )

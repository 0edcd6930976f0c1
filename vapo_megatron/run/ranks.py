"""The ranks of a run: starts and ends the ranks of one machine."""

import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from vapo_megatron import logs
from vapo_megatron.errors import BadInput, RunFailed, TryAgain, VapoError
from vapo_megatron.megatron.mesh import shorten_nccl_waits
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.run.failures import DeviceFault, LostPeer, explain
from vapo_megatron.run.launch_env import RankPlace, node_name
from vapo_megatron.run.watchdog import Hang
from vapo_megatron.signals import (
    STOP_SIGNALS,
    end_with_parent,
    heeded_signals,
    listen,
    stop_requested,
    stop_signals_blocked,
    take_note,
)

# Ranks of one job start together; one that is not there by then does not come.
_MEETING_TIMEOUT = timedelta(minutes=15)
# How long ranks wait for each other before they say so.
_SILENT_SECONDS = 30.0
# How long the end of a rank may take that others have noticed already.
_PATIENCE_SECONDS = 60
_LOOK_SECONDS = 2.0
# A rank found stopped this many times in a row counts as stuck. Counting seconds instead would
# blame a rank for the time its machine was suspended.
_STOPPED_LOOKS = 8
_PR_SET_NAME = 15
_GRACE_SECONDS = 15
# How the starter ends its processes; the stop signals ask for a save first.
_END_NOW = signal.SIGUSR2
# Exit code of a rank whose device is broken: slurm/lib.sh leaves its node out, and tries again as
# after 75.
DEVICE_FAULT = 76
# Exit code of a rank that failed because another one is missing: whoever started them may
# start them again.
LOST_A_PEER = 77


class RankKilled(TryAgain):
    """A signal ended or stopped a rank; all were ended for it."""


def run_as_rank(place: RankPlace, body: Callable[[], None], collective_timeout_s: float) -> None:
    """Join the world, run body, leave it in order.

    Raises:
        BadInput: this rank does not see its GPU.
    """
    logs.set_rank(place.rank)
    platform = current_platform()
    if platform.is_cuda and place.local_rank >= (seen := platform.device_count()):
        raise BadInput(
            f"it is number {place.local_rank} on {node_name()}, counted from 0, and sees {seen} "
            "GPUs: let every task see all GPUs of its node (no --gpus-per-task, no --gpu-bind, no "
            "CUDA_VISIBLE_DEVICES), and start no more tasks than there are GPUs"
        )
    platform.bind(place.local_rank)
    timeout = timedelta(seconds=collective_timeout_s)
    meeting = min(_MEETING_TIMEOUT, timeout)
    with _watched(place) if _started_elsewhere else nullcontext():
        store, rank, count = next(
            dist.rendezvous(place.init_method, place.rank, place.world_size, timeout=meeting)
        )
        store.set_timeout(timeout)
        dist.init_process_group(
            platform.world_backend, store=store, rank=rank, world_size=count, timeout=timeout
        )
    shorten_nccl_waits()
    body()
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _watched(place: RankPlace) -> Iterator[None]:
    """While the ranks meet: a stop signal ends this one at once, as there is nothing to save, and a
    long wait is reported. torch waits without running Python's signal handlers, but the signals'
    numbers reach a socket."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    me = f"rank {place.rank} on {node_name()}"
    if place.rank == 0:
        whom = "the other ranks"
    else:
        whom = "rank 0"
    where = (
        f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}"
    )
    advice = (
        f"see that all {place.world_size} ranks were started and that their nodes reach this "
        "address"
    )

    def watch() -> None:
        if not select.select([receiver], [], [], _SILENT_SECONDS)[0]:
            print(
                f"vapo-megatron: {me} still waits for {whom} ({where}): {advice}",
                file=sys.stderr,
                flush=True,
            )
        while received := receiver.recv(1):
            if received[0] in STOP_SIGNALS:
                end_from_thread(
                    TryAgain(f"{me}: {signal.Signals(received[0]).name} while it waited for {whom}")
                )

    if (earlier := stop_requested()) is not None:
        sender.send(bytes([signal.Signals[earlier]]))
    previous = signal.set_wakeup_fd(sender.fileno())
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        sender.close()


def run_as_external_rank(
    place: RankPlace, body: Callable[[], None], collective_timeout_s: float
) -> None:
    """run_as_rank where torchrun or Slurm started the ranks: a failure is printed and ends this
    process at once.

    The others hear of it through their broken connections, or from what started them (`srun
    --kill-on-bad-exit`, torchrun), and not only when a collective times out.
    """
    _tell.append(lambda error: print(f"vapo-megatron: {error}", file=sys.stderr, flush=True))
    _started_elsewhere.append(True)
    try:
        run_as_rank(place, body, collective_timeout_s)
    except VapoError as error:
        if str(error) and (place.rank == 0 or not error.shared):
            print(f"vapo-megatron: rank {place.rank}: {error}", file=sys.stderr, flush=True)
        leave(error.exit_code)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        failure = explain(error, _where(place))
        if failure is None:
            traceback.print_exc()
            leave(1)
        print(f"vapo-megatron: {failure}", file=sys.stderr)
        leave(DEVICE_FAULT if isinstance(failure, DeviceFault) else _code_of(failure))


def _code_of(error: VapoError) -> int:
    if _started_elsewhere and isinstance(error, LostPeer | Hang):
        return LOST_A_PEER
    return error.exit_code


def _where(place: RankPlace) -> str:
    if current_platform().is_cuda:
        device = f"cuda:{place.local_rank}"
    else:
        device = "CPU"
    return f"rank {place.rank} on {node_name()} ({device})"


def leave(code: int) -> NoReturn:
    """Flush the streams and end, without Python's exit handlers, which would wait for other ranks,
    and without waiting for threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_tell: list[Callable[[VapoError], None]] = []
_started_elsewhere: list[bool] = []


def end_from_thread(error: VapoError) -> NoReturn:
    """End this rank immediately, from any thread, and report why."""
    for tell in _tell:
        tell(error)
    leave(_code_of(error))


def _started_rank(
    place: RankPlace,
    body: Callable[[], None],
    collective_timeout_s: float,
    failures: Any,
    level: logs.LogLevel,
) -> None:
    begin_child(level)
    listen()
    logs.outlive_output()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _tell.append(lambda error: failures.put((place.rank, error)))
    try:
        run_as_rank(place, body, collective_timeout_s)
    except SystemExit:
        raise
    except BaseException as error:
        explained = error if isinstance(error, VapoError) else explain(error, _where(place))
        failure = explained or RunFailed(f"rank {place.rank}: {traceback.format_exc()}")
        failures.put((place.rank, failure))
        sys.exit(LOST_A_PEER if isinstance(failure, LostPeer) else failure.exit_code)


def start_ranks(
    count: int, body: Callable[[], None], collective_timeout_s: float, folder: Path | None = None
) -> None:
    """Run body on `count` ranks of this machine; forked where that is safe, which saves each of
    them the imports.

    The first rank to fail ends the others. A signal to stop is passed on to all of them, which save
    first; Ctrl-C ends them at once. They meet in a file in `folder`, which whoever made it removes;
    None: in one of temporary files.

    Raises:
        RankKilled: a signal killed one, or stopped it permanently.
        VapoError: what the first failing rank raised, or what its error means (cluster.failures);
            RunFailed with its stack trace for anything unforeseen.
    """
    context: Any = multiprocessing.get_context(current_platform().start_method)
    failures = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="vapo-ranks-", dir=folder) as meeting_place:
        meeting = f"file://{Path(meeting_place) / 'store'}"
        ranks = [
            context.Process(
                target=_started_rank,
                args=(
                    RankPlace(rank, count, rank, meeting),
                    body,
                    collective_timeout_s,
                    failures,
                    logs.configured_level(),
                ),
                name=f"rank{rank}",
            )
            for rank in range(count)
        ]
        with stop_signals_blocked():
            for rank in ranks:
                rank.start()

        def pass_on(number: int, frame: Any = None) -> None:
            take_note(number, frame)  # ranks that are killed meanwhile are not started again
            for rank in ranks:
                if rank.is_alive():
                    os.kill(rank.pid, number)

        previous = {number: signal.signal(number, pass_on) for number in heeded_signals()}
        if (earlier := stop_requested()) is not None:  # before there was anybody to pass it on to
            pass_on(signal.Signals[earlier])
        try:
            _wait(ranks, failures)
        finally:
            end_children(ranks)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _wait(ranks: list[Any], failures: Any) -> None:
    running = {rank.sentinel: rank for rank in ranks}
    errors: dict[str, VapoError] = {}
    lost: VapoError | None = None
    lost_at = 0.0
    stopped: Counter[str] = Counter()
    said = failures._reader
    while running:
        heard = multiprocessing.connection.wait([*running, said], _LOOK_SECONDS)
        ended = [sentinel for sentinel in heard if sentinel is not said]
        for sentinel in ended:
            running[sentinel].join()
        # Also of a rank that still runs: it cannot end before a long error has been read.
        while not failures.empty():
            number, error = failures.get()
            errors[f"rank{number}"] = error
        if not heard:
            _end_stopped(running.values(), stopped)
        if not heard and lost is not None and time.monotonic() > lost_at + _PATIENCE_SECONDS:
            raise lost
        for sentinel in ended:
            rank = running.pop(sentinel)
            if rank.exitcode == LOST_A_PEER:
                # The other's own end says more
                lost = lost or errors[rank.name]
                lost_at = lost_at or time.monotonic()
            elif rank.name in errors:
                raise errors[rank.name]
            elif rank.exitcode != 0:
                if rank.exitcode < 0:
                    raise _killed(rank)
                raise RunFailed(
                    f"{rank.name} ended with exit code {rank.exitcode} and said nothing"
                )
    if lost is not None:
        raise lost


def _end_stopped(ranks: Iterable[Any], looks: Counter[str]) -> None:
    """Kill a rank that is stopped in too many looks, which are counted by name. A debugger's stop
    does not count.

    Raises RankKilled for it.
    """
    for rank in ranks:
        is_stopped = psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED
        looks[rank.name] = looks[rank.name] + 1 if is_stopped else 0
        if looks[rank.name] >= _STOPPED_LOOKS:
            rank.kill()
            rank.join()
            raise RankKilled(
                f"{rank.name} (process {rank.pid}) was stopped by a signal (SIGSTOP) for "
                f"{_STOPPED_LOOKS * _LOOK_SECONDS:.0f} s and killed: start the same command again "
                "with run.resume=auto"
            )


def _killed(rank: Any) -> RankKilled:
    """The error for a rank that a signal ended; the run itself did nothing wrong."""
    name = signal.Signals(-rank.exitcode).name
    hint = ""
    if rank.exitcode == -signal.SIGKILL:
        hint = (
            "; if it happens again and the kernel's log names a lack of memory, lower "
            "actor.max_tokens_per_microbatch, reward.workers or rollout.max_total_tokens"
        )
    return RankKilled(
        f"{rank.name} was killed by {name} and said nothing: start the same command again with "
        f"run.resume=auto{hint}"
    )


def machine_default_ranks(model_sizes: list[int]) -> int:
    """Ranks to start by hand: every accelerator, or on the CPU just what the largest replica
    takes."""
    return current_platform().device_count() or max(model_sizes)


def begin_child(level: logs.LogLevel) -> None:
    """First thing in a child: it ends with its starter, however that one ends, and in order where
    that one asks.

    `ps -e` and `top` show its name.
    """
    # Inherited objects are never collected: the end of a process group waits for threads that exist
    # only in the process that made it.
    gc.freeze()
    end_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, multiprocessing.current_process().name.encode())
    logs.configure(level)  # a spawned process does not have it yet
    # Ctrl-C reaches the whole terminal group; the starter turns it into one orderly end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(_END_NOW, lambda *_: sys.exit(143))


def end_children(children: Iterable[Any]) -> None:
    """End processes in order, and those that do not by force."""
    children = list(children)
    for child in children:
        if child.is_alive():
            os.kill(child.pid, _END_NOW)
            os.kill(child.pid, signal.SIGCONT)  # one that is stopped would not hear of it
    for child in children:
        child.join(_GRACE_SECONDS)
        if child.is_alive():
            child.kill()
            child.join()

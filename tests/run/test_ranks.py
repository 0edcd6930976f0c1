"""Ranks start where they are told to, and the first that fails ends all of them with its own
words."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import ranks  # noqa: F401  (imports what ranks need before they are forked)
import torch
import torch.distributed as dist
from ports import free_port

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput, RunFailed, TryAgain, VapoError
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.monitoring.timers import PhaseTimer
from vapo_megatron.run import ranks as cluster_ranks
from vapo_megatron.run.launch_env import node_name, place_from_environment
from vapo_megatron.run.rank import train_rank
from vapo_megatron.run.ranks import (
    DEVICE_FAULT,
    LOST_A_PEER,
    RankKilled,
    RankPlace,
    run_as_external_rank,
    run_as_rank,
    start_ranks,
)
from vapo_megatron.signals import listen, stop_requested

pytestmark = pytest.mark.full

_PTRACE_ATTACH = 16
_PTRACE_DETACH = 17
_WAIT_FOR_ANY = 0x40000000


def write_rank(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(f"{os.getpid()} {dist.get_world_size()}")


def fail_on_one(folder: Path) -> None:
    write_rank(folder)
    if dist.get_rank() == 1:
        raise BadInput("data.train: there is no such file")
    time.sleep(60)


def killed_on_one(folder: Path) -> None:
    write_rank(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_every_rank_runs_once_in_one_world(tmp_path: Path) -> None:
    start_ranks(3, partial(write_rank, tmp_path), 60)
    found = {int(path.name): path.read_text().split() for path in tmp_path.iterdir()}
    assert sorted(found) == [0, 1, 2]
    assert {size for _, size in found.values()} == {"3"}
    assert len({pid for pid, _ in found.values()}) == 3


@pytest.mark.timeout(60)
def test_ranks_do_not_end_process_groups_they_were_forked_with(tmp_path: Path) -> None:
    """Its threads are not in them: they would wait for ever, at any collection of cycles."""
    gc.disable()
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
        )
        cycle: list[object] = [dist.group.WORLD]
        cycle.append(cycle)
        dist.destroy_process_group()
        del cycle
        start_ranks(2, lambda: print(gc.collect()), 60)
    finally:
        gc.enable()


def write_timeouts(folder: Path) -> None:
    mesh = make_mesh(LayoutConfig(tp=2))
    groups = [group for group in vars(mesh.pg).values() if isinstance(group, dist.ProcessGroup)]
    waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    (folder / str(dist.get_rank())).write_text(
        " ".join(str(wait.total_seconds()) for wait in waits)
    )


def test_every_group_waits_as_long_as_the_config_says(tmp_path: Path) -> None:
    start_ranks(2, partial(write_timeouts, tmp_path), 420)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["420.0", "420.0"]


@pytest.mark.parametrize(
    "body,error,message",
    [
        (fail_on_one, BadInput, r"^data\.train: there is no such file$"),
        (
            killed_on_one,
            TryAgain,
            r"rank1 was killed by SIGKILL and said nothing: start the same command again",
        ),
    ],
)
def test_the_first_failure_ends_all_ranks(
    tmp_path: Path, body: object, error: type[Exception], message: str
) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=message):
        start_ranks(3, partial(body, tmp_path), 60)  # type: ignore[operator]
    assert time.monotonic() - started < 45, "the others were waited for"
    for path in tmp_path.iterdir():
        assert not psutil.pid_exists(int(path.read_text().split()[0]))


def name_many_tensors() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError(f"Missing keys: {', '.join(f'layers.{i}.weight' for i in range(9999))}")
    dist.barrier()


@pytest.mark.timeout(60)
def test_an_error_longer_than_a_pipe_holds_is_told() -> None:
    """The rank cannot end before its starter has read it."""
    with pytest.raises(RunFailed, match=r"^rank 1: Traceback[^$]*layers\.0\.[^$]*layers\.9998\."):
        start_ranks(2, name_many_tensors, 60)


def stopped_on_one(folder: Path, seconds: float) -> None:
    """Rank 1 is stopped twice, and rank 0 continues it after `seconds`."""
    write_rank(folder)
    dist.barrier()
    for _ in range(2):
        if dist.get_rank() == 0:
            other = psutil.Process(int((folder / "1").read_text().split()[0]))
            while other.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            time.sleep(seconds)
            other.send_signal(signal.SIGCONT)
            time.sleep(0.2)
        else:
            time.sleep(0.6)  # the barrier is over for the other rank too, or it runs on for a while
            os.kill(os.getpid(), signal.SIGSTOP)


def traced_on_one(folder: Path) -> None:
    """Rank 0 holds rank 1 as a debugger does, longer than a rank may be stopped."""
    write_rank(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        ptrace = ctypes.CDLL(None).ptrace
        other = int((folder / "1").read_text().split()[0])
        if ptrace(_PTRACE_ATTACH, other, None, None) == 0:
            (folder / "attached").touch()
            os.waitpid(other, _WAIT_FOR_ANY)
            time.sleep(2)
            assert psutil.Process(other).status() == psutil.STATUS_TRACING_STOP
            ptrace(_PTRACE_DETACH, other, None, None)


@pytest.fixture
def looks_often(look_every: Callable[[float], None]) -> None:
    look_every(0.2)


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_is_stopped_for_good_counts_as_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(
        RankKilled,
        match=r"^rank1 \(process \d+\) was stopped by a signal \(SIGSTOP\) .*start the same",
    ):
        start_ranks(2, partial(stopped_on_one, tmp_path, 60.0), 60)
    assert time.monotonic() - began < 30
    for path in tmp_path.iterdir():
        assert not psutil.pid_exists(int(path.read_text().split()[0]))


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_is_stopped_for_moments_goes_on(tmp_path: Path) -> None:
    start_ranks(2, partial(stopped_on_one, tmp_path, 1.0), 60)


@pytest.mark.usefixtures("looks_often")
def test_a_rank_under_a_debugger_is_left_alone(tmp_path: Path) -> None:
    start_ranks(2, partial(traced_on_one, tmp_path), 60)
    if not (tmp_path / "attached").exists():
        pytest.skip("this system lets no process trace another")


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}


def test_a_world_that_somebody_else_started_is_joined() -> None:
    assert place_from_environment({}) is None
    assert place_from_environment({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    torchrun = place_from_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"} | MEETING)
    assert torchrun is not None
    assert (torchrun.rank, torchrun.world_size, torchrun.local_rank, torchrun.init_method) == (
        3,
        8,
        1,
        "env://",
    )
    place = place_from_environment(SLURM | MEETING)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.init_method) == (
        9,
        16,
        1,
        "tcp://127.0.0.1:29500",
    )


@pytest.mark.parametrize("given", [{"RANK": "3", "WORLD_SIZE": "8"}, SLURM])
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', expected a number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536', expected a number"),
        (
            {"RANK": "8", "SLURM_PROCID": "16"},
            "(RANK|SLURM_PROCID)=(8|16) with .*: ranks count from 0",
        ),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR=a b: .* knows no such host"),
    ],
)
def test_a_place_where_ranks_cannot_meet_is_refused(
    given: dict[str, str], wrong: dict[str, str], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        place_from_environment(given | MEETING | wrong)


def cuda_error(code: int, text: str) -> torch.AcceleratorError:
    """As torch raises it: it hangs the number onto the error."""
    error = torch.AcceleratorError(
        f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported"
    )
    error.error_code = code  # type: ignore[attr-defined]
    return error


def lack_memory() -> None:
    with PhaseTimer()("step"), PhaseTimer()("update_policy"):
        torch.empty(1 << 50, dtype=torch.uint8)


def lack_device_memory() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 79.11 GiB "
        "of which 1.19 GiB is free. Including non-PyTorch memory, this process has 77.91 GiB "
        "memory in use."
    )


def raise_it(error: Exception) -> None:
    raise error


ECC = cuda_error(214, "uncorrectable ECC error encountered")
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.7\nLast error:\n{}"
ENDS: dict[str, tuple[Callable[[], None], type[VapoError] | None, int, tuple[str, ...]]] = {
    # What rank 1 does; how the run ends (None: with a stack trace); exit code of the rank; what is
    # told of it.
    "memory": (
        lack_memory,
        RunFailed,
        1,
        ("in the phase update_policy", "1048576.00 GiB", "max_tokens_per_microbatch"),
    ),
    "device memory": (
        lack_device_memory,
        RunFailed,
        1,
        ("2.50 GiB", "1.19 GiB of 79.11 GiB were free", "plan CONFIG"),
    ),
    "ecc": (partial(raise_it, ECC), TryAgain, DEVICE_FAULT, ("the device failed", "ECC", "doctor")),
    "nccl ecc": (
        partial(
            raise_it,
            dist.DistBackendError(
                NCCL.format("unhandled cuda error", "Cuda failure 214 'uncorrectable ECC error'")
            ),
        ),
        TryAgain,
        DEVICE_FAULT,
        ("the device failed",),
    ),
    "kernel": (
        partial(raise_it, cuda_error(700, "an illegal memory access")),
        TryAgain,
        75,
        ("illegal memory",),
    ),
    "assertion": (
        partial(raise_it, cuda_error(710, "device-side assert triggered")),
        None,
        1,
        ("Traceback",),
    ),
    "nccl": (
        partial(
            raise_it,
            dist.DistBackendError(NCCL.format("remote process exited", "socketPollConnect failed")),
        ),
        TryAgain,
        LOST_A_PEER,
        ("lost another",),
    ),
    "nccl misuse": (
        partial(
            raise_it,
            dist.DistBackendError(NCCL.format("ncclInvalidUsage", "Duplicate GPU detected")),
        ),
        None,
        1,
        ("Traceback", "Duplicate GPU"),
    ),
    "store": (
        partial(raise_it, dist.DistStoreError("wait timeout after 1000ms")),
        TryAgain,
        LOST_A_PEER,
        ("lost another",),
    ),
    "network": (
        partial(raise_it, dist.DistNetworkError("failed to recv")),
        TryAgain,
        LOST_A_PEER,
        ("lost another",),
    ),
    "mistake": (
        partial(raise_it, KeyError("no such field")),
        None,
        1,
        ("Traceback", "no such field"),
    ),
}


def end_on_one(end: Callable[[], None]) -> None:
    """Rank 1 ends so; the other one, once it was ended too, waits for it in a collective."""
    if dist.get_rank() == 1:
        end()
    dist.barrier()


@pytest.mark.parametrize("name", ENDS)
def test_what_an_error_means_where_the_ranks_were_started_here(name: str) -> None:
    end, kind, _, told = ENDS[name]
    with pytest.raises(kind or RunFailed) as ended:
        start_ranks(2, partial(end_on_one, end), 60)
    said = str(ended.value)
    assert all(words in said for words in told), said
    if kind is not None:
        teller = "[01]" if "lost another" in told[0] else "1"  # rank 0 then loses rank 1
        assert "\n" not in said and re.match(rf"rank {teller} on {node_name()} \(CPU\): ", said)


@pytest.mark.parametrize("name", ["device memory", "ecc", "assertion", "nccl"])
def test_meaning_of_error_where_another_launcher_started_ranks(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    end, kind, code, told = ENDS[name]
    codes, output = foreign_ranks(tmp_path, partial(end_on_one, end))
    assert codes[1] == code
    assert codes[0] == LOST_A_PEER and "rank 0 on node7 (CPU): lost another rank" in output[0], (
        "it lost rank 1"
    )
    assert all(words in output[1] for words in told), output[1]
    if kind is not None:
        assert re.fullmatch(r"vapo-megatron: rank 1 on node7 \(CPU\): [^\n]*\n", output[1])


def test_rank_that_loses_a_killed_one_asks_to_be_restarted(tmp_path: Path) -> None:
    codes, output = foreign_ranks(tmp_path, partial(end_on_one, kill_myself))
    assert codes == [LOST_A_PEER, -signal.SIGKILL]
    assert "lost another rank" in output[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_request_keeps_its_name_on_the_way_to_the_ranks(number: signal.Signals) -> None:
    with pytest.raises(TryAgain, match=f"^{number.name}$"):
        start_ranks(2, partial(ask_the_starter, number), 60)


def ask_the_starter(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getppid(), number)
    while (name := stop_requested()) is None:
        time.sleep(0.01)
    raise TryAgain(name)


@pytest.mark.parametrize("before", [False, True], ids=["while it waits", "before it waits"])
def test_rank_waiting_for_another_says_so_and_stops_on_signal(
    tmp_path: Path, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_ranks, "_SILENT_SECONDS", 1.0)
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    output = tmp_path / "output"
    process = multiprocessing.get_context("fork").Process(target=lonely_rank, args=(output, before))
    process.start()
    try:
        deadline = time.monotonic() + 120
        while not before and "still waits" not in (output.read_text() if output.exists() else ""):
            assert time.monotonic() < deadline and process.is_alive()
            time.sleep(0.05)
        if not before:
            os.kill(process.pid or 0, signal.SIGTERM)
        process.join(20)
        assert process.exitcode == TryAgain.exit_code, "it waits for 15 minutes else"
    finally:
        process.kill()
    said = output.read_text().splitlines()
    waits = (
        f"vapo-megatron: rank 1 on {node_name()} still waits for rank 0 (MASTER_ADDR=127.0.0.1, "
        f"MASTER_PORT={port})"
    )
    assert [line.startswith(waits) for line in said] == ([False] if before else [True, False])
    assert said[-1] == f"vapo-megatron: rank 1 on {node_name()}: SIGTERM while it waited for rank 0"


def lonely_rank(output: Path, before: bool) -> None:
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    listen()
    if before:
        os.kill(os.getpid(), signal.SIGTERM)
        while stop_requested() is None:
            time.sleep(0.01)
    place = place_from_environment({**os.environ, "RANK": "1", "WORLD_SIZE": "2"})
    assert place is not None
    run_as_external_rank(
        replace(place, init_method="tcp://127.0.0.1:" + os.environ["MASTER_PORT"]),
        lambda: None,
        900,
    )


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def foreign_ranks(folder: Path, body: Callable[[], None]) -> tuple[list[Any], list[str]]:
    """Exit codes and standard error of two ranks that nobody watches."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=foreign_rank, args=(folder, rank, body)) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in started], [
        (folder / f"said{rank}").read_text() for rank in range(2)
    ]


def foreign_rank(folder: Path, rank: int, body: Callable[[], None]) -> NoReturn:
    said = os.open(folder / f"said{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    sys.stderr = os.fdopen(2, "w")
    run_as_external_rank(RankPlace(rank, 2, rank, f"file://{folder / 'store'}"), body, 60)
    os._exit(0)


def config_of_rank(config: TrainConfig, folder: Path) -> None:
    (folder / "config").write_text(
        f"{config.run.name} {multiprocessing.get_start_method(allow_none=True)}"
    )


def test_a_task_that_does_not_see_its_gpu_says_how_to_ask_for_it(
    gpus: Callable[[int], None],
) -> None:
    gpus(1)  # as with --gpus-per-task=1
    with pytest.raises(
        BadInput, match=r"number 3 on \S+, counted from 0, and sees 1 GPUs: .*--gpus-per-task"
    ):
        run_as_rank(RankPlace(11, 16, 3, "env://"), lambda: None, 10.0)


@pytest.mark.timeout(60)
def test_ranks_can_be_started_afresh_as_gpus_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA does not survive a fork: what a rank is given has to travel."""
    monkeypatch.setattr(cluster_ranks, "current_platform", lambda: Platform("cpu", "gloo", "spawn"))
    parts = {"run": {"name": "afresh"}, "model": {"path": "m"}, "data": {"train": "d"}}
    config = TrainConfig.model_validate({**parts, "sampling": {"max_new_tokens": 16}})
    pickle.dumps(partial(train_rank, config))
    start_ranks(1, partial(config_of_rank, config, tmp_path), 60)
    assert (tmp_path / "config").read_text() == "afresh spawn"

"""Measures the bandwidth of an all-reduce in processes that can be killed, and reads which network
NCCL chose.

Entry: python -m vapo_megatron.operations.doctor.allreduce DEVICE RANK WORLD HOST PORT
The last line it prints is bytes per second.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from vapo_megatron.operations.doctor.nodes import Line, Status, lines_of

_ROUNDS = 10
_SECONDS = 180.0
_REDUCED = {"cuda": 1 << 28, "cpu": 1 << 22}
# Below these shares of the expected bandwidth a line is a warning, or a fault.
_WARNING = 0.8
_FAULT = 0.5


class Reduced(NamedTuple):
    """Result of one process: bytes per second, or an error; network: as NCCL names it, "IB" or
    "Socket"."""

    rate: float
    error: str = ""
    network: str = ""


def measure(
    count: int,
    on_gpus: bool,
    first: int,
    world: int,
    host: str,
    port: int,
    deadline: float = _SECONDS,
) -> list[Reduced]:
    """Measure with `count` processes, ranks `first` and up of `world`; those that take too long are
    killed."""
    # The store that torchrun serves is for its ranks: with this variable nobody would serve one
    # here.
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHELASTIC_USE_AGENT_STORE"
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
    }
    processes = []
    for index in range(count):
        command = [
            sys.executable,
            "-m",
            __name__,
            f"cuda:{index}" if on_gpus else "cpu",
            str(first + index),
        ]
        command += [str(world), host, str(port)]
        processes.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
        )
    return results(processes, deadline)


def results(processes: Sequence["subprocess.Popen[str]"], deadline: float) -> list[Reduced]:
    """The result of each process; all have ended when this returns."""

    def result(process: "subprocess.Popen[str]") -> Reduced:
        try:
            output, error = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            return Reduced(0.0, f"no answer within {deadline:g} s")
        if process.returncode:
            last = (error.strip().splitlines() or ["no word"])[-1]
            return Reduced(0.0, f"exit code {process.returncode}: {last[:200]}")
        network = re.search(r"(?:Using network|Assigned NET plugin) (\w+)", output)
        return Reduced(float(output.split()[-1]), network=network[1] if network else "")

    # One after another, a process whose pipe is full would keep the one that is read waiting.
    with ThreadPoolExecutor(len(processes)) as readers:
        try:
            return list(readers.map(result, processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()


def judge(
    measured: Sequence[Reduced], expected: float | None, remedy: str, beside_adapters: bool = False
) -> list[Line]:
    """The line of an all-reduce; expected: bytes per second, None if unknown.

    beside_adapters: whether this node has active adapters of InfiniBand or RoCE, which NCCL should
        take.
    """
    failed = [index for index, result in enumerate(measured) if result.error]
    if failed:
        finding = (
            f"device {failed[0]} ({len(failed)} of {len(measured)}): {measured[failed[0]].error}"
        )
        return [Line("fault", finding, remedy)]
    slowest = min(result.rate for result in measured)
    network = measured[0].network
    finding = f"{slowest / 1e9:.1f} GB/s{network and f' over {network}'}"
    if beside_adapters and network == "Socket":
        return [Line("fault", f"{finding}: NCCL uses TCP despite active adapters", remedy)]
    if expected is None:
        return [Line("ok", f"{finding}; nothing to compare with")]
    finding += f", expected {expected / 1e9:.1f}"
    status: Status = "fault" if slowest < _FAULT * expected else "warning"
    return lines_of(finding, (slowest < _WARNING * expected, status, finding, remedy))


def allreduce_rate(device: str, rank: int, world: int, host: str, port: int) -> float:
    """Bus bandwidth in bytes per second: what each link has to carry, 2 (n - 1) / n of the bytes
    that are summed.

    Raises:
        RuntimeError: the sum is wrong.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=2),
    )
    values = torch.full((_REDUCED[kind] // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = world * (world + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(f"all-reduce gave {values[0].item()} where the sum is {expected}")
    values.zero_()
    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(values)
    wait()
    seconds = time.perf_counter() - started
    dist.barrier()
    dist.destroy_process_group()
    return 2 * (world - 1) / world * values.nbytes * _ROUNDS / seconds


if __name__ == "__main__":
    device_name, own_rank, count, address, number = sys.argv[1:]
    print(f"\n{allreduce_rate(device_name, int(own_rank), int(count), address, int(number))}")

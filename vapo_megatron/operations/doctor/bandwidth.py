"""Bandwidth of a device's memory and of all-reduce, measured in processes of their own, which can be killed.

Entry: python -m vapo_megatron.operations.doctor.bandwidth memory DEVICE
       python -m vapo_megatron.operations.doctor.bandwidth allreduce DEVICE RANK WORLD HOST PORT
Either prints one number, bytes per second.
"""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from vapo_megatron.operations.doctor.report import Line

_ROUNDS = 10
_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
_REDUCED = {"cuda": 1 << 28, "cpu": 1 << 22}
# Below these parts of what is expected a line is a warning, or a fault.
_WARNING, _FAULT = 0.8, 0.5
# A device this much slower than the middle one of its node is broken, whatever is expected.
_OUTLIER = 0.85


def start(arguments: Sequence[object]) -> "subprocess.Popen[str]":
    """A process of this module."""
    # The store that torchrun serves is for its ranks: with this variable nobody would serve one here.
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_USE_AGENT_STORE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "vapo_megatron.operations.doctor.bandwidth", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def answers(processes: Sequence["subprocess.Popen[str]"], deadline: float) -> list[float | str]:
    """Of each process its number, or the last line of what it said instead; killed after `deadline` seconds."""
    end, found = time.monotonic() + deadline, list[float | str]()
    try:
        for process in processes:
            try:
                out, error = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                found.append(f"no answer within {deadline:g} s")
                continue
            last = (error.strip().splitlines() or ["no word"])[-1]
            found.append(float(out) if process.returncode == 0 else f"exit code {process.returncode}: {last[:200]}")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    return found


def free_port() -> int:
    """One that was free just now, on all addresses of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def judge(found: Sequence[float | str], expected: float | None, remedy: str) -> list[Line]:
    """A line on the rates of a node's devices; expected: bytes per second, None where nothing is known."""
    silent = {number: said for number, said in enumerate(found) if isinstance(said, str)}
    if silent:
        number, said = next(iter(silent.items()))
        return [Line("fault", f"device {number} ({len(silent)} of {len(found)}): {said}", remedy)]
    rates = [rate for rate in found if isinstance(rate, float)]
    slowest, middle = min(rates), statistics.median(rates)
    said = f"{slowest / 1e9:.1f} GB/s"
    if len(rates) > 1:
        said += f" at least, {middle / 1e9:.1f} in the middle"
    if slowest < _OUTLIER * middle:
        return [Line("fault", f"device {rates.index(slowest)} reaches {said}", remedy)]
    if expected is None:
        return [Line("ok", f"{said}; nothing to compare with")]
    said += f", expected {expected / 1e9:.1f}"
    if slowest < _WARNING * expected:
        return [Line("fault" if slowest < _FAULT * expected else "warning", said, remedy)]
    return [Line("ok", said)]


def memory_rate(device: str) -> float:
    """Bytes read and written a second by a copy within a device's memory."""
    kind = torch.device(device).type
    source = torch.zeros(_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    _wait(kind)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        target.copy_(source)
    _wait(kind)
    return 2 * source.nbytes * _ROUNDS / (time.perf_counter() - started)


def allreduce_rate(device: str, rank: int, world: int, host: str, port: int) -> float:
    """Bus bandwidth in bytes per second: what each link has to carry, 2 (n - 1) / n of the bytes that are summed.

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
    _wait(kind)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(values)
    _wait(kind)
    seconds = time.perf_counter() - started
    dist.barrier()
    dist.destroy_process_group()
    return 2 * (world - 1) / world * values.nbytes * _ROUNDS / seconds


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    kind, device, *rest = arguments
    if kind == "memory":
        print(memory_rate(device))
    else:
        rank, world, host, port = rest
        print(allreduce_rate(device, int(rank), int(world), host, int(port)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Faults of engines and of what surrounds a run, laid before its ranks are forked."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import attempts
import psutil

from vapo_megatron.engines.server.client import EngineClient

_RESET_SECONDS = 0.05
_SLOW_SECONDS = 0.5


def processes_of(url: str) -> dict[str, int]:
    """Process ids of the server that listens at a URL, by role, on any rank of this job."""
    for process in psutil.process_iter():
        try:
            if (
                "vapo_megatron.engines.inside.server_main" not in process.cmdline()
                or url.rpartition(":")[2] not in process.cmdline()
            ):
                continue
            scratch = Path(process.environ()["TMPDIR"])
        except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
            continue
        names = [path.name.split("-") for path in scratch.glob("process-*")]
        return {role: int(pid) for _, role, pid in names} | {"server": process.pid}
    raise AssertionError(f"no server at {url}")


def disturb(faults: dict[int, tuple[str, int]]) -> None:
    """Before its n-th request of generation is answered, do something to the server that is
    asked."""
    generate = EngineClient.generate
    calls = 0

    async def disturbed(client: EngineClient, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in faults:
            role, number = faults[calls]
            if number:
                os.kill(processes_of(client.address.url)[role], number)
            else:
                completions = await generate(client, *args, **kwargs)
                for completion in completions:
                    completion.weight_version_oldest -= 1
                return completions
        return await generate(client, *args, **kwargs)

    EngineClient.generate = disturbed  # type: ignore[method-assign]


def reset_connections(every: int) -> None:
    """Cut the connection of each `every`-th request of generation soon after it was sent, and all
    others with it."""
    generate = EngineClient.generate
    calls = 0

    async def cut(client: EngineClient, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        work = asyncio.ensure_future(generate(client, *args, **kwargs))
        if calls % every == 0:
            await asyncio.sleep(_RESET_SECONDS)
            await client.close()
        return await work

    EngineClient.generate = cut  # type: ignore[method-assign,assignment]


def slow_down_the_disk() -> None:
    """Each wait for the disk takes a while."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(_SLOW_SECONDS)
        fsync(descriptor)

    os.fsync = slow  # type: ignore[assignment]


def set_the_clock(after: float, by: float) -> None:
    """The time of day jumps once, for all processes of the run that are forked."""
    clock = time.time
    jumps_at = time.monotonic() + after
    time.time = lambda: clock() + (by if time.monotonic() > jumps_at else 0.0)


def same_run(run_dir: Path, undisturbed: Path) -> list[dict[str, Any]]:
    """The rows of a run whose weights and metrics equal the undisturbed one's to the bit."""
    rows = attempts.metrics(run_dir)
    expected = attempts.metrics(undisturbed)
    for row, other in zip(rows, expected, strict=True):
        apart = {name for name in row.keys() | other.keys() if row.get(name) != other.get(name)}
        # Asked to stop while its only engine started: nobody was probed
        if row.get("rollout/engines") == 0:
            apart = {
                name for name in apart if not name.startswith("rollout/train_infer_logprob_diff")
            }
        assert apart <= {"rollout/engine_failures", "rollout/engines"}, apart
    for path in sorted((undisturbed / "hf").rglob("*.safetensors")):
        assert path.read_bytes() == (run_dir / path.relative_to(undisturbed)).read_bytes(), path
    return rows

"""Faults of engines, laid before the ranks of a run are forked."""

import os
from pathlib import Path
from typing import Any

import attempts
import psutil

from vapo_megatron.rollout.client import EngineClient


def processes_of(url: str) -> dict[str, int]:
    """Process ids of the server that listens at a URL, by role; those of any rank of this job."""
    for process in psutil.process_iter():
        try:
            if (
                "vapo_megatron.engine.server_main" not in process.cmdline()
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
    """Before its n-th request of generation is answered, do something to the server that is asked."""
    generate, calls = EngineClient.generate, 0

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


def same_run(run_dir: Path, undisturbed: Path) -> list[dict[str, Any]]:
    """The rows of a run whose weights and metrics equal those of the undisturbed one to the bit."""
    rows, expected = attempts.metrics(run_dir), attempts.metrics(undisturbed)
    for row, other in zip(rows, expected, strict=True):
        apart = {name for name in row.keys() | other.keys() if row.get(name) != other.get(name)}
        assert apart <= {"rollout/engine_failures", "rollout/engines", "alarm/engine_failures"}, apart
    for path in sorted((undisturbed / "hf").rglob("*.safetensors")):
        assert path.read_bytes() == (run_dir / path.relative_to(undisturbed)).read_bytes(), path
    return rows

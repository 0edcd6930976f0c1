"""Running jobs: a few at once, each after those that it needs; finished ones are skipped, failed
ones remembered.

A job is a command, run in a fork of this process, which has imported the program once for all of
them. Jobs that draw responses share an engine, started by `vapo-megatron engine` for as long as
jobs want one of its kind.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.ablation.forked import Forked, SharedEngine, of_engine
from examples.ablation.plan import Job
from vapo_megatron.files import atomic_write

POLL_SECONDS = 0.2
COSTS_FILE = "costs.json"


@dataclass
class Outcome:
    """What became of the jobs: names of those that ran well, were there already, were refused, or
    failed."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    job: Job
    process: Forked
    started: float
    engine: SharedEngine | None
    engine_cpu: float


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """The jobs still to run: those whose results are not there, and all that need one of these."""
    again: dict[str, Job] = {}
    for job in jobs:
        if any(name in again for name in job.needs) or not job.finished():
            again[job.name] = job
    return list(again.values())


def as_it_stands(jobs: Sequence[Job]) -> Outcome:
    """What is finished and what would be refused, without running anything."""
    waiting = {job.name: job for job in unfinished(jobs)}
    ready = [job for job in waiting.values() if not any(name in waiting for name in job.needs)]
    refused = {job.name: reason for job in ready if (reason := job.refusal())}
    return Outcome(skipped=[job.name for job in jobs if job.name not in waiting], refused=refused)


def execute(jobs: Sequence[Job], workers: int, out: Path, say: Callable[[str], None]) -> Outcome:
    """Run what is unfinished; a failed job does not stop the others, save those that need it.

    What each job cost goes into out/costs.json, its output into out/logs/. Interrupted
    (KeyboardInterrupt), the running jobs are told to end and waited for; the next call goes on from
    there.
    """
    waiting, running = unfinished(jobs), list[_Running]()
    open_names = {job.name for job in waiting}
    outcome = Outcome(skipped=[job.name for job in jobs if job.name not in open_names])
    total = len(waiting)
    engines = [SharedEngine(out / "logs" / f"engine_{number}.log") for number in range(workers)]
    try:
        while waiting or running:
            for entry in [entry for entry in running if not entry.process.is_alive()]:
                running.remove(entry)
                _settle(entry, out, outcome)
                _report(entry, outcome, total, waiting, running, workers, out, say)
            for job in [
                job for job in waiting if any(name in outcome.failed for name in job.needs)
            ]:
                waiting.remove(job)
                outcome.failed[job.name] = (
                    f"needs {', '.join(n for n in job.needs if n in outcome.failed)}"
                )
            unsettled = {job.name for job in waiting} | {entry.job.name for entry in running}
            ready = [job for job in waiting if not unsettled & set(job.needs)]
            for job in ready[: workers - len(running)]:
                waiting.remove(job)
                if reason := job.refusal():
                    outcome.refused[job.name] = reason
                    say(f"NOT RUN {job.name}: {reason}")
                else:
                    running.append(_start(job, out, engines, [entry.engine for entry in running]))
            time.sleep(POLL_SECONDS)
    finally:
        for entry in running:
            entry.process.end()
        for engine in engines:
            engine.close()
    return outcome


def costs(out: Path) -> dict[str, dict[str, float]]:
    """Of each job that has run, by name: `seconds` by the clock, and `cpu_seconds`, the engine's
    included."""
    path = out / COSTS_FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def _start(
    job: Job, out: Path, engines: list[SharedEngine], taken: list[SharedEngine | None]
) -> _Running:
    arguments = ("run.overwrite=true",) if (job.directory / "config.yaml").is_file() else ()
    engine = None
    if job.engine:
        engine = next(each for each in engines if each not in taken)
        arguments = (*arguments, *of_engine(engine.serving(job.engine)))
    process = Forked((*job.argv, *arguments), out / "logs" / f"{job.name.replace('/', '-')}.log")
    return _Running(job, process, time.monotonic(), engine, engine.cpu_seconds() if engine else 0.0)


def _settle(entry: _Running, out: Path, outcome: Outcome) -> None:
    job, process = entry.job, entry.process
    if process.exitcode == 0 and job.finished():
        outcome.done.append(job.name)
        engine = entry.engine.cpu_seconds() - entry.engine_cpu if entry.engine else 0.0
        seconds = time.monotonic() - entry.started
        cost = {
            "seconds": round(seconds, 1),
            "cpu_seconds": round(process.cpu_seconds() + engine, 1),
        }
        with atomic_write(out / COSTS_FILE) as file:
            json.dump(costs(out) | {job.name: cost}, file, indent=1)
        return
    lines = process.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    reason = (
        lines[-1]
        if process.exitcode
        else "it ended well, but its results are not those that were asked for"
    )
    outcome.failed[job.name] = f"exit code {process.exitcode}: {reason} (all of it: {process.log})"


def _report(
    entry: _Running,
    outcome: Outcome,
    total: int,
    waiting: Sequence[Job],
    running: Sequence[_Running],
    workers: int,
    out: Path,
    say: Callable[[str], None],
) -> None:
    job, now = entry.job, time.monotonic()
    settled = len(outcome.done) + len(outcome.failed) + len(outcome.refused)
    taken = {name: cost["seconds"] for name, cost in costs(out).items()}
    left = time_left(
        waiting, [(e.job, now - e.started) for e in running], workers, pace(taken, waiting)
    )
    word = "done" if job.name in outcome.done else "FAILED"
    say(
        f"[{settled:>3}/{total}] {word} {job.name:<36} {now - entry.started:5.0f} s   about "
        f"{left / 60:.0f} min left"
    )


def pace(taken: dict[str, float], waiting: Sequence[Job]) -> Callable[[Job], float]:
    """Seconds to expect of a job: what its like took at other seeds, or runs on average, or the
    plan's guess."""
    alike: dict[str, list[float]] = {}
    for name, seconds in taken.items():
        alike.setdefault(_kind(name), []).append(seconds)
    rows = {_kind(job.name) for job in waiting if job.seconds == max(j.seconds for j in waiting)}
    of_rows = [seconds for kind, found in alike.items() if kind in rows for seconds in found]

    def expected(job: Job) -> float:
        kind = _kind(job.name)
        found = alike.get(kind) or (of_rows if kind in rows else [])
        return sum(found) / len(found) if found else job.seconds

    return expected


def _kind(name: str) -> str:
    """A job's name without its seed: steps/seed1/vapo -> steps/vapo."""
    first, _, last = name.split("/")
    return f"{first}/{last}"


def time_left(
    waiting: Sequence[Job],
    running: Sequence[tuple[Job, float]],
    workers: int,
    expected: Callable[[Job], float],
) -> float:
    """Seconds until the last job ends. running: jobs and the seconds that they have run."""
    work = sum(expected(job) for job in waiting) + sum(
        max(0.0, expected(job) - gone) for job, gone in running
    )
    return work / workers

"""Running jobs: a few at once, each after those that it needs; finished ones are skipped, failed ones remembered."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.ablation.plan import ROOT, Job
from vapo_megatron.config.atomic import atomic_write

POLL_SECONDS = 0.2
SECONDS_FILE = "seconds.json"
TERMINATE_SECONDS = 30


@dataclass
class Outcome:
    """What became of the jobs: names of those that ran well, were there already, were refused, or failed."""

    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen
    started: float
    log: Path


def unfinished(jobs: Sequence[Job]) -> list[Job]:
    """The jobs still to run: those whose results are not there, and all that need one of these."""
    again: dict[str, Job] = {}
    for job in jobs:
        if any(name in again for name in job.needs) or not job.finished():
            again[job.name] = job
    return list(again.values())


def execute(jobs: Sequence[Job], workers: int, out: Path, say: Callable[[str], None]) -> Outcome:
    """Run what is unfinished; a failed job does not stop the others, save those that need it.

    Seconds that each job took go into out/seconds.json, its output into out/logs/. Interrupted (KeyboardInterrupt),
    the running jobs are told to end and waited for; the next call goes on from there.
    """
    waiting, running = unfinished(jobs), list[_Running]()
    open_names = {job.name for job in waiting}
    outcome = Outcome(skipped=[job.name for job in jobs if job.name not in open_names])
    total = len(waiting)
    try:
        while waiting or running:
            for entry in [entry for entry in running if entry.process.poll() is not None]:
                running.remove(entry)
                _settle(entry, out, outcome)
                _report(entry, outcome, total, waiting, running, workers, out, say)
            for job in [job for job in waiting if any(name in outcome.failed for name in job.needs)]:
                waiting.remove(job)
                outcome.failed[job.name] = f"needs {', '.join(n for n in job.needs if n in outcome.failed)}"
            unsettled = {job.name for job in waiting} | {entry.job.name for entry in running}
            ready = [job for job in waiting if not unsettled & set(job.needs)]
            for job in ready[: workers - len(running)]:
                waiting.remove(job)
                if reason := job.refusal():
                    outcome.refused[job.name] = reason
                    say(f"NOT RUN {job.name}: {reason}")
                else:
                    running.append(_start(job, out))
            time.sleep(POLL_SECONDS)
    finally:
        _end(running)
    return outcome


def seconds_taken(out: Path) -> dict[str, float]:
    """Seconds of each job that has run, by name."""
    path = out / SECONDS_FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def _start(job: Job, out: Path) -> _Running:
    overwrite = ("run.overwrite=true",) if (job.directory / "config.yaml").is_file() else ()
    log = out / "logs" / f"{job.name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [*job.argv, *overwrite],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return _Running(job, process, time.monotonic(), log)


def _settle(entry: _Running, out: Path, outcome: Outcome) -> None:
    job, code = entry.job, entry.process.returncode
    if code == 0 and job.finished():
        outcome.done.append(job.name)
        taken = seconds_taken(out) | {job.name: round(time.monotonic() - entry.started, 1)}
        with atomic_write(out / SECONDS_FILE) as file:
            json.dump(taken, file, indent=1)
        return
    lines = entry.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    reason = lines[-1] if code else "it ended well, but its results are not those that were asked for"
    outcome.failed[job.name] = f"exit code {code}: {reason} (all of it: {entry.log})"


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
    left = time_left(waiting, [(e.job, now - e.started) for e in running], workers, pace(seconds_taken(out), waiting))
    word = "done" if job.name in outcome.done else "FAILED"
    say(f"[{settled:>3}/{total}] {word} {job.name:<36} {now - entry.started:5.0f} s   about {left / 60:.0f} min left")


def pace(taken: dict[str, float], waiting: Sequence[Job]) -> Callable[[Job], float]:
    """Seconds to expect of a job: what its like took at other seeds, or runs on average, or the plan's guess."""
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
    waiting: Sequence[Job], running: Sequence[tuple[Job, float]], workers: int, expected: Callable[[Job], float]
) -> float:
    """Seconds until the last job ends. running: jobs and the seconds that they have run."""
    work = sum(expected(job) for job in waiting) + sum(max(0.0, expected(job) - gone) for job, gone in running)
    return work / workers


def _end(running: Sequence[_Running]) -> None:
    for entry in running:
        entry.process.terminate()
    for entry in running:
        try:
            entry.process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            entry.process.kill()
            entry.process.wait()

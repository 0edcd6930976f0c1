"""What a user of a cluster has: a folder, a config, the batch scripts, and eyes on the jobs."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from sandbox import SlurmSandbox
from tiny_runs import make_model, train_config, write_config

ROOT = Path(__file__).parents[2]
# More than any story waits for; what ends a run is changed under way.
FOREVER = 1_000_000
_PATIENCE_SECONDS = 420


class Site:
    """One user's folder on a Slurm. Use as a context manager: jobs that are left at its end are
    cancelled."""

    def __init__(self, slurm: SlurmSandbox, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.runs = folder / "runs"
        self.model = make_model(folder / "model")
        # Engines keep sockets in it, whose paths must be short.
        self.local_tmp = Path(tempfile.mkdtemp(prefix="vapo-local-"))

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.slurm.wait_until("every job has ended", self._all_ended, 120)
        finally:
            shutil.rmtree(self.local_tmp)

    def _all_ended(self) -> bool:
        """After asking for it again: one that is being requeued would start once more."""
        if left := self.slurm.call("squeue", "--noheader", "--format=%A").split():
            with suppress(subprocess.CalledProcessError):  # it ended in the meantime
                self.slurm.call("scancel", *left)
        return not left

    def train_config(self, steps: int, engines: int, every: int = 1) -> Path:
        """A tiny run over two ranks that saves its state after every step, or every so many."""
        config = train_config(self.folder, self.model)
        config["run"]["steps"] = steps
        config["data"]["eval"] = []
        config["rollout"] = {"num_engines": engines}
        config["value_pretraining"] = {"iterations": 2, "replay_epochs": 1, "minibatch_size": 8}
        config["export"] = {"critic": False}
        config["checkpoint"] = {"every": every, "every_minutes": None}
        return write_config(self.folder / "train.yaml", config)

    def submit(
        self,
        script: str,
        config: Path,
        options: Sequence[str],
        arguments: Sequence[str] = (),
        **settings: str,
    ) -> str:
        """The id of a job, submitted as a user does; settings are those at the top of the
        script."""
        environment = {
            "CONFIG": str(config),
            "EVALUATION_CONFIG": str(config),
            "RUNS": str(self.runs),
            "VENV": sys.prefix,
            "LOCAL_TMP": str(self.local_tmp),
            **settings,
        }
        output = (
            f"--output={self.folder}/%x-%A_%a.out"
            if script == "array.sbatch"
            else f"--output={self.folder}/%x.out"
        )
        command = [
            "sbatch",
            "--parsable",
            "--cpus-per-task=1",
            "--gpus-per-node=1",
            "--ntasks-per-node=1",
            output,
        ]
        return self.slurm.call(
            *command, *options, f"slurm/{script}", *arguments, cwd=ROOT, extra=environment
        )

    def wait_until(self, what: str, is_so: Callable[[], Any]) -> Any:
        """Like the sandbox's; what the jobs wrote is told of where it stays false."""
        try:
            return self.slurm.wait_until(what, is_so, _PATIENCE_SECONDS)
        except TimeoutError as error:
            for output in sorted(self.folder.glob("*.out")):
                error.add_note(f"{output.name}:\n{output.read_text()[-4000:]}")
            raise

    def saved_step(self, run: str) -> int:
        """The step of the newest checkpoint of a run; 0 where there is none."""
        found = [
            re.fullmatch(r"step_(\d+)", path.name)
            for path in (self.runs / run / "checkpoints").glob("step_*")
        ]
        return max((int(match[1]) for match in found if match), default=0)

    def copied_step(self, job: str) -> int:
        """The step of the newest copy in host memory that is on both nodes of a job; 0 where there
        is none."""
        found = [
            path.name[-6:] for path in Path("/dev/shm").glob(f"vapo-job-{job}.*/checkpoints/step_*")
        ]
        return max((int(name) for name in found if found.count(name) == 2), default=0)

    def tries(self, run: str) -> list[dict[str, str]]:
        """What is recorded of every try: restart, nodes, from."""
        lines = (self.runs / f"{run}.slurm" / "tries").read_text().splitlines()
        return [
            dict(field.split("=", 1) for field in line.split() if "=" in field) for line in lines
        ]

    def exit_codes(self, run: str, step: str) -> list[int]:
        """What is recorded of the tasks of a step, such as `12.0.train`: job 12, not restarted
        yet."""
        folder = self.runs / f"{run}.slurm" / "exits" / step
        return sorted(int(path.read_text().split()[0]) for path in folder.glob("[0-9]*"))

    def metrics(self, run: str) -> list[dict[str, float]]:
        """The rows of metrics.jsonl."""
        return [
            json.loads(line)
            for line in (self.runs / run / "metrics.jsonl").read_text().splitlines()
        ]


def processes_of(job: str) -> dict[psutil.Process, Mapping[str, str]]:
    """Every process of a job on this host, the nodes being one host, with its environment."""
    found = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("SLURM_JOB_ID") == job:
            found[process] = environment
    return found


def ranks_of(job: str) -> dict[int, tuple[psutil.Process, str]]:
    """The trainers of a job by rank, with their nodes."""
    found = {}
    for process, environment in processes_of(job).items():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command[1:4] == ["-m", "vapo_megatron.cli", "train"] and "SLURM_PROCID" in environment:
            found[int(environment["SLURM_PROCID"])] = (process, environment["SLURMD_NODENAME"])
    return found

"""Weights & Biases: metrics, config, code version, samples and alarms of a run, sent or kept for `wandb sync`."""

import secrets
import threading
from pathlib import Path
from typing import Any

import wandb
import yaml

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.monitoring import WandbConfig
from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.monitoring.trackers import Record

START_SECONDS = 30.0  # longest wait for its server when the run starts
END_SECONDS = 60.0  # and for the last uploads when it ends
COLUMNS = ("problem", "answer", "response", "reward", "correct", "grade_reason", "tokens", "finish_reason")


class WeightsAndBiases:
    """One run of Weights & Biases, whose id is kept in run_dir/wandb/run_id: a resumed run goes on with it.

    Steps that are done again after a resume are written again, with the same values.
    """

    def __init__(self, config: WandbConfig, run_dir: Path) -> None:
        """Raises whatever keeps it from starting: no login, no network, no room."""
        if config.mode == "online" and not wandb.login(prompt=False):
            raise ValueError("no login: run `wandb login`, set WANDB_API_KEY, or monitoring.wandb.mode=offline")
        self._samples = config.samples
        self._counters: dict[str, str] = {}
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=run_dir.name,
            tags=list(config.tags),
            id=_run_id(run_dir),
            resume="allow",
            mode=config.mode,
            dir=str(run_dir),
            config=_run_config(run_dir),
            settings=wandb.Settings(console="off", silent=True, init_timeout=START_SECONDS),
        )

    def write(self, record: Record) -> None:
        """Take in a step."""
        content: dict[str, Any] = {"step": record.step, **record.metrics}
        for name in record.metrics:
            counter = record.place(name)[0]
            if self._counters.get(name) != counter:
                self._counters[name] = counter
                self._run.define_metric(name, step_metric=counter)
        if record.samples and self._samples:
            rows = [[row[column] for column in COLUMNS] for row in record.samples[: self._samples]]
            content["samples"] = wandb.Table(columns=list(COLUMNS), data=rows)
        content["alarms"] = len(record.alarms)
        self._run.log(content)
        for line in record.alarms:
            self._run.alert(title=f"step {record.step}", text=line, level="WARN")

    def close(self, failed: bool) -> None:
        """Wait END_SECONDS at most for what is still to be sent; the rest stays for `wandb sync`."""
        end = threading.Thread(target=self._run.finish, kwargs={"exit_code": int(failed)}, daemon=True)
        end.start()
        end.join(END_SECONDS)
        if end.is_alive():
            raise TimeoutError(f"not everything was sent within {END_SECONDS:.0f} s; `wandb sync` sends the rest")


def _run_id(run_dir: Path) -> str:
    path = run_dir / "wandb" / "run_id"
    if not path.is_file():
        with atomic_write(path) as file:
            file.write(secrets.token_hex(8))
    return path.read_text(encoding="utf-8").strip()


def _run_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config of the run, and the versions of code and packages."""
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**config, "environment": environment_facts()}

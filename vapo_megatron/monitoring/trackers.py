"""Trackers of metrics, samples and alarms: TensorBoard, Weights & Biases, MLflow."""

import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.errors import reason_of
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.facts import environment_facts

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """The results of a step, for trackers.

    step counts from 1; 0 is before the first step. metrics are finite. samples are rows of
    monitoring/samples.py; alarms are lines.
    """

    step: int
    metrics: Mapping[str, float]
    samples: Sequence[Row] = ()
    alarms: Sequence[str] = ()

    def place(self, name: str) -> tuple[str, int]:
        """The x axis of a metric: the name of its counter and that counter's value."""
        counter = names.own_counter(name)
        if counter in self.metrics:
            return (counter, int(self.metrics[counter]))
        return ("step", self.step)


@dataclass
class Trackers:
    """The trackers of a run. A failing tracker never stops the run: it is reported once, and
    `failures` counts."""

    note: Callable[[str], None]
    failures: int = 0
    _open: dict[str, Any] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    def start(self, name: str, make: Callable[[], Any]) -> None:
        """Add the tracker that make() gives, which has write(record) and close(failed)."""
        with self._noted(name, "the run continues without it"):
            self._open[name] = make()

    def write(self, record: Record) -> None:
        """Send a step to all of them."""
        for name, tracker in self._open.items():
            with self._noted(name):
                tracker.write(record)

    def close(self, failed: bool) -> None:
        """Close all of them; a second call does nothing."""
        while self._open:
            name, tracker = self._open.popitem()
            with self._noted(name):
                tracker.close(failed)

    @contextmanager
    def _noted(
        self, name: str, consequence: str = "metrics.jsonl has the missing rows"
    ) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures += 1
            if name not in self._named:
                self.note(f"{name}: {reason_of(error)} ({consequence})")
            self._named.add(name)


def start_trackers(
    config: MonitoringConfig, run_dir: Path, start_step: int, note: Callable[[str], None]
) -> Trackers:
    """The trackers that config asks for. start_step: the first step of this attempt, 0 for a new
    run; note: prints a line."""
    trackers = Trackers(note)
    if config.tensorboard:
        trackers.start("TensorBoard", lambda: TensorBoard(run_dir, start_step))
    if config.wandb != "disabled":
        trackers.start(
            "Weights & Biases", lambda: WeightsAndBiases(config.wandb == "offline", run_dir)
        )
    if config.mlflow is not None:
        uri = config.mlflow
        trackers.start("MLflow", lambda: MLflow(uri, run_dir))
    return trackers


# The tab "Custom Scalars": what to look at first, and then everything by groups. Tags are patterns.
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "First": {
        "accuracy": ["Multiline", [names.ACCURACY, names.EVALUATION + ".*_avg@.*"]],
        "reward": ["Multiline", [names.REWARD]],
        "response length": ["Margin", [names.LENGTH, names.LENGTH_MIN, names.LENGTH_MAX]],
        "truncated, repeated": ["Multiline", [names.TRUNCATED, names.REPEATED]],
        "entropy": ["Multiline", [names.ENTROPY]],
        "KL to the rollout policy": ["Multiline", [names.TRAIN_INFER_KL]],
        "clip fractions": ["Multiline", [names.CLIP_LOW, names.CLIP_HIGH]],
        "gradient norms": ["Multiline", [names.ACTOR_GRAD_NORM, names.CRITIC_GRAD_NORM]],
        "value loss": ["Multiline", [names.VALUE_LOSS]],
        "explained variance": [
            "Multiline",
            [names.EXPLAINED_VARIANCE, names.BASELINE_LOO, names.BASELINE_POSITION],
        ],
        "value less return, by position": ["Multiline", [names.VALUE_BIAS + ".*"]],
        "tokens per second": ["Multiline", [names.TOKENS_PER_SECOND]],
    },
    "Alarms": {"alarms": ["Multiline", [names.ALARM + ".*"]]},
    "Episodes": {"turns": ["Multiline", [names.AGENT_TURNS]], "all": ["Multiline", ["agent/.*"]]},
    "Time and memory": {
        "seconds by phase": ["Multiline", [names.TIME + ".*"]],
        "GiB by phase": ["Multiline", ["memory/.*_gib"]],
        "idle shares": ["Multiline", ["throughput/.*_idle"]],
    },
}


class TensorBoard:
    """Under run_dir/tensorboard: scalars against the step, alarms as text, and a layout of the most
    used. Groups with their own counter have a separate folder; what an earlier attempt left there
    from an attempt's first point on is removed."""

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        """start_step: points of an earlier attempt from this step on are removed; 0 for a new
        run."""
        from torch.utils.tensorboard import (
            SummaryWriter,  # takes a second, and only rank 0 has use for it
        )

        _silence_writer_threads()
        self._make = SummaryWriter
        self._folder = run_dir / "tensorboard"
        self._writers = {"step": SummaryWriter(str(self._folder), purge_step=start_step or None)}
        self._writers["step"].add_custom_scalars(LAYOUT)

    def write(self, record: Record) -> None:
        """Take in a step."""
        for name, value in record.metrics.items():
            counter, place = record.place(name)
            if counter not in self._writers:
                self._writers[counter] = self._make(
                    str(self._folder / counter.partition("/")[0]), purge_step=place
                )
            self._writers[counter].add_scalar(name, value, place)
        for line in record.alarms:
            self._writers["step"].add_text("alarms", line, record.step)
        for writer in self._writers.values():
            writer.flush()

    def close(self, failed: bool) -> None:
        """End the files."""
        for writer in self._writers.values():
            writer.close()


def _silence_writer_threads() -> None:
    """Have no writer's thread print a trace: it keeps its exception, which the next write raises
    and Trackers tells in a line."""
    from tensorboard.summary.writer import event_file_writer

    thread = event_file_writer._AsyncWriterThread
    run = thread.run
    if getattr(run, "is_silent", False):
        return

    def silent(writer: Any) -> None:
        with suppress(Exception):
            run(writer)

    silent.is_silent = True  # type: ignore[attr-defined]
    thread.run = silent


PARAMS_AT_ONCE = 100  # that a server of MLflow takes in one request
PARAM_CHARACTERS = 500


class MLflow:
    """One run of MLflow. Its id is kept in run_dir/mlflow_run_id, so that a resumed run continues
    it.

    MLFLOW_EXPERIMENT_NAME names the experiment; MLflow's own variables hold credentials. Steps
    repeated after a resume are written again, with the same values.
    """

    def __init__(self, uri: str, run_dir: Path) -> None:
        """uri: of the tracking server or store. Raises any error of starting."""
        # A server that does not answer must not hold up a step for MLflow's own minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import mlflow  # an extra, which few install

        self._mlflow = mlflow
        path = run_dir / "mlflow_run_id"
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "vapo-megatron")
        if path.is_file():
            mlflow.start_run(run_id=path.read_text(encoding="utf-8").strip())
            return
        run = mlflow.start_run(run_name=run_dir.name)
        with atomic_write(path) as file:
            file.write(run.info.run_id)
        params = list(_flat(_run_config(run_dir)))
        for start in range(0, len(params), PARAMS_AT_ONCE):
            mlflow.log_params(dict(params[start : start + PARAMS_AT_ONCE]))

    def write(self, record: Record) -> None:
        """Take in a step."""
        by_place: dict[int, dict[str, float]] = {}
        for name, value in record.metrics.items():
            by_place.setdefault(record.place(name)[1], {})[_mlflow_name(name)] = value
        for place, metrics in by_place.items():
            self._mlflow.log_metrics(metrics, step=place)

    def close(self, failed: bool) -> None:
        """End the run."""
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and these marks."""
    return re.sub(r"[^\w\-./ ]", "_", name)


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and texts of everything in nested sections."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield _mlflow_name(f"{prefix}{key}"), str(value)[:PARAM_CHARACTERS]


START_SECONDS = 30.0  # longest wait for its server when the run starts
END_SECONDS = 60.0  # and for the last uploads when it ends
TABLE_ROWS = 8  # responses of a step in the table of samples
COLUMNS = (
    "problem",
    "answer",
    "response",
    "reward",
    "correct",
    "grade_reason",
    "tokens",
    "finish_reason",
)


class WeightsAndBiases:
    """One run of Weights & Biases. Its id is kept in run_dir/wandb/run_id, so that a resumed run
    continues it.

    Steps repeated after a resume are written again, with the same values.
    """

    def __init__(self, offline: bool, run_dir: Path) -> None:
        """Raises any error of starting: no login, no network, no space."""
        import wandb  # an extra, which few install

        self._table = wandb.Table
        self._defined = set[str]()
        path = run_dir / "wandb" / "run_id"
        if offline:
            mode = "offline"
        else:
            mode = os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and not wandb.login(prompt=False):
            raise ValueError(
                "no login: run `wandb login`, set WANDB_API_KEY, or monitoring.wandb=offline"
            )
        if not path.is_file():
            with atomic_write(path) as file:
                file.write(secrets.token_hex(8))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "vapo-megatron",
            name=run_dir.name,
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            mode=mode,  # type: ignore[arg-type]
            dir=str(run_dir),
            config=_run_config(run_dir),
            settings=wandb.Settings(console="off", silent=True, init_timeout=START_SECONDS),
        )

    def write(self, record: Record) -> None:
        """Take in a step."""
        content: dict[str, Any] = {"step": record.step, **record.metrics}
        for name in record.metrics.keys() - self._defined:
            self._run.define_metric(name, step_metric=record.place(name)[0])
        self._defined.update(record.metrics)
        if record.samples:
            rows = [[row[column] for column in COLUMNS] for row in record.samples[:TABLE_ROWS]]
            content["samples"] = self._table(columns=list(COLUMNS), data=rows)
        content["alarms"] = len(record.alarms)
        self._run.log(content)
        for line in record.alarms:
            self._run.alert(title=f"step {record.step}", text=line, level="WARN")

    def close(self, failed: bool) -> None:
        """Wait at most END_SECONDS for pending uploads; `wandb sync` sends the rest."""
        end = threading.Thread(
            target=self._run.finish, kwargs={"exit_code": int(failed)}, daemon=True
        )
        end.start()
        end.join(END_SECONDS)
        if end.is_alive():
            raise TimeoutError(
                f"not everything was sent within {END_SECONDS:.0f} s; `wandb sync` sends the rest"
            )


def _run_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config of the run, and the versions of code and packages."""
    path = run_dir / "config.yaml"
    if path.is_file():
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    else:
        config = {}
    return {**config, "environment": environment_facts()}

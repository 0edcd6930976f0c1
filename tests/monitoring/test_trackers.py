"""Trackers hold what metrics.jsonl holds; none of them stops a run, whatever becomes of it."""

import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_samples import sample

from vapo_megatron.checks.config import check_trackers
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.monitoring.recorder import TOKEN_ESTIMATES, Recorder
from vapo_megatron.monitoring.trackers import TABLE_ROWS

KL = "actor/train_infer_kl"  # one above the limit raises an alarm


def recorder(run_dir: Path, start_step: int = 0, **monitoring: Any) -> Recorder:
    return Recorder(
        run_dir, MonitoringConfig(**monitoring), is_main_rank=True, start_step=start_step
    )


def write(record: Recorder, step: int, **metrics: float) -> None:
    record.add({name.replace("__", "/"): value for name, value in metrics.items()})
    record.write(step)


def tensorboard_of(run_dir: Path, group: str = "") -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard" / group))
    events.Reload()
    return events


def scalars(run_dir: Path, name: str, group: str = "") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in tensorboard_of(run_dir, group).Scalars(name)]


def test_tensorboard_holds_repeated_step_once_and_alarms_as_text(tmp_path: Path) -> None:
    with recorder(tmp_path) as record:
        for step in range(1, 6):
            write(record, step, a__x=float(step), **{KL.replace("/", "__"): 1.0})
    with recorder(tmp_path, start_step=4) as record:
        write(record, 4, a__x=40.0)
    assert scalars(tmp_path, "a/x") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [event.step for event in tensorboard_of(tmp_path).Tensors("alarms/text_summary")] == [1]


def test_tensorboard_shows_the_most_used_first(tmp_path: Path) -> None:
    from tensorboard.plugins.custom_scalar import layout_pb2

    with recorder(tmp_path) as record:
        write(record, 1, a__x=1.0)
    summary = tensorboard_of(tmp_path).Tensors("custom_scalars__config__")[0]
    layout = layout_pb2.Layout.FromString(summary.tensor_proto.string_val[0])
    assert layout.category[0].title == "First" and len(layout.category[0].chart) == 12
    tags = [tag for chart in layout.category[0].chart for tag in chart.multiline.tag]
    assert {"accuracy/mean", "actor/train_infer_kl", "critic/explained_variance"} <= set(tags)
    (margin,) = [c.margin for c in layout.category[0].chart if c.HasField("margin")]
    assert margin.series[0].lower == "response_length/min"


def test_a_group_with_a_counter_of_its_own_is_drawn_against_it(tmp_path: Path) -> None:
    with recorder(tmp_path) as record:
        for updates in (1, 2, 3):
            record.add({"critic/value_loss": updates / 4})
            record.write_pretraining(updates, updates * 8)
        write(record, 1, a__x=1.0)
    expected = [(1, 0.25), (2, 0.5), (3, 0.75)]
    # Its purge removes points at 1 and beyond, of steps alone
    with recorder(tmp_path, start_step=1) as record:
        write(record, 1, a__x=2.0)
    assert scalars(tmp_path, "value_pretraining/value_loss", "value_pretraining") == expected
    assert scalars(tmp_path, "a/x") == [(1, 2.0)]


def test_repeated_updates_of_value_pretraining_are_drawn_once(tmp_path: Path) -> None:
    """An attempt resumes from updates 10, although the one before it was killed after 30."""
    for attempt, updates in enumerate(((0, 10, 20, 30), (20, 30, 40))):
        with recorder(tmp_path, start_step=attempt) as record:
            for number in updates:
                record.add({"critic/value_loss": number + attempt / 2})
                record.write_pretraining(number, number * 8)
    expected = [(0, 0.0), (10, 10.0), (20, 20.5), (30, 30.5), (40, 40.5)]
    assert scalars(tmp_path, "value_pretraining/value_loss", "value_pretraining") == expected


def test_skips_in_value_pretraining_raise_the_alarm_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It came with the row of the first step, hours later, and not at all in a run that was resumed
    in between."""
    with recorder(tmp_path) as record:
        for skipped in (0.0, 2.0):
            record.add(
                {"critic/value_loss": 0.5, "reward/failed": 0.0, "skipped_updates/total": skipped}
            )
            record.add({"skipped_updates/nonfinite_loss": skipped})
            record.write_pretraining(1, 8)
    healthy, skipping = read_metrics(tmp_path)
    assert not any(name.startswith(("skipped_updates", "reward", "alarm")) for name in healthy)
    assert (
        skipping["skipped_updates/nonfinite_loss"] == 2 and skipping["alarm/skipped_updates"] == 1
    )
    assert "2 skipped: nonfinite_loss" in capsys.readouterr().out


def test_a_tracker_that_fails_is_one_line_and_a_count(
    tmp_path: Path, mlflow: "FakeMLflow", capsys: pytest.CaptureFixture[str]
) -> None:
    with recorder(tmp_path, tensorboard=False, mlflow="http://host:5000") as record:
        write(record, 1, a__x=1.0)
        mlflow.failure = OSError("No space left on device")
        for step in (2, 3, 4):
            write(record, step, a__x=float(step))
    assert [row.get("tracking/failures") for row in read_metrics(tmp_path)] == [
        None,
        None,
        1.0,
        2.0,
    ]
    assert capsys.readouterr().out.count("No space left on device") == 1


def test_without_login_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with recorder(tmp_path / "run", tensorboard=False, wandb="online") as record:
        write(record, 1, a__x=1.0)
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "Weights & Biases" in line]
    assert len(lines) == 1 and "wandb login" in lines[0], said
    assert [(row["a/x"], row["tracking/failures"]) for row in read_metrics(tmp_path / "run")] == [
        (1.0, 1.0)
    ]


@pytest.mark.parametrize("by_environment", [False, True])
def test_offline_run_has_config_code_metrics_samples_and_alarms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline" if by_environment else "online")
    monkeypatch.setenv("WANDB_TAGS", "one")
    wandb.teardown()  # the environment is read once a process
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": 7}}))
    monkeypatch.setenv("WANDB_PROJECT", "tests")
    mode = "online" if by_environment else "offline"
    for start in (0, 3):
        with recorder(tmp_path, start, tensorboard=False, wandb=mode) as record:
            for step in (start + 1, start + 2):
                record.samples(step, [sample(0, index) for index in range(TABLE_ROWS + 1)])
                write(record, step, a__x=float(step), **{KL.replace("/", "__"): 1.0})
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {
        f"run-{(tmp_path / 'wandb' / 'run_id').read_text()}.wandb"
    }
    first, second = map(records_when_ended, files)
    (run,) = [record.run for record in first if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, list(run.tags), run.display_name) == ("tests", ["one"], tmp_path.name)
    given = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert given["run"] == {"seed": 7}
    assert given["environment"]["packages"]["torch"].startswith("2.")
    rows = [row for part in (first, second) for row in map(history, part) if row]
    assert [(row["step"], row["a/x"], row["alarms"]) for row in rows] == [
        (1, 1, 1),
        (2, 2, 0),
        (4, 4, 0),
        (5, 5, 0),
    ]
    assert {row["samples.nrows"] for row in rows} == {TABLE_ROWS}
    alerts = [record.alert.text for record in first if record.WhichOneof("record_type") == "alert"]
    assert len(alerts) == 1 and "train_infer_gap" in alerts[0]
    axes = {
        record.metric.name: record.metric.step_metric
        for record in first
        if record.HasField("metric")
    }
    assert axes["a/x"] == "step"


def history(record: Any) -> dict[str, Any]:
    if record.WhichOneof("record_type") != "history":
        return {}
    return {
        ".".join(item.nested_key) or item.key: json.loads(item.value_json)
        for item in record.history.item
    }


def records_when_ended(path: Path) -> list[Any]:
    """Another process writes the file, to the end even where the run's ends."""
    for _ in range(600):
        found = records_of(path)
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.05)
    raise TimeoutError(path)


def records_of(path: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB, 7 bytes before every
    piece."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    place = 7
    pending = b""
    found = []
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        kind = content[place + 6]
        if left < 7 or kind == 0:
            place += left
            continue
        pending += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last piece
            found.append(Record.FromString(pending))
            pending = b""
    return found


def test_estimates_are_those_of_their_tokens(tmp_path: Path) -> None:
    texts = {5: "a ", 6: "b\N{REPLACEMENT CHARACTER}", 7: "c"}

    def decode(ids: Any) -> str:
        return "".join(texts[token] for token in ids).replace("\N{REPLACEMENT CHARACTER}c", "é")

    config = MonitoringConfig(tensorboard=False)
    with Recorder(tmp_path, config, is_main_rank=True, decode=decode) as record:
        problems = range(TOKEN_ESTIMATES - 1, 0, -1)
        # As the batch has them
        record.samples(1, [*(sample(n, 0) for n in problems), sample(0, 1), sample(0, 0)])
        bounds = torch.arange(0, 3 * TOKEN_ESTIMATES + 4, 3)
        record.estimates(1, torch.arange(bounds[-1]) / 10, -torch.arange(float(bounds[-1])), bounds)
        record.write(1)
    rows = [
        json.loads(line)
        for line in (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert rows[0]["estimates"] == {
        "left_out": 0,
        "tokens": ["a ", "", "bé"],
        "values": [1.2, 1.3, 1.4],
        "advantages": [-12.0, -13.0, -14.0],
    }
    assert ["estimates" in row for row in rows] == [True, False, True, True, True], (
        "of more problems first"
    )


class FakeMLflow(ModuleType):
    """The called part of MLflow's API, with its server's records: a run takes a parameter
    once."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[str, str]] = []
        self.params: dict[str, dict[str, str]] = {}
        self.metrics: list[tuple[str, int, str, float]] = []
        self.ended: list[tuple[str, str]] = []
        self.active: str | None = None
        self.failure: Exception | None = None

    def set_tracking_uri(self, uri: str) -> None:
        self.calls.append(("uri", uri))

    def set_experiment(self, experiment_name: str) -> None:
        self.calls.append(("experiment", experiment_name))

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> Any:
        assert self.active is None and (run_id is None or run_id in self.params)
        self.active = run_id or f"{run_name}-{len(self.params)}"
        self.params.setdefault(self.active, {})
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active))

    def log_params(self, params: dict[str, str]) -> None:
        assert self.active is not None and len(params) <= 100
        assert not params.keys() & self.params[self.active].keys(), (
            "an existing parameter is refused"
        )
        self.params[self.active] |= params

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert self.active is not None and step is not None
        if self.failure is not None:
            raise self.failure
        for name, value in metrics.items():
            assert re.fullmatch(r"[\w\-./ ]+", name), "MLflow refuses other names"
            self.metrics.append((self.active, step, name, value))

    def end_run(self, status: str = "FINISHED") -> None:
        assert self.active is not None
        self.ended.append((self.active, status))
        self.active = None


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    package = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return package


def test_a_resumed_run_goes_on_with_its_run_of_mlflow(
    tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    sections = {"run": {"seed": 7}, "many": {f"key{number}": number for number in range(150)}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(sections))
    with (
        pytest.raises(RuntimeError),
        recorder(tmp_path, tensorboard=False, mlflow="http://host:5000") as record,
    ):
        record.add({"critic/value_loss": 0.5})
        record.write_pretraining(3, 24)
        write(record, 1, **{"evaluation/sums_avg@4": 0.25})
        raise RuntimeError
    with recorder(tmp_path, 2, tensorboard=False, mlflow="http://host:5000") as record:
        write(record, 2, a__x=2.0)
    (run_id,) = mlflow.params
    assert mlflow.calls == [("uri", "http://host:5000"), ("experiment", "tests")] * 2
    assert (
        mlflow.params[run_id]["run.seed"] == "7" and mlflow.params[run_id]["many.key149"] == "149"
    )
    assert mlflow.ended == [(run_id, "FAILED"), (run_id, "FINISHED")]
    written = {
        (step, name, value)
        for name_of_run, step, name, value in mlflow.metrics
        if name_of_run == run_id
    }
    assert {
        (3, "value_pretraining/value_loss", 0.5),
        (1, "evaluation/sums_avg_4", 0.25),
        (2, "a/x", 2.0),
    } <= written
    assert len(mlflow.metrics) == len(written)


def test_mlflow_that_is_not_installed_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # Python finds no such package
    with pytest.raises(
        BadInput, match=r"monitoring\.mlflow=file:runs: the package mlflow is not installed"
    ):
        check_trackers(MonitoringConfig(mlflow="file:runs"))

"""metrics.jsonl holds each step once, whatever happened to the run."""

import errno
import json
import math
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring.metrics import MetricsWriter, Totals, read_metrics, totals
from vapo_megatron.monitoring.recorder import Recorder


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(1, {"reward/mean": 0.5})
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "reward/mean": 0.5}]


def test_figures_that_are_not_finite_become_null(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        assert writer.write(1, {"a/x": math.nan, "a/y": -math.inf, "a/z": 2.0}) == {"a/z": 2.0}
    assert read_metrics(tmp_path) == [{"step": 1, "a/x": None, "a/y": None, "a/z": 2.0}]


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path)) as writer:
        for step in range(1, 6):
            writer.write(step, {"a/x": float(step)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "a/x"')  # killed while writing
    with closing(MetricsWriter(tmp_path, start_step=4)) as writer:
        writer.write(4, {"a/x": 40.0})
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [(row["step"], row["a/x"]) for row in read_metrics(tmp_path)] == expected


def test_a_fresh_run_keeps_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with closing(MetricsWriter(tmp_path)) as writer:
            writer.write(0, {"a/x": value})
    assert read_metrics(tmp_path) == [{"step": 0, "a/x": 2.0}]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files that this process writes can grow to `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_row_refused_by_a_full_disk_is_written_with_a_later_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()  # pytest's file of what this process prints would be too large as well
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"a/x": 1.0})
        with full_disk(writer.path.stat().st_size + 5):
            for step in (2, 3):
                writer.write(step, {"a/x": float(step)})
        assert writer.refused == 2 and [row["step"] for row in read_metrics(tmp_path)] == [1]
        writer.write(4, {"a/x": 4.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("rows", [1, 11])
def test_rows_that_are_refused_to_the_end_interrupt_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    writer = MetricsWriter(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    for step in range(1, rows):
        writer.write(step, {"a/x": 1.0})
    with pytest.raises(
        TryAgain, match=r"metrics\.jsonl: cannot be written \(Stale file handle\): make room"
    ):
        writer.write(rows, {"a/x": 1.0})
        writer.close()


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_broken_row_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(BadInput, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(tmp_path)


def test_run_whose_directory_is_removed_does_not_end_well(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(1, {"reward/mean": 0.5})
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunFailed, match="was deleted during the run"):
            writer.write(2, {"reward/mean": 0.5})


def test_output_refused_by_the_disk_is_skipped_named_and_counted(tmp_path: Path) -> None:
    (tmp_path / "evaluation").touch()
    alarms: list[str] = []
    with Recorder(tmp_path, MonitoringConfig(tensorboard=False), is_main_rank=True) as recorder:
        recorder.console.alarm = alarms.append  # type: ignore[method-assign]
        with recorder.optional("sums.jsonl"), atomic_write(tmp_path / "evaluation" / "sums.jsonl"):
            pass
        row = recorder.write(1)
    assert row["tracking/failures"] == 1.0
    assert len(alarms) == 1 and alarms[0].startswith("sums.jsonl is not kept: ")


def test_rows_say_how_long_the_run_held_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 3700.0, 7300.0])
    monkeypatch.setattr("vapo_megatron.monitoring.recorder.time.monotonic", lambda: next(clock))
    config = MonitoringConfig(tensorboard=False)
    with Recorder(tmp_path, config, is_main_rank=True, gpus=8) as recorder:
        recorder.write(0)
        for step in (1, 2):
            recorder.add_cost()
            recorder.write(step)
    rows = read_metrics(tmp_path)
    assert [row.get("throughput/gpu_hours") for row in rows] == [None, 8.0, 8.0]
    assert totals(rows) == Totals(hours=2.0, gpu_hours=16.0, tokens=0.0)

"""What a report takes from a run directory: curves, tables, sentences."""

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from called import exit_code_of

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.metrics import mean_of_last
from vapo_megatron.monitoring.facts import environment_facts
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.operations.report.panels import panels_of, series
from vapo_megatron.operations.report.report import headline, write_report
from vapo_megatron.operations.report.runs import Run, read_run

LATE = 2.0e9  # the time of files that were copied


def minute(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds))


def row(step: int, **metrics: float | None) -> dict[str, Any]:
    return {"step": step} | {name.replace("__", "/"): value for name, value in metrics.items()}


def run_dir(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return folder


def titles(rows: list[dict[str, Any]]) -> list[str]:
    return [panel.title for panel in panels_of(rows)]


def test_only_panels_with_figures_are_drawn() -> None:
    assert titles([row(1, actor__entropy=0.5)]) == ["Policy entropy (nats per token)"]
    assert titles([row(1, unknown=0.5)]) == []


def test_report_draws_trust_beside_explained_variance() -> None:
    metrics = {
        f"critic/{name}": 0.1
        for name in ("explained_calibrated", "trust", "past_slope", "group_weight")
    }
    drawn = {
        panel.title: [c.metric for c in panel.curves]
        for panel in panels_of([{"step": 1} | metrics])
    }
    assert drawn == {
        "Explained variance: critic, free baselines": ["critic/explained_calibrated"],
        "Trust in the critic, and its weight in calibrated values": [
            "critic/trust",
            "critic/past_slope",
            "critic/group_weight",
        ],
    }


def test_pretraining_is_drawn_against_its_own_counter() -> None:
    metrics = {"value_pretraining/value_loss": 0.3, "value_pretraining/explained_variance": 0.2}
    rows: list[dict[str, Any]] = [
        {"step": 0, "value_pretraining/iteration": step} | metrics for step in (1, 2, 3)
    ]
    (panel,) = panels_of(rows)
    assert panel.counter == "value_pretraining/iteration"
    assert series(rows, panel.curves[0].metric)[0] == [1, 2, 3]


def test_phases_that_run_now_and_then_stay_out_of_the_picture() -> None:
    rows = [
        row(step, time__step=5.0, time__rollout=3.0, time__critic_update=2.0)
        for step in range(1, 9)
    ]
    rows[3]["time/evaluation"] = 100.0
    (panel,) = panels_of(rows)
    assert [curve.label for curve in panel.curves] == ["rollout", "critic update"]


def test_a_run_of_one_step_and_of_nothing_finite_can_be_reported(tmp_path: Path) -> None:
    rows = [row(1, accuracy__mean=None, actor__grad_norm=0.0, time__step=0.0, time__rollout=0.0)]
    assert write_report([run_dir(tmp_path, rows)]).exists()


@pytest.mark.parametrize("rows", [[], None])
def test_without_a_step_there_is_no_report(
    tmp_path: Path, rows: list[dict[str, Any]] | None
) -> None:
    folder = tmp_path / "absent" if rows is None else run_dir(tmp_path, rows)
    with pytest.raises(
        BadInput, match="no such run directory" if rows is None else "no step in it"
    ):
        write_report([folder])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", b"\xff\x00", r"metrics\.jsonl: no step in it"),
        ("metrics.jsonl", b"\xff\x00\n", r"metrics\.jsonl:1: not UTF-8"),
        (
            "metrics.jsonl",
            b'{"step": 1, "reward/mean": "good"}\n',
            r"metrics\.jsonl:1: reward/mean is good",
        ),
        (
            "metrics.jsonl",
            b'{"step": 1, "reward/mean": NaN}\n',
            r"metrics\.jsonl:1: reward/mean is nan",
        ),
        ("metrics.jsonl", b'{"reward/mean": 1}\n', r"metrics\.jsonl:1: step is None"),
        (
            "evaluation.json",
            b'{"sets": [{"name": "aime"}]}',
            r"evaluation\.json: not written by an evaluation",
        ),
        (
            "evaluation.json",
            b'{"sets": {"aime": 1}}',
            r"evaluation\.json: not written by an evaluation",
        ),
        ("evaluation.json", b'{"sets": [{"na', r"evaluation\.json: cannot be read as JSON"),
        ("environment.json", b"[1]", r"environment\.json: expected a JSON object"),
        ("config.yaml", b"run: null\npreset: \xff\n", None),
        ("samples/step_of_another_tool.jsonl", b"{}", None),
    ],
)
def test_directory_with_other_contents_named_in_one_line_or_read(
    tmp_path: Path, file: str, content: bytes, message: str | None
) -> None:
    folder = run_dir(tmp_path, [row(1, accuracy__mean=0.5)])
    (folder / "samples").mkdir()
    (folder / file).write_bytes(content)
    if message is None:
        assert write_report([folder]).exists()
        return
    with pytest.raises(BadInput, match=message) as told:
        write_report([folder])
    assert "\n" not in str(told.value) and not (folder / "report.html").exists()


def test_runs_of_one_name_are_told_apart_beside_a_named_page(
    tmp_path: Path,
) -> None:
    folders = []
    for seed in ("seed1", "seed2"):
        (tmp_path / seed).mkdir()
        folders.append(run_dir(tmp_path / seed, [row(1, accuracy__mean=0.5)]))
    page = write_report(folders, tmp_path / "both.html").read_text()
    assert f"<title>{folders[0]} · {folders[1]}</title>" in page
    assert [path.name for path in tmp_path.rglob("*.html")] == ["both.html"]


def test_samples_of_evaluations_are_those_of_the_last_one(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [row(1)])
    (folder / "evaluation").mkdir()
    for step in (10, 20):
        (folder / "evaluation" / f"step_{step:06d}_aime.jsonl").write_text(
            f'{{"response": "of {step}"}}\n'
        )
    result = dict.fromkeys(("problems", "samples"), 1) | dict.fromkeys(
        ("avg_at_k", "low", "high", "pass_at_k"), 0.5
    )
    result |= {"name": "aime", "maj_at_k": 0.5, "response_length": 3.0, "truncated": 0.0}
    assert read_run(folder).samples() == []
    (folder / "evaluation.json").write_text(json.dumps({"step": 20, "sets": [result]}))
    assert read_run(folder).samples() == [{"set": "aime", "response": "of 20"}]


def test_environment_names_what_is_there_and_what_is_not() -> None:
    facts = environment_facts()
    assert facts["packages"]["torch"].startswith("2.")
    assert "apex" in facts["packages"]
    assert facts["python"].startswith("3.")


def test_figures_say_what_was_reached_and_what_the_critic_adds() -> None:
    free = {"critic__baseline_loo_ev": 0.4, "critic__baseline_position_ev": 0.1}
    rows = [
        row(
            step,
            accuracy__mean=step / 10,
            response_length__mean=100.0,
            time__step=60.0,
            time__rollout=45.0,
            time__verify=15.0,
            critic__explained_variance=0.5
            + 0.2 * (step % 2),  # 0.1 beside the mean: t(9) 2.262 * 0.1054 / sqrt(10)
            **free,
        )
        for step in range(1, 11)
    ]
    rows[0] |= {"evaluation/unseen_avg@4": 0.25}
    rows[-1] |= {"evaluation/unseen_avg@4": 0.75, "alarm/train_infer_gap": 1.0}
    result = {
        "name": "unseen",
        "samples": 4,
        "avg_at_k": 0.75,
        "low": 0.7,
        "high": 0.8,
        "problems": 50,
        "pass_at_k": 0.9,
    }
    assert mean_of_last([-9.0] + [0.5, 0.7] * 5) == "0.60 ± 0.08" and mean_of_last([0.5]) == "0.50"
    run = Run(Path("run"), rows, {"sets": [result]}, config="preset: vapo\nrun: {steps: 20}\n")
    assert headline(run) == [
        (
            "unseen, avg@4",
            "0.750",
            "95 % interval 0.700 to 0.800, 50 problems, after step 1 0.250",
        ),
        ("accuracy in training", "1.000", "last tenth of steps; first 0.100"),
        (
            "the critic explains",
            "0.60",
            "± 0.08 of the variance of returns, last 10 steps; the mean of the other responses "
            "0.40 ± 0.00, "
            "position alone 0.10 ± 0.00",
        ),
        ("steps", "10 of 20", "in 10.0 minutes"),
        ("longest phase", "75%", "rollout"),
        ("alarms", "1", "train infer gap"),
    ]
    untrained = Run(Path("run"), [row(0) | {"evaluation/unseen_avg@4": 0.2}, *rows], run.evaluation)
    assert headline(untrained)[0][2].endswith("50 problems, before training 0.200")


def test_first_responses_come_before_second_ones(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [row(1)])
    (folder / "samples").mkdir()
    rows = [
        {"group": group, "index": index, "response": "x" * 1000}
        for group in range(3)
        for index in range(2)
    ]
    (folder / "samples" / "step_000001.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in rows)
    )
    order = [(sample["group"], sample["index"]) for sample in read_run(folder).samples()]
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_a_run_says_what_it_was_on_top(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [row(1)])
    (folder / "config.yaml").write_text(
        "preset: vapo\nmodel: {path: m}\ndata: {train: {a.jsonl: 2, b.jsonl: {weight: 1}}}\n"
    )
    (folder / "environment.json").write_text(
        '{"hostname": "n1", "cpu_cores": 2, "commit": "0123456789abcdef"}'
    )
    facts = read_run(folder).facts()
    assert facts.pop("date") == "not recorded"
    expected = {"preset": "vapo", "model": "m", "data": "a.jsonl, b.jsonl"}
    assert facts == expected | {"machine": "n1 (2 cores)", "commit": "0123456789"}


def date_of(folder: Path) -> str:
    return read_run(folder).facts()["date"]


def copied_late(folder: Path, copy: Path) -> Path:
    """A copy whose files all have the same, later time."""
    shutil.copytree(folder, copy)
    for path in (copy, *copy.rglob("*")):
        os.utime(path, (LATE, LATE))
    return copy


def test_a_copied_run_keeps_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, now in ((1, 1.0e9), (2, 1.1e9)):
        clock = partial(float, now)
        monkeypatch.setattr("vapo_megatron.monitoring.recorder.time.time", clock)
        config = MonitoringConfig(tensorboard=False)
        with Recorder(tmp_path / "run", config, is_main_rank=True, start_step=step) as recorder:
            recorder.write(step)
    copy = copied_late(tmp_path / "run", tmp_path / "copy")
    assert date_of(copy) == date_of(tmp_path / "run") == minute(1.1e9)
    # An evaluation that came later
    (copy / "evaluation.json").write_text(json.dumps({"sets": [], "unix_seconds": 1.2e9}))
    assert date_of(copy) == minute(1.2e9)


def test_a_run_without_times_is_dated_by_its_start_or_not(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [row(1), row(2)])
    assert date_of(copied_late(folder, tmp_path / "bare")) == "not recorded"
    for seconds, part in ((1000000000, "."), (1100000000, "value_pretraining")):
        events = folder / "tensorboard" / part / f"events.out.tfevents.{seconds}.n1.7.0"
        events.parent.mkdir(parents=True, exist_ok=True)
        events.touch()
    copy = copied_late(folder, tmp_path / "copy")
    assert date_of(copy) == f"{minute(1.1e9)} (last start)"


def test_a_time_out_of_range_is_no_trace(tmp_path: Path) -> None:
    assert date_of(run_dir(tmp_path, [row(1, unix_seconds=1e300)])) == "not a time (1e+300)"


def test_samples_are_bounded_and_span_first_to_last_step(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [row(1)])
    (folder / "samples").mkdir()
    for step in range(1, 101):
        text = json.dumps({"response": "x" * 10_000}) + "\n"
        (folder / "samples" / f"step_{step:06d}.jsonl").write_text(text * 64)
    samples = read_run(folder).samples()
    steps = sorted({sample["step"] for sample in samples})
    assert len(steps) == 12 and (steps[0], steps[-1]) == (1, 100)
    assert sum(len(sample["response"]) for sample in samples) < 3 << 20


def test_turns_have_a_curve_each_as_far_as_episodes_went() -> None:
    rows = [{"step": 1, **{f"agent/tool_seconds/turn_{turn}": 0.5 for turn in (1, 2, 3)}}]
    (panel,) = panels_of(rows)
    assert panel.title == "Episodes, by turn: seconds of tools after it"
    assert [curve.label for curve in panel.curves] == ["turn 1", "turn 2", "turn 3"]


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("environment.json", "cannot be read as JSON (it is nested too deeply)"),
        ("evaluation.json", "cannot be read as JSON (it is nested too deeply)"),
        ("samples/step_000001.jsonl", ":1: not JSON"),
    ],
)
def test_a_file_nested_too_deeply_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, named: str
) -> None:
    folder = run_dir(tmp_path, [row(1, reward__mean=0.5)])
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"a": ' + "[" * 100_000)
    assert exit_code_of("report", folder) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"vapo-megatron: {path}") and error.count("\n") == 1, error
    assert named in error

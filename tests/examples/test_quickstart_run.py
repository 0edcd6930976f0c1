"""What the quickstart sets and says; it is run as a whole by hand."""

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import typer
from called import called
from typer.testing import CliRunner

from examples.quickstart import make_task
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import dump_config, load_config
from vapo_megatron.config.run import RunPlace
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.config.train import TrainConfig

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


FIGURES = ("critic/explained_variance", "critic/baseline_loo_ev", "critic/baseline_position_ev")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quickstart_keeps_the_papers_proportions() -> None:
    config = load_config(TrainConfig, FOLDER / "vapo.yaml", [], PRESETS)
    assert config.algorithm.advantage.length_adaptive_alpha == 0.05
    assert config.critic.optimizer.lr == pytest.approx(2 * config.actor.optimizer.lr)
    assert (config.reward.correct, config.reward.incorrect) == (1.0, -1.0)
    assert config.algorithm.policy_loss.positive_nll.coef == 0.1
    assert config.algorithm.advantage.lambda_critic == 1.0
    assert config.value_pretraining.stop_explained_variance == 0.25


def test_last_lines_compare_the_critic_with_free_baselines(
    script: ModuleType,
) -> None:
    measured = [
        {
            "critic/explained_variance": ev,
            "critic/baseline_loo_ev": loo,
            "critic/baseline_position_ev": -0.01,
        }
        for ev, loo in ((0.25, -0.11), *[(0.9, 0.9)] * 5, *[(0.1, 0.0), (0.3, 0.2)] * 5)
    ]
    before, last = script.what_the_critic_explains([{"step": 0}, *measured]).splitlines()[1:]
    assert (
        "0.25 (mean of the other responses to the prompt -0.11," in before
        and "before the policy moves" in before
    )
    # Ten values of 0.2 on average, 0.1 beside it: t(9) 2.262 * 0.1054 / sqrt(10).
    assert (
        "0.20 ± 0.08 (mean of the other responses to the prompt 0.10 ± 0.08," in last
        and "last 10 steps" in last
    )


@pytest.mark.parametrize(
    ("overrides", "prompts", "told"),
    [
        # 32 rollouts of 32 prompts with 8 responses each, and two steps of as many.
        ([], None, "8,704 (8,192 by value pretraining, 512 by 2 steps)"),
        (["value_pretraining.enabled=false"], None, "512 (0 by value pretraining, 512 by 2 steps)"),
        # Dynamic sampling looked through more than it trained on.
        (
            ["algorithm.dynamic_sampling.max_rounds=3"],
            50.0,
            "8,992 (8,192 by value pretraining, 800 by 2 steps)",
        ),
    ],
)
def test_last_lines_say_how_many_responses_were_drawn(
    script: ModuleType, overrides: list[str], prompts: float | None, told: str, tmp_path: Path
) -> None:
    config = load_config(TrainConfig, FOLDER / "vapo.yaml", overrides, PRESETS)
    dump_config(config, tmp_path / "config.yaml")
    read = load_config(TrainConfig, tmp_path / "config.yaml", [], PRESETS)
    drawn = {} if prompts is None else {"dynamic_sampling/prompts": prompts}
    rows = [{"step": 0, "value_pretraining/updates": n} for n in range(3)] + [
        {"step": n} | drawn for n in (1, 2)
    ]
    assert script.responses_used(read, rows) == f"Responses used: {told}"


def test_foreign_folder_is_untouched_and_files_beside_ours_stay(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are replaced by their effect on the folder: make run directories, as `sft`
    and `train` do. The task is made in this process."""

    def run(out: Path) -> int:
        runner = CliRunner()
        app = typer.Typer()
        app.command()(script.main)
        return runner.invoke(app, ["--out", str(out)]).exit_code

    def make_run(_: str, kind: str, _config: str, *overrides: str) -> None:
        keys = dict(override.split("=", 1) for override in overrides)
        place = RunPlace(
            root=keys["run.root"], name={"sft": "sft", "train": "vapo"}[kind], overwrite=True
        )
        assert keys["run.overwrite"] == "true"
        make_run_dir(place, place)
        row = {"step": 1, "evaluation/unseen_avg@4": 0.5} | dict.fromkeys(FIGURES, 0.1)
        (Path(place.directory) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        if kind == "train":
            config = load_config(TrainConfig, FOLDER / "vapo.yaml", [], PRESETS)
            dump_config(config, Path(place.directory) / "config.yaml")

    def make_task_here(command: list[str], **_: object) -> None:
        app = typer.Typer()
        app.command()(make_task.main)
        assert command[:2] == [sys.executable, str(FOLDER / "make_task.py")]
        code, output = called(app, *command[2:], "--sft-rows", 64)
        assert code == 0, output

    monkeypatch.setattr(script, "command", make_run)
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=make_task_here))
    mine = tmp_path / "mine"
    decoys = [
        mine / "task/model/config.json",
        mine / "task/train.jsonl",
        mine / "sft/.vapo_run",
        mine / "thesis.tex",
    ]
    for decoy in decoys:
        decoy.parent.mkdir(parents=True, exist_ok=True)
        decoy.write_text("mine")
    assert run(mine) == 2, "it looks like a quickstart's folder"
    assert sorted(path for path in mine.rglob("*") if path.is_file()) == sorted(decoys)

    out = tmp_path / "out"
    assert run(out) == 0
    kept = [
        out / "thesis.tex",
        out / "task" / "notes.md",
        out / "vapo" / "paper.pdf",
        out / "other" / "metrics.jsonl",
    ]
    for decoy in kept:
        decoy.parent.mkdir(exist_ok=True)
        decoy.write_text("mine")
    (out / "vapo" / "report.html").touch()
    assert run(out) == 0
    assert all(decoy.read_text() == "mine" for decoy in kept)
    assert not (out / "vapo" / "report.html").exists(), "the earlier run is replaced"
    shutil.move(out / "sft", tmp_path / "elsewhere")
    (out / "sft").symlink_to(tmp_path / "elsewhere")
    assert run(out) == 2 and (tmp_path / "elsewhere" / "metrics.jsonl").is_file()


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_quickstart_that_is_ended_leaves_no_process(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        str(FOLDER / "run.py"),
        "--out",
        str(tmp_path / "q"),
        "--set",
        "data.steps=100000",
    ]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    deadline = time.monotonic() + 120
    try:
        while not (tmp_path / "q/sft/metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "output"
            ).read_text()
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3, "the cold start and its two ranks"
        process.send_signal(number)
        assert process.wait(60) == code, (tmp_path / "output").read_text()
        _, alive = psutil.wait_procs(family, timeout=120)
        assert not alive
    finally:
        process.kill()

"""What the ablation runs: for each seed a task, a cold start, two critics to start from, and a run for each row."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ablation_config import SETTINGS_FILE, AblationConfig, RewardModelConfig, Task, task_settings

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.base import Section
from vapo_megatron.config.load import load_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.metrics import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
EVALUATION = "evaluation/unseen_avg@4"
EVALUATION_SAMPLES = 4

# Seconds of a job where nobody else uses the machine and two jobs share its two cores: a first guess for the time
# left, which what the first jobs really take then corrects.
START, STEP, COLD_START_STEP = 30.0, 2.1, 0.13
SECONDS = {"task": 12.0, "value_critic": 75.0, "reward_model": 40.0}


@dataclass(frozen=True)
class Job:
    """A command, where its results lie, and how to know that they are there."""

    name: str
    argv: tuple[str, ...]
    directory: Path
    needs: tuple[str, ...]
    seconds: float
    finished: Callable[[], bool]


def plan_jobs(config: AblationConfig, out: Path) -> list[Job]:
    """All jobs in the order in which they start, seed by seed, each after those that it needs."""
    return [job for seed in config.seeds for job in _seed_jobs(config, seed, out / f"seed{seed}")]


def _seed_jobs(config: AblationConfig, seed: int, folder: Path) -> Iterator[Job]:
    task, cold_start, value_critic, reward_model = (
        f"seed{seed}/{name}" for name in ("task", "cold_start", "value_critic", "reward_model")
    )
    yield _task(config.task, seed, folder / "task", task)
    policy = f"model.path={folder / 'cold_start' / 'hf' / 'final' / 'actor'}"
    place = [f"run.seed={seed}", f"run.root={folder}"]
    demonstrations = folder / "task" / "sft.jsonl"

    overrides = [*place, f"model.path={folder / 'task' / 'model'}", f"data.path={demonstrations}"]
    sft = load_config(SftConfig, HERE / "cold_start.yaml", overrides, PRESETS)
    steps = sft.data.steps or 0
    yield Job(
        cold_start,
        _cli("sft", HERE / "cold_start.yaml", overrides),
        folder / "cold_start",
        (task,),
        START / 2 + steps * COLD_START_STEP,
        lambda: is_finished(folder / "cold_start", sft, steps),
    )

    data = [
        f"data.train={folder / 'task' / 'train.jsonl'}",
        f"data.eval=[{{name: unseen, path: {folder / 'task' / 'eval.jsonl'}, samples: {EVALUATION_SAMPLES}}}]",
    ]
    starts = {row.critic for row in config.rows}
    if "reward_model" in starts:
        overrides = [*place, policy, f"demonstrations={demonstrations}", f"problems={folder / 'task' / 'train.jsonl'}"]
        fitted = load_config(RewardModelConfig, HERE / "reward_model.yaml", overrides, PRESETS)
        argv = (sys.executable, str(HERE / "reward_model.py"), str(HERE / "reward_model.yaml"), *overrides)
        directory, last = folder / "reward_model", fitted.steps
        yield Job(
            reward_model,
            argv,
            directory,
            (cold_start,),
            SECONDS["reward_model"],
            lambda: is_finished(directory, fitted, last),
        )
    # VAPO's own run is always there, and with it its value pretraining; it also evaluates the cold start.
    pretraining = [*config.value_pretraining, "run.steps=1", "evaluation.before_training=true"]
    shared = [*place, policy, *data]
    yield _train("value_critic", "vapo", [*shared, *pretraining], folder, (cold_start,), 1, SECONDS["value_critic"])

    critics = {
        "pretrained": ("value_checkpoint", folder / "value_critic" / "hf" / "value_pretrained" / "critic"),
        "reward_model": ("reward_model", folder / "reward_model" / "hf" / "final" / "critic"),
    }
    needs = {"pretrained": value_critic, "reward_model": reward_model}
    for row in config.rows:
        chosen = [*shared, f"run.steps={config.steps}", "value_pretraining.enabled=false"]
        if row.critic in critics:
            init, path = critics[row.critic]
            chosen += [f"critic.init={init}", f"critic.init_path={path}"]
        seconds = START + STEP * config.steps
        before = (needs.get(row.critic, cold_start),)
        yield _train(row.name, row.preset, [*chosen, *row.overrides], folder, before, config.steps, seconds)


def _task(task: Task, seed: int, directory: Path, name: str) -> Job:
    argv = ("--out", str(directory), "--seed", str(seed), "--task", task.model_dump_json())
    wanted, file = task_settings(task, seed), directory / SETTINGS_FILE
    return Job(
        name,
        (sys.executable, str(HERE / "task.py"), *argv),
        directory,
        (),
        SECONDS["task"],
        lambda: file.is_file() and json.loads(file.read_text()) == wanted,
    )


def _train(
    name: str, preset: str, overrides: list[str], folder: Path, needs: tuple[str, ...], steps: int, seconds: float
) -> Job:
    overrides = [f"preset={preset}", f"run.name={name}", *overrides]
    wanted, directory = load_config(TrainConfig, HERE / "train.yaml", overrides, PRESETS), folder / name
    argv = _cli("train", HERE / "train.yaml", overrides)
    return Job(f"{folder.name}/{name}", argv, directory, needs, seconds, lambda: is_finished(directory, wanted, steps))


def _cli(command: str, config: Path, overrides: list[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "vapo_megatron.cli", command, str(config), *overrides)


def is_finished(run_dir: Path, wanted: Section, steps: int) -> bool:
    """Whether a run of just this config has its last step in metrics.jsonl, and its models beside it."""
    if not (run_dir / "hf" / "final").is_dir():
        return False
    try:
        found = load_config(type(wanted), run_dir / "config.yaml", [], PRESETS)
        rows = read_metrics(run_dir)
    except BadInput:  # nothing there yet, or of another version of the program
        return False
    return _comparable(found) == _comparable(wanted) and any(row["step"] == steps for row in rows)


def _comparable(config: Section) -> dict:
    """All values but whether a run was told to take the place of an earlier one."""
    values = config.model_dump(mode="json")
    values["run"].pop("overwrite")
    return values

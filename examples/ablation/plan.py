"""What the ablation runs: for each seed a task, a cold start, two critics to start from, and a run
for each row."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from examples.ablation.ablation_config import (
    SETTINGS_FILE,
    AblationConfig,
    RewardModelConfig,
    Setting,
    task_settings,
)
from examples.ablation.task import PROMPT_TOKENS, SPARE_TOKENS, longest_sequence
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.base import Section
from vapo_megatron.config.load import load_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
EVALUATION_SAMPLES = 2
EVALUATION = f"evaluation/unseen_avg@{EVALUATION_SAMPLES}"
POLICY = Path("cold_start", "hf", "final", "actor")
# Of each start of a critic: the job that makes it, critic.init, and where it lies.
CRITICS = {
    "pretrained": (
        "value_critic",
        "value_checkpoint",
        Path("value_critic", "hf", "value_pretrained", "critic"),
    ),
    "reward_model": ("reward_model", "reward_model", Path("reward_model", "hf", "final", "critic")),
}

# Seconds of a job where nobody else uses the machine and two jobs share its two cores: a first
# guess for the time left, which what the first jobs really take then corrects.
START, STEP, COLD_START_STEP = 15.0, 2.5, 0.2
SECONDS = {"task": 5.0, "value_critic": 60.0, "reward_model": 20.0}


@dataclass(frozen=True)
class Job:
    """A command, where its results lie, and how to know that they are there.

    argv: module and arguments of `python -m`. engine: likewise, of the engine that its responses
        come from, if any.
    """

    name: str
    argv: tuple[str, ...]
    directory: Path
    needs: tuple[str, ...]
    seconds: float
    finished: Callable[[], bool]
    engine: tuple[str, ...] = ()
    refusal: Callable[[], str] = lambda: (
        ""
    )  # asked when all that it needs is there: why it is not to run, or nothing


def plan_jobs(config: AblationConfig, out: Path) -> list[Job]:
    """All jobs in the order in which they start, seed by seed, each after those that it needs."""
    return [
        job
        for seed in config.seeds
        for setting in config.settings
        for job in _Seed(config, setting, seed, out / setting.name / f"seed{seed}").jobs()
    ]


@dataclass(frozen=True)
class _Seed:
    """The jobs of a seed of a setting."""

    config: AblationConfig
    setting: Setting
    seed: int
    folder: Path

    def jobs(self) -> Iterator[Job]:
        task, folder = self.setting.task, self.folder
        argv = (
            "--out",
            str(folder / "task"),
            "--seed",
            str(self.seed),
            "--task",
            task.model_dump_json(),
        )
        wanted, file = task_settings(task, self.seed), folder / "task" / SETTINGS_FILE
        yield Job(
            self._name("task"),
            ("examples.ablation.task", *argv),
            folder / "task",
            (),
            SECONDS["task"],
            lambda: file.is_file() and json.loads(file.read_text()) == wanted,
        )
        yield self._cold_start()
        rows = self.config.rows_of(self.setting)
        if any(row.critic == "reward_model" for row in rows):
            yield self._reward_model()
        # VAPO's own run is always there, and with it its value pretraining; it also evaluates the
        # cold start.
        pretraining = [
            *self.config.value_pretraining,
            "run.steps=1",
            "evaluation.before_training=true",
        ]
        yield self._train(
            "value_critic", "vapo", pretraining, "cold_start", 1, SECONDS["value_critic"]
        )
        for row in rows:
            steps = self.config.steps + row.more_steps
            overrides = [f"run.steps={steps}", "value_pretraining.enabled=false"]
            if row.critic in CRITICS:
                needs, init, path = CRITICS[row.critic]
                overrides += [f"critic.init={init}", f"critic.init_path={folder / path}"]
            else:
                needs = "cold_start"
            if row.critic == "regression":
                # The critic of train.yaml has an optimizer, which one without a model has not.
                overrides += ["critic=null", *learning_rates(row.rate, ("actor",))]
            else:
                overrides += learning_rates(row.rate)
            yield self._train(
                row.name,
                row.preset,
                [*overrides, *row.overrides],
                needs,
                steps,
                START + STEP * steps,
                self._refusal if row.critic == "pretrained" else lambda: "",
            )

    def _name(self, job: str) -> str:
        return f"{self.setting.name}/seed{self.seed}/{job}"

    @property
    def _place(self) -> list[str]:
        return [f"run.seed={self.seed}", f"run.root={self.folder}"]

    @property
    def _lengths(self) -> tuple[str, str]:
        longest = longest_sequence(self.setting.task)
        return (
            f"sampling.max_new_tokens={longest - PROMPT_TOKENS}",
            f"rollout.context_length={longest + SPARE_TOKENS}",
        )

    def _cold_start(self) -> Job:
        folder = self.folder
        overrides = [
            *self._place,
            f"model.path={folder / 'task' / 'model'}",
            f"data.path={folder / 'task/sft.jsonl'}",
        ]
        sft = load_config(SftConfig, HERE / "cold_start.yaml", overrides, PRESETS)
        steps = sft.data.steps or 0
        return Job(
            self._name("cold_start"),
            _cli("sft", HERE / "cold_start.yaml", overrides),
            folder / "cold_start",
            (self._name("task"),),
            START / 2 + steps * COLD_START_STEP,
            lambda: is_finished(folder / "cold_start", sft, steps),
        )

    def _reward_model(self) -> Job:
        folder = self.folder
        files = (
            f"demonstrations={folder / 'task/sft.jsonl'}",
            f"problems={folder / 'task/train.jsonl'}",
        )
        overrides = [*self._place, f"model.path={folder / POLICY}", *files]
        wanted = load_config(RewardModelConfig, HERE / "reward_model.yaml", overrides, PRESETS)
        script = ("examples.ablation.reward_model", str(HERE / "reward_model.yaml"))
        return Job(
            self._name("reward_model"),
            (*script, *overrides),
            folder / "reward_model",
            (self._name("cold_start"),),
            SECONDS["reward_model"],
            lambda: is_finished(folder / "reward_model", wanted, wanted.steps),
        )

    def _train(
        self,
        name: str,
        preset: str,
        overrides: list[str],
        needs: str,
        steps: int,
        seconds: float,
        refusal: Callable[[], str] = lambda: "",
    ) -> Job:
        folder = self.folder
        overrides = [
            f"preset={preset}",
            f"run.name={name}",
            *self._place,
            f"model.path={folder / POLICY}",
            f"data.train={folder / 'task' / 'train.jsonl'}",
            f"data.eval=[{{name: unseen, path: {folder / 'task' / 'eval.jsonl'}, samples: "
            f"{EVALUATION_SAMPLES}}}]",
            *self._lengths,
            *self.setting.overrides,
            *overrides,
        ]
        wanted = load_config(TrainConfig, HERE / "train.yaml", overrides, PRESETS)
        return Job(
            self._name(name),
            _cli("train", HERE / "train.yaml", overrides),
            folder / name,
            (
                self._name(needs),
                f"{self.setting.name}/seed{self.config.seeds[0]}/cold_start",
            ),  # its engine's model too
            seconds,
            lambda: is_finished(folder / name, wanted, steps),
            self._engine(),
            refusal,
        )

    def _engine(self) -> tuple[str, ...]:
        """One for all seeds of a setting: their models have one shape, and a run sends its weights
        before it asks."""
        first = self.folder.with_name(f"seed{self.config.seeds[0]}")
        place = (
            f"run.root={self.folder.parent}",
            "run.name=engine",
            f"data.train={first / 'task' / 'train.jsonl'}",
        )
        overrides = ["preset=vapo", *place, f"model.path={first / POLICY}", *self._lengths]
        return (*_cli("engine", HERE / "train.yaml", overrides), "--port", "0")

    def _refusal(self) -> str:
        """Why the critic that value pretraining left is not good enough for a row; empty: it is."""
        found, least = (
            explained_before_training(self.folder / "value_critic"),
            self.config.least_explained,
        )
        return (
            "" if found >= least else f"its critic explains {found:.3f} held out, below {least:g}"
        )


def explained_before_training(run_dir: Path) -> float:
    """Held-out explained variance at the end of value pretraining, before the policy has moved."""
    name = f"{names.PRETRAINING}explained_variance"
    return [row[name] for row in read_metrics(run_dir) if name in row][-1]


def learning_rates(rate: float, models: Sequence[str] = ("actor", "critic")) -> list[str]:
    """Overrides that multiply the learning rates of train.yaml; none where they stay."""
    if rate == 1:
        return []
    shared = yaml.safe_load((HERE / "train.yaml").read_text())
    return [
        f"{model}.optimizer.lr={rate * shared[model]['optimizer']['lr']:.6g}" for model in models
    ]


def _cli(command: str, config: Path, overrides: list[str]) -> tuple[str, ...]:
    return ("vapo_megatron.cli", command, str(config), *overrides)


def is_finished(run_dir: Path, wanted: Section, steps: int) -> bool:
    """Whether a run of just this config has its last step in metrics.jsonl, and its models beside
    it."""
    if not (run_dir / "hf" / "final").is_dir():
        return False
    try:
        found = load_config(type(wanted), run_dir / "config.yaml", [], PRESETS)
        rows = read_metrics(run_dir)
    except BadInput:  # nothing there yet, or of another version of the program
        return False
    return _comparable(found) == _comparable(wanted) and any(row["step"] == steps for row in rows)


def _comparable(config: Section) -> dict:
    """All values but whether a run was told to take the place of an earlier one, where its engine
    listened and where its key was."""
    values = config.model_dump(mode="json")
    values["run"].pop("overwrite")
    for of_engine in ("external_urls", "api_key_variable"):
        values.get("rollout", {}).pop(of_engine, None)
    return values

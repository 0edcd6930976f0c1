"""The configs of the ablation: its rows and seeds, its task, its reward model."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.base import Section
from vapo_megatron.config.load import load_config
from vapo_megatron.config.model import ModelConfig, OptimizerSettings
from vapo_megatron.config.run import RunConfig
from vapo_megatron.errors import BadInput

SETTINGS_FILE = "task.json"
EVALUATED = 4  # steps between evaluations, as in train.yaml: a run ends with one


class Task(Section):
    """Size and difficulty (task.py says what it is)."""

    states: int = Field(40, ge=2)
    fewest_steps: int = Field(6, ge=1)
    most_steps: int = Field(8, ge=1)
    repeats: tuple[int, ...] = Field(
        (0, 2, 7), min_length=1, description="what a step counts down from"
    )
    hard_states: int = Field(
        10, ge=0, description="in which the cold start is wrong more often than right"
    )
    hard_right: float = Field(
        0.35, gt=0, lt=1, description="chance of the right operation in one of them"
    )
    slip_share: float = Field(
        0.015, ge=0, le=1, description="chance of a wrong operation in any other state"
    )
    direct_share: float = Field(
        0.1, ge=0, le=1, description="bare guesses among the cold start's solutions"
    )
    break_share: float = Field(
        0.05, ge=0, le=1, description="solutions that break off at some token"
    )
    cold_start_rows: int = Field(64_000, ge=1)
    evaluation_share: float = Field(0.3, gt=0, lt=1, description="of pairs of state and steps")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.most_steps < self.fewest_steps:
            raise ValueError(
                f"most_steps {self.most_steps} is below fewest_steps {self.fewest_steps}"
            )
        if self.hard_states > self.states:
            raise ValueError(f"hard_states {self.hard_states} is above the {self.states} states")
        if self.direct_share + self.break_share > 1:
            raise ValueError("direct_share and break_share are above 1 together")
        return self


def task_settings(task: Task, seed: int) -> dict[str, Any]:
    """What task.json of a finished task holds."""
    return {"seed": seed} | task.model_dump(mode="json")


class RewardModelConfig(Section):
    """What the reward model starts from, what it is shown, and for how long."""

    run: RunConfig = RunConfig(name="reward_model")
    model: ModelConfig
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-3)
    demonstrations: Path = Field(description="jsonl with problem and response")
    problems: Path = Field(description="jsonl with problem and answer")
    steps: int = Field(150, ge=1)
    batch_size: int = Field(64, ge=1)


class Row(Section):
    """A line of the table."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    title: str
    preset: str
    critic: Literal["pretrained", "reward_model", "new", "regression", "none"]
    overrides: tuple[str, ...] = ()
    rate: float = Field(
        1.0, gt=0, description="learning rates of actor and critic over those of train.yaml"
    )
    more_steps: int = Field(
        0,
        ge=0,
        multiple_of=EVALUATED,
        description="than other rows: to draw as many responses as VAPO in all",
    )
    paper: float | None = Field(
        None, description="AIME 2024 avg@32 in percent (arXiv 2504.05118, table 1)"
    )


class Setting(Section):
    """A task, how all rows train on it, and which rows those are."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    about: str = Field(description="what it is for, for the page")
    task: Task = Task()
    overrides: tuple[str, ...] = ()
    rows: tuple[str, ...] = Field((), description="names; none: all")


class AblationConfig(Section):
    """ablation.yaml."""

    seeds: tuple[int, ...] = Field(min_length=1)
    steps: int = Field(
        ge=1, multiple_of=EVALUATED, description="iterations of every run, evaluated at its last"
    )
    workers: int = Field(2, ge=1, description="runs at once; each keeps about one core busy")
    least_explained: float = Field(
        0.2,
        description=(
            "held-out explained variance under which no row is run that starts from this critic"
        ),
    )
    value_pretraining: tuple[str, ...] = Field(
        description="what the run that pretrains a seed's critic overrides"
    )
    settings: tuple[Setting, ...] = Field(min_length=1)
    rows: tuple[Row, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        named: dict[str, list] = {
            "rows": [row.name for row in self.rows],
            "settings": [setting.name for setting in self.settings],
        }
        for key, values in {"seeds": list(self.seeds), **named}.items():
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ValueError(f"{key} names {twice[0]} twice: once is enough")
        if self.rows[0].name != "vapo":
            raise ValueError(
                f"rows begins with {self.rows[0].name}: vapo comes first, all others are compared "
                "with it"
            )
        for setting in self.settings:
            unknown = [name for name in setting.rows if name not in named["rows"]]
            if unknown:
                raise ValueError(f"settings.{setting.name}.rows: there is no row {unknown[0]}")
        return self

    def rows_of(self, setting: Setting) -> tuple[Row, ...]:
        """The rows of a setting; VAPO's is among them."""
        return tuple(
            row for row in self.rows if not setting.rows or row.name in (*setting.rows, "vapo")
        )


def read_ablation(
    path: Path, overrides: list[str], only: list[str], settings: list[str]
) -> AblationConfig:
    """ablation.yaml with its overrides; of its rows and settings those that are named (none: all;
    vapo always).

    Raises:
        BadInput: a key, a value or a name is wrong.
    """
    config = load_config(AblationConfig, path, overrides, PRESETS)
    known = {
        "--only": [row.name for row in config.rows],
        "--setting": [each.name for each in config.settings],
    }
    for option, names in (("--only", only), ("--setting", settings)):
        for name in names:
            if name not in known[option]:
                raise BadInput(f"{option} {name}: expected some of: {', '.join(known[option])}")
    rows = tuple(row for row in config.rows if not only or row.name in (*only, "vapo"))
    kept = {row.name for row in rows}
    chosen = tuple(
        setting.model_copy(
            update={"rows": tuple(row.name for row in config.rows_of(setting) if row.name in kept)}
        )
        for setting in config.settings
        if not settings or setting.name in settings
    )
    return config.model_copy(update={"rows": rows, "settings": chosen})

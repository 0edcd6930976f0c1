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


class Task(Section):
    """Size and difficulty."""

    states: int = Field(64, ge=2)
    fewest_steps: int = Field(10, ge=1)
    most_steps: int = Field(24, ge=1, le=60)
    answers: int = Field(4, ge=2, description="answers there are: a guess is right once in so many times")
    direct_share: float = Field(0.22, ge=0, le=1, description="bare guesses among the cold start's solutions")
    slip_share: float = Field(0.035, ge=0, le=1, description="chance of a wrong step in them")
    cold_start_rows: int = Field(19_200, ge=1)
    evaluation_problems: int = Field(160, ge=1)


def task_settings(task: Task, seed: int) -> dict[str, Any]:
    """What task.json of a finished task holds."""
    return {"seed": seed} | task.model_dump()


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
    part: Literal["ablation", "family", "collapse"]
    critic: Literal["pretrained", "reward_model", "fresh", "none"]
    overrides: tuple[str, ...] = ()
    paper: float | None = Field(None, description="AIME 2024 avg@32 in percent (arXiv 2504.05118, table 1)")
    note: str = Field("", description="what else the row does differently")
    reason: str = Field("", description="why its effect may not show at this scale")


class AblationConfig(Section):
    """ablation.yaml."""

    seeds: tuple[int, ...] = Field(min_length=1)
    steps: int = Field(ge=1, description="iterations of every run")
    workers: int = Field(2, ge=1, description="runs at once; each keeps about one core busy")
    task: Task
    value_pretraining: tuple[str, ...] = Field(description="what the run that pretrains a seed's critic overrides")
    rows: tuple[Row, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _all_differ(self) -> Self:
        for key, values in (("seeds", self.seeds), ("rows", [row.name for row in self.rows])):
            twice = [value for value in values if list(values).count(value) > 1]
            if twice:
                raise ValueError(f"{key} names {twice[0]} twice: once is enough")
        if self.rows[0].name != "vapo":
            raise ValueError(f"rows begins with {self.rows[0].name}: vapo comes first, all others are compared with it")
        return self


def read_ablation(path: Path, overrides: list[str], only: list[str]) -> AblationConfig:
    """ablation.yaml with its overrides, and of its rows those named in `only` (none: all; vapo always).

    Raises:
        BadInput: a key, a value or a name of a row is wrong.
    """
    config = load_config(AblationConfig, path, overrides, PRESETS)
    known = [row.name for row in config.rows]
    for name in only:
        if name not in known:
            raise BadInput(f"--only: there is no row {name}; expected some of: {', '.join(known)}")
    chosen = tuple(row for row in config.rows if not only or row.name in (*only, "vapo"))
    return config.model_copy(update={"rows": chosen})

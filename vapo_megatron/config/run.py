"""Sections about the run itself: its name and place, its ranks, its batches, its checkpoints, what it watches."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.rollout import SamplingConfig

# Seeds of evaluations are apart from those of training, and the same at every step, so that evaluations differ by the
# weights alone.
EVALUATION_SEED = 1_000_003


class RunPlace(Section):
    """Name and place of a run."""

    name: str = Field(
        "run",
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        description="folder of the run below root",
    )
    root: str = Field("runs", min_length=1, description="folder that holds run directories")
    seed: int = Field(1, ge=0, lt=2**62, description="every random choice of the run derives from it")
    overwrite: bool = Field(False, description="replace an existing run directory of this name")
    resume: Literal["never", "auto"] = Field(
        "never", description="auto: go on with the run of this name where it stopped; start it where there is none"
    )

    @property
    def directory(self) -> str:
        """The folder of this run."""
        return f"{self.root}/{self.name}"


class ResumableRun(RunPlace):
    """Name and place of a run whose state is saved."""

    allow_config_change: tuple[str, ...] = Field(
        (), description="resuming: keys or sections that are meant to differ from what the run was saved with"
    )


class ProfileConfig(Section):
    """Steps that are traced with torch.profiler, under profile/ in the run directory; `report` links the traces."""

    steps: tuple[PositiveInt, ...] = Field((), description="iterations that are traced")
    ranks: tuple[NonNegativeInt, ...] = Field((0,), min_length=1, description="ranks that are traced")


class RunConfig(ResumableRun):
    """Name, place and length of a training run."""

    steps: int = Field(100, ge=1, description="iterations: one rollout and its updates each")
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _traced_steps_come(self) -> "RunConfig":
        late = [step for step in self.profile.steps if step > self.steps]
        if late:
            raise ValueError(f"profile.steps={late[0]} is above steps={self.steps}: name steps that the run has")
        return self


class ClusterConfig(Section):
    """Ranks and how long they wait for each other."""

    ranks: int | None = Field(
        None, ge=1, description="ranks started by hand; default: one an accelerator, on the CPU what a replica takes"
    )
    collective_timeout_s: float = Field(
        10800.0,
        gt=0,
        description="longest wait for a rollout, or for what rank 0 does alone; in NCCL's collectives 900 s",
    )
    restarts: int = Field(
        2,
        ge=0,
        description="ranks started by hand: how often, from one saved state, they are started again in this process "
        "where one was killed; after that the exit code is 75; 0: never, and no copies of the state in host memory",
    )


class BatchConfig(Section):
    """How many responses an iteration collects."""

    prompts_per_step: int = Field(512, ge=1, description="prompts of an iteration")
    samples_per_prompt: int = Field(16, ge=1, description="the group size G")


class ExportConfig(Section):
    """Hugging Face directories written from the run, under hf/."""

    every: int | None = Field(None, ge=1, description="steps between exports; the last step is always exported")
    critic: bool = Field(True, description="export the critic as a value checkpoint as well")


class EvaluationConfig(Section):
    """When and how the sets of data.eval are answered; avg@k with k = samples of the set."""

    every: int | None = Field(None, ge=1, description="steps between evaluations; after the last one always")
    before_training: bool = Field(True, description="also before the first step: where the run starts from")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(0.7, gt=0, le=1, description="nucleus sampling: least probability kept")
    max_new_tokens: int | None = Field(None, ge=1, description="none: as in training")

    def sampling_beside(self, training: SamplingConfig) -> SamplingConfig:
        """How responses are drawn, given how those of training are."""
        most = self.max_new_tokens or training.max_new_tokens
        return SamplingConfig(temperature=self.temperature, top_p=self.top_p, max_new_tokens=most)


class SftDataConfig(Section):
    """Demonstrations: rows {problem, response}."""

    path: str = Field(description="jsonl with the fields problem and response")
    batch_size: int = Field(64, ge=1, description="demonstrations of one optimizer step")
    steps: int | None = Field(None, ge=1, description="optimizer steps; default: epochs over the file")
    epochs: int = Field(1, ge=1, description="passes over the file")
    max_tokens: int = Field(4096, ge=2, description="prompt and response together")
    prompt: PromptTemplate = PromptTemplate()

    @model_validator(mode="after")
    def _one_length(self) -> "SftDataConfig":
        if self.steps is not None and self.epochs != 1:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs} both say how long to train: give one")
        return self


class HangsConfig(Section):
    """When a phase that does not end is a hang: ranks then leave stacks under logs/ and start again, or end (75)."""

    floor_s: float = Field(1800.0, gt=0, description="least limit of a phase, and for a rank that says nothing")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a rank."""
        return min(5.0, self.floor_s / 60)


class RobustnessConfig(Section):
    """What keeps a run from standing still."""

    hangs: HangsConfig = HangsConfig()


AlarmName = Literal[
    "entropy_explosion",
    "accuracy_collapse",
    "value_below_baseline",
    "value_bias",
    "critic_fault",
    "evaluation_falls",
    "train_infer_gap",
    "gradient_spike",
    "skipped_updates",
    "truncated_text",
    "failed_grades",
    "broken_episodes",
    "tools_unused",
]


class AlarmsConfig(Section):
    """What alarms do besides being told (docs/alarms.md)."""

    stop: tuple[AlarmName, ...] = Field((), description="alarms that end the run after the step (exit 1)")
    off: tuple[AlarmName, ...] = Field((), description="alarms that are never raised")


class MonitoringConfig(Section):
    """Where the metrics go besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="scalars under tensorboard/")
    wandb: Literal["disabled", "online", "offline"] = Field(
        "disabled",
        description="Weights & Biases (`pip install vapo-megatron[wandb]`; WANDB_PROJECT, WANDB_ENTITY and WANDB_TAGS "
        "say where). online: unless WANDB_MODE says otherwise; offline: written under wandb/ in the run directory, "
        "sent later by `wandb sync`",
    )
    mlflow: str | None = Field(
        None,
        min_length=1,
        description="URI of an MLflow server or store (`pip install vapo-megatron[mlflow]`; the experiment is "
        "MLFLOW_EXPERIMENT_NAME's)",
    )
    alarms: AlarmsConfig = AlarmsConfig()


class RetentionConfig(Section):
    """Which checkpoints stay; all that are not named here are removed."""

    last: int = Field(2, ge=1, description="the newest")
    every: int | None = Field(None, ge=1, description="also those of steps that are a multiple of this")
    best: str | None = Field(None, description="also that of the highest of this metric: evaluation/aime24_avg@32")


class CheckpointConfig(Section):
    """Checkpoints of saved state under checkpoints/, from which run.resume=auto goes on."""

    every: int | None = Field(10, ge=1, description="steps between saves; none: no saves by steps")
    every_minutes: float | None = Field(
        30.0, gt=0, description="time between saves, within value pretraining too; none: no saves by time"
    )
    keep: RetentionConfig = RetentionConfig()
    job_timeout_s: float | None = Field(
        None, gt=0, description="seconds after which the run saves and ends; SLURM_JOB_END_TIME counts besides"
    )

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints at all; the last step then always has one."""
        return self.every is not None or self.every_minutes is not None

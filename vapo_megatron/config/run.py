"""Sections about the run itself: name and directory, ranks, batches, checkpoints, evaluation,
monitoring."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.data import PromptTemplate
from vapo_megatron.config.rollout import SamplingConfig

# Evaluations use other seeds than training, the same at every step: they differ only by the
# weights.
EVALUATION_SEED = 1_000_003


class RunPlace(Section):
    """Name and directory of a run."""

    name: str = Field(
        "run",
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        description="folder of the run below root",
    )
    root: str = Field("runs", min_length=1, description="folder that holds run directories")
    seed: int = Field(1, ge=0, lt=2**62, description="seed of every random choice of the run")
    overwrite: bool = Field(False, description="replace an existing run directory of this name")
    resume: Literal["never", "auto"] = Field(
        "never",
        description="auto: continue the run of this name where it stopped, or start it if there "
        "is none",
    )

    @property
    def directory(self) -> str:
        """The folder of this run."""
        return f"{self.root}/{self.name}"


class ResumableRun(RunPlace):
    """Name and directory of a resumable run."""

    allow_config_change: tuple[str, ...] = Field(
        (),
        description="on resume: keys or sections that may differ from the saved config",
    )


class ProfileConfig(Section):
    """Steps that are traced with torch.profiler, under profile/ in the run directory; `report`
    links the traces."""

    steps: tuple[PositiveInt, ...] = Field((), description="iterations that are traced")
    ranks: tuple[NonNegativeInt, ...] = Field(
        (0,), min_length=1, description="ranks that are traced"
    )


class RunConfig(ResumableRun):
    """Name, directory and length of a training run."""

    steps: int = Field(
        100, ge=1, description="training steps, each with one rollout and its updates"
    )
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _traced_steps_come(self) -> "RunConfig":
        late = [step for step in self.profile.steps if step > self.steps]
        if late:
            raise ValueError(
                f"profile.steps={late[0]} is above steps={self.steps}: name steps within the run"
            )
        return self


class ClusterConfig(Section):
    """Number of ranks, timeouts and restarts."""

    ranks: int | None = Field(
        None,
        ge=1,
        description="ranks to start; none: one per accelerator; on CPU, as many as one replica "
        "needs. Under srun and torchrun their tasks are the ranks, and this is ignored",
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        description="threads of a rank on a machine without GPUs; none: OMP_NUM_THREADS, or 1; "
        "another number rounds sums differently",
    )
    collective_timeout_s: float = Field(
        10800.0,
        gt=0,
        description="seconds that ranks wait for a rollout or for rank 0; NCCL collectives time "
        "out after 900 s",
    )
    restarts: int = Field(
        2,
        ge=0,
        description="without torchrun or srun: restarts of the ranks from one state after a rank "
        "is killed, before the run ends with exit code 75; 0: none, and no in-memory checkpoints",
    )


class BatchConfig(Section):
    """Responses per step."""

    prompts_per_step: int = Field(512, ge=1, description="prompts per step")
    samples_per_prompt: int = Field(16, ge=1, description="responses per prompt (the group size G)")


class ExportConfig(Section):
    """Models that the run exports as Hugging Face directories, under hf/."""

    every: int | None = Field(
        None, ge=1, description="steps between exports; the last step is always exported"
    )
    critic: bool = Field(True, description="export the critic as a value checkpoint as well")


class EvaluationConfig(Section):
    """Schedule and sampling of evaluations; the k of avg@k is the set's `samples`."""

    every: int | None = Field(
        None, ge=1, description="steps between evaluations; the last step is always evaluated"
    )
    before_training: bool = Field(
        True, description="evaluate before the first step too, as a baseline"
    )
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0 is greedy")
    top_p: float = Field(
        0.7, gt=0, le=1, description="nucleus sampling: cumulative probability to keep; 1: all"
    )
    top_k: int | None = Field(
        None, ge=1, description="only the most likely tokens are drawn; none: all"
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="limit of response tokens; none: as in training"
    )

    def sampling_beside(self, training: SamplingConfig) -> SamplingConfig:
        """Sampling settings of evaluations, given the training settings."""
        most = self.max_new_tokens or training.max_new_tokens
        return SamplingConfig(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=training.stop,
            max_new_tokens=most,
        )


class SftDataConfig(Section):
    """Demonstrations: rows {problem, response}."""

    CONFLICTS = (("steps", "epochs!=1", "both say how long to train, give one"),)

    path: str = Field(description="jsonl with the fields problem and response")
    batch_size: int = Field(64, ge=1, description="demonstrations per optimizer step")
    steps: int | None = Field(None, ge=1, description="optimizer steps; none: epochs over the file")
    epochs: int = Field(1, ge=1, description="epochs over the file")
    max_tokens: int = Field(4096, ge=2, description="limit of prompt and response tokens together")
    prompt: PromptTemplate = PromptTemplate()


class HangsConfig(Section):
    """Hang detection: ranks write their stacks to logs/ and restart, or end (exit 75)."""

    floor_s: float = Field(
        1800.0,
        gt=0,
        description="minimum timeout, in seconds, of a phase and of a rank without heartbeat",
    )

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a rank."""
        return min(5.0, self.floor_s / 60)


class RobustnessConfig(Section):
    """Detection of runs that no longer make progress."""

    hangs: HangsConfig = HangsConfig()


AlarmName = Literal[
    "entropy_explosion",
    "accuracy_collapse",
    "value_below_baseline",
    "critic_untrusted",
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
    "copied_answers",
    "length_collapse",
    "nothing_learnt",
]


class AlarmsConfig(Section):
    """Effects of alarms besides the report (docs/alarms.md)."""

    stop: tuple[AlarmName, ...] = Field(
        (), description="alarms that stop the run after the step (exit 1)"
    )
    off: tuple[AlarmName, ...] = Field((), description="alarms that are never raised")


class MonitoringConfig(Section):
    """Trackers of metrics besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="write scalars to tensorboard/")
    wandb: Literal["disabled", "online", "offline"] = Field(
        "disabled",
        description="Weights & Biases (`pip install vapo-megatron[wandb]`; WANDB_PROJECT, "
        "WANDB_ENTITY and WANDB_TAGS apply). online: unless WANDB_MODE overrides it; offline: "
        "written to wandb/ in the run directory, for `wandb sync` to send later",
    )
    mlflow: str | None = Field(
        None,
        min_length=1,
        description="URI of an MLflow server or store (`pip install vapo-megatron[mlflow]`); "
        "MLFLOW_EXPERIMENT_NAME names the experiment",
    )
    alarms: AlarmsConfig = AlarmsConfig()


class RetentionConfig(Section):
    """Which checkpoints are kept; all others are removed."""

    last: int = Field(2, ge=1, description="keep this many of the newest")
    every: int | None = Field(
        None, ge=1, description="also keep checkpoints whose step is a multiple of this"
    )
    best: str | None = Field(
        None,
        description="also keep the one with the highest value of this metric, such as "
        "evaluation/aime24_avg@32",
    )


class CheckpointConfig(Section):
    """Checkpoints of the run's state under checkpoints/, from which run.resume=auto continues."""

    every: int | None = Field(10, ge=1, description="steps between saves; none: no saves by steps")
    every_minutes: float | None = Field(
        30.0,
        gt=0,
        description="minutes between saves, also during value pretraining; none: no saves by time",
    )
    keep: RetentionConfig = RetentionConfig()
    job_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds from process start until the run saves and ends; SLURM_JOB_END_TIME "
        "also applies",
    )

    @property
    def saves(self) -> bool:
        """Whether there are checkpoints at all; the last step then always has one."""
        return self.every is not None or self.every_minutes is not None

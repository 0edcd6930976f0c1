"""Sections about the run itself: its name and place, its ranks, its batches, what it keeps."""

from typing import Literal

from pydantic import Field, model_validator

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


class RunConfig(ResumableRun):
    """Name, place and length of a training run."""

    steps: int = Field(100, ge=1, description="iterations: one rollout and its updates each")


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
        description="ranks started by hand: how often, from one checkpoint, they are started again in this process "
        "where one was killed; after that the exit code is 75",
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

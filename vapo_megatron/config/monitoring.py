"""What a run shows and keeps of itself."""

from typing import Literal

from pydantic import Field

from vapo_megatron.config.base import Section

Action = Literal["warn", "stop", "off"]


class AlarmActions(Section):
    """What each alarm does. warn: tell; stop: tell, and end the run after the step (exit 1); off: nothing."""

    length_collapse: Action = Field("warn", description="responses became a fraction")
    entropy_collapse: Action = Field("warn", description="exploration ended")
    entropy_explosion: Action = Field("warn", description="text becomes noise")
    accuracy_collapse: Action = Field("warn", description="what was solved is not any more")
    value_below_baseline: Action = Field("warn", description="the critic knows less than what is free")
    value_bias: Action = Field("warn", description="values are off, and not alike along the response")
    critic_fault: Action = Field("warn", description="the critic has the signature of a fault")
    evaluation_falls: Action = Field("warn", description="reward rises, evaluation falls")
    train_infer_gap: Action = Field("warn", description="engine and trainer differ")
    clipped_share: Action = Field("warn", description="updates go too far")
    gradient_spike: Action = Field("warn", description="a gradient far above what is usual")
    skipped_updates: Action = Field("warn", description="updates would have harmed a model")
    truncated_text: Action = Field("warn", description="responses hit the token limit")
    repeated_text: Action = Field("warn", description="responses run in circles")
    groups_without_signal: Action = Field("warn", description="one reward for whole groups")
    failed_grades: Action = Field("warn", description="verifications fail")
    slow_engine: Action = Field("warn", description="few tokens per second")
    engine_failures: Action = Field("warn", description="an engine was ended and started again")
    host_memory: Action = Field("warn", description="memory runs out")


class AlarmsConfig(Section):
    """Limits beyond which a step's metrics are called trouble (docs/alarms.md)."""

    actions: AlarmActions = AlarmActions()
    recent_steps: int = Field(3, ge=1, description="newest steps, whose median is compared")
    reference_steps: int = Field(8, ge=2, description="fewest steps before them that they are compared with")
    window_steps: int = Field(50, ge=10, description="most steps before them that they are compared with")
    length_collapse: float = Field(0.25, ge=0, le=1, description="mean response length, of its highest so far")
    entropy_collapse: float = Field(0.02, ge=0, le=1, description="entropy, of its first steps")
    entropy_explosion: float = Field(3.5, gt=1, description="entropy, times what is usual")
    entropy_max: float = Field(4.0, gt=0, description="entropy, nats per token")
    accuracy_collapse: float = Field(0.4, ge=0, le=1, description="accuracy, of its best so far")
    critic_gain: float = Field(-0.05, ge=-1, le=0, description="critic/gain, share of the returns' variance")
    value_bias: float = Field(0.5, gt=0, description="difference of the values' bias along the response")
    evaluation_fall: float = Field(0.05, gt=0, le=1, description="evaluation below the best one so far")
    train_infer_kl: float = Field(
        0.05, gt=0, description="mean KL of the trainer's policy to the rollout policy, nats per token"
    )
    train_infer_jump: float = Field(10.0, gt=1, description="the same, times what is usual; below a tenth of it: never")
    clipped_share: float = Field(0.1, gt=0, le=1, description="share of tokens beyond the clip range")
    gradient_spike: float = Field(8.0, gt=1, description="gradient norm, times what is usual")
    truncated_share: float = Field(0.5, gt=0, le=1, description="share of responses cut off at the token limit")
    repeated_share: float = Field(0.25, gt=0, le=1, description="share of tokens that repeat a passage")
    frac_zero_std_groups: float = Field(0.95, gt=0, le=1, description="share of groups whose rewards are all equal")
    failed_grades: float = Field(0.05, ge=0, le=1, description="share of responses whose verification failed")
    slow_engine: float = Field(0.4, ge=0, le=1, description="tokens per second of the rollout, of what is usual")
    host_memory_used: float = Field(0.95, gt=0, le=1, description="share of the host's memory in use")
    host_memory_growth: float = Field(0.2, gt=0, description="growth of rank 0's memory within window_steps")


class WandbConfig(Section):
    """Weights & Biases; needs `pip install vapo-megatron[wandb]`. The run's id is kept in its directory."""

    enabled: bool = Field(False, description="whether it is used")
    project: str = Field("vapo-megatron", min_length=1, max_length=128, description="project that the run belongs to")
    entity: str | None = Field(None, min_length=1, description="team or user; default: that of the login")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: written under wandb/ in the run directory, sent later by `wandb sync`"
    )
    tags: tuple[str, ...] = Field((), description="tags of the run")
    samples: int = Field(8, ge=0, description="responses a step in the table of samples; 0: none")


class MonitoringConfig(Section):
    """Where the metrics go besides metrics.jsonl."""

    tensorboard: bool = Field(True, description="scalars under tensorboard/")
    wandb: WandbConfig = WandbConfig()
    sample_groups_per_step: int = Field(8, ge=0, description="groups whose responses are kept under samples/; 0: none")
    sample_token_estimates: int = Field(
        4, ge=0, description="of the kept responses, those whose values and advantages are kept token by token; 0: none"
    )
    alarms: AlarmsConfig = AlarmsConfig()

"""The configs of `vapo-megatron train` and `vapo-megatron evaluate`: all sections, and what holds between them."""

from typing import Any, Self

from pydantic import Field, model_validator

from vapo_megatron.config.algorithm import AlgorithmConfig, ValuePretrainingConfig
from vapo_megatron.config.base import Section
from vapo_megatron.config.checkpoint import CheckpointConfig
from vapo_megatron.config.data import DataConfig, EvaluationDataConfig
from vapo_megatron.config.model import ActorConfig, CriticConfig, ModelConfig
from vapo_megatron.config.monitoring import MonitoringConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.config.run import BatchConfig, ClusterConfig, EvaluationConfig, ExportConfig, RunConfig, RunPlace
from vapo_megatron.config.server import ServerConfig
from vapo_megatron.config.suggest import nearest

# Beginnings of the names of metrics that every step has.
_STEP_METRICS = ("reward/", "accuracy/", "response_length/", "actor/", "critic/")


class TrainConfig(Section):
    """Reinforcement learning."""

    preset: str | None = Field(None, description="one of config/presets: the defaults that this file starts from")
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    export: ExportConfig = ExportConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitoring: MonitoringConfig = MonitoringConfig()

    @model_validator(mode="before")
    @classmethod
    def _no_sections_of_plan(cls, values: Any) -> Any:
        for key in ("hardware", "plan"):
            if key not in cls.model_fields and isinstance(values, dict) and key in values:
                raise ValueError(
                    f"{key} is a section of `vapo-megatron plan` and `doctor` alone: give its keys to them as "
                    "overrides or in a YAML that extends this config, and take it out here"
                )
        return values

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        algorithm = self.algorithm
        algorithm.check(self.batch.samples_per_prompt)
        if not algorithm.uses_critic:
            estimator = algorithm.advantage.estimator
            for key, on in (
                ("value_pretraining.enabled=true", self.value_pretraining.enabled),
                ("critic.freeze_attention=true", self.critic.freeze_attention),
                (f"critic.init={self.critic.init}", self.critic.init != "policy"),
            ):
                if on:
                    raise ValueError(
                        f"{key} with algorithm.advantage.estimator={estimator}: it has no critic, "
                        f"set {'value_pretraining.enabled=false' if key.startswith('value_') else 'it back'} or use gae"
                    )
        if algorithm.value_loss.kind == "hl_gauss":
            self._bins_fit()
        self._best_is_measured()
        self._grade_is_there()
        self._rollouts_fit()
        return self

    def _best_is_measured(self) -> None:
        best = self.checkpoint.keep.best
        if best is None:
            return
        measured = [name for entry in self.data.eval for name in entry.metric_names]
        if best.startswith("evaluation/") or "/" not in best:
            if best not in measured:
                guess = nearest(best, measured)
                hint = (
                    f"did you mean {guess}?"
                    if guess
                    else f"expected one of: {', '.join(measured) or 'data.eval is empty'}"
                )
                raise ValueError(f"checkpoint.keep.best={best} is no metric of data.eval: {hint}")
        elif not best.startswith(_STEP_METRICS):
            raise ValueError(f"checkpoint.keep.best={best} is no metric of a step: give one such as reward/mean")

    def _bins_fit(self) -> None:
        bins, reward = self.algorithm.value_loss, self.reward
        if self.critic.init == "reward_model":
            raise ValueError(
                "critic.init=reward_model with algorithm.value_loss.kind=hl_gauss: a reward model has one output and "
                "no bins, set critic.init=policy or kind=mse"
            )
        low, high = sorted((reward.correct, reward.incorrect))
        if reward.verifier == "math" and not (bins.low <= low and high <= bins.high):
            raise ValueError(
                f"algorithm.value_loss.low..high={bins.low:g}..{bins.high:g} does not hold reward.incorrect="
                f"{reward.incorrect:g} and reward.correct={reward.correct:g}: widen it"
            )

    def _rollouts_fit(self) -> None:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 is greedy: policy gradients need sampled responses, 1.0 is usual "
                "(evaluation.temperature may be 0)"
            )
        if self.rollout.collect_timeout_s >= self.cluster.collective_timeout_s:
            raise ValueError(
                f"rollout.collect_timeout_s={self.rollout.collect_timeout_s:g} s is not below "
                f"cluster.collective_timeout_s={self.cluster.collective_timeout_s:g} s: "
                "ranks would give up on a rollout that is still allowed, raise the latter"
            )

    def _grade_is_there(self) -> None:
        nll, algorithm = self.algorithm.policy_loss.positive_nll, self.algorithm
        if self.reward.correct_above is not None:
            return
        for key, on in (
            ("policy_loss.positive_nll.positives=correct", nll.coef > 0 and nll.positives == "correct"),
            ("dynamic_sampling.enabled=true", algorithm.dynamic_sampling.enabled),
            ("shaping.length_reward_coef", algorithm.shaping.length_reward_coef > 0),
        ):
            if on:
                raise ValueError(
                    f"algorithm.{key} needs the verifier's grade, reward.correct_above=null leaves none: give "
                    "reward.correct_above, or switch it off"
                )

    @property
    def model_sizes(self) -> dict[str, int]:
        """Ranks of a replica, by model."""
        sizes = {"actor": self.actor.layout.model_size}
        if self.algorithm.uses_critic:
            sizes["critic"] = self.critic.layout.model_size
        return sizes


class EvaluateConfig(Section):
    """Evaluation of a checkpoint on engines of its own, or of whatever an OpenAI-compatible server serves."""

    run: RunPlace = RunPlace(name="evaluation")
    model: ModelConfig | None = Field(None, description="checkpoint to evaluate on engines of our own")
    server: ServerConfig | None = Field(None, description="instead of model: a server that is not ours")
    data: EvaluationDataConfig
    sampling: SamplingConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.server is None):
            what = "neither is" if self.model is None else "both are"
            raise ValueError(
                f"{what} given of model (engines of our own) and server (an external one): give one of them"
            )
        if self.server is not None and self.server.api == "completions" and self.data.prompt.chat_template:
            raise ValueError(
                "server.api=completions with data.prompt.chat_template=true: plain text has no chat template, set "
                "server.api=chat or data.prompt.chat_template=false"
            )
        return self

    @model_validator(mode="after")
    def _engines_read_the_checkpoint(self) -> Self:
        if self.rollout.load_format == "dummy":
            raise ValueError("rollout.load_format=dummy leaves the engines without the checkpoint's weights: set auto")
        if self.rollout.external_urls:
            raise ValueError(
                "rollout.external_urls: those engines have a trainer's weights, leave it out, or give a server that is "
                "not ours as section server"
            )
        return self

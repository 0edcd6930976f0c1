"""The configs of `vapo-megatron train` and `vapo-megatron evaluate`: all sections, and what holds between them."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from vapo_megatron.config.algorithm import GROUP_ESTIMATORS, AlgorithmConfig
from vapo_megatron.config.base import Section, nearest
from vapo_megatron.config.data import DataConfig, EvaluationDataConfig, ServerConfig
from vapo_megatron.config.model import ActorConfig, CriticConfig, ModelConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.config.run import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    ExportConfig,
    MonitoringConfig,
    RobustnessConfig,
    RunConfig,
    RunPlace,
)
from vapo_megatron.config.value import ValuePretrainingConfig

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
    robustness: RobustnessConfig = RobustnessConfig()

    @model_validator(mode="before")
    @classmethod
    def _no_sections_of_other_commands(cls, values: Any) -> Any:
        planning = "plan` and `doctor"
        for key, commands in (("hardware", planning), ("plan", planning), ("critic_probes", "critic")):
            if key not in cls.model_fields and isinstance(values, dict) and key in values:
                raise ValueError(
                    f"{key} is a section of `vapo-megatron {commands}` alone: give its keys there as overrides or in a "
                    "YAML that extends this config, and take it out here"
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
                (f"critic.kind={self.critic.kind}", self.critic.kind != "model"),
                (f"critic.init={self.critic.init}", self.critic.init != "policy"),
                (f"critic.model_path={self.critic.model_path}", self.critic.model_path is not None),
            ):
                if on:
                    raise ValueError(
                        f"{key} with algorithm.advantage.estimator={estimator}: it has no critic, "
                        f"set {'value_pretraining.enabled=false' if key.startswith('value_') else 'it back'} or use gae"
                    )
        self._adapters_fit()
        if self.critic.kind == "probe" and self.value_pretraining.enabled:
            raise ValueError(
                "value_pretraining.enabled=true with critic.kind=probe: a record of responses has no hidden states to "
                "learn from, set it to false (preset vapo_direct)"
            )
        if algorithm.value_loss.has_bounds:
            self._values_fit()
        self._best_is_measured()
        self.data.check_rewards(self.reward)
        self._grade_is_there()
        self._rollouts_fit()
        self._agents_fit()
        self._old_responses_fit()
        self._windows_fit()
        _check_preset(self)
        return self

    def _adapters_fit(self) -> None:
        if self.critic.kind == "adapter" and self.critic.freeze_attention:
            raise ValueError(
                "critic.freeze_attention=true with critic.kind=adapter: all weights are frozen there, leave it out, "
                "and linear_qkv and linear_proj out of model.adapter.layers"
            )
        if self.actor.kind == "adapter" and self.algorithm.saves_reference:
            raise ValueError(
                f"algorithm.kl.replace_reference_every={self.algorithm.kl.replace_reference_every} with "
                "actor.kind=adapter: the reference is the policy without its adapters and stays so, set "
                "algorithm.kl.replace_reference_every=null"
            )

    def _best_is_measured(self) -> None:
        best = self.checkpoint.keep.best
        if best is None:
            return
        measured = [name for entry in self.data.eval for name in entry.metric_names]
        if best.startswith("evaluation/") or "/" not in best:
            if best not in measured:
                names = ", ".join(measured) or "data.eval is empty"
                hint = f"did you mean {guess}?" if (guess := nearest(best, measured)) else f"expected one of: {names}"
                raise ValueError(f"checkpoint.keep.best={best} is no metric of data.eval: {hint}")
        elif not best.startswith(_STEP_METRICS):
            raise ValueError(f"checkpoint.keep.best={best} is no metric of a step: give one such as reward/mean")

    def _values_fit(self) -> None:
        settings = self.algorithm.value_loss
        switch = "kind=hl_gauss" if settings.kind == "hl_gauss" else f"squash={settings.squash}"
        if self.critic.init == "reward_model":
            raise ValueError(
                f"critic.init=reward_model with algorithm.value_loss.{switch}: the output of a reward model is neither "
                "bins nor what a tanh is taken of, set critic.init=policy, or kind=mse without bounds"
            )
        if self.algorithm.kl.placement == "reward":
            raise ValueError(
                f"algorithm.kl.placement=reward with algorithm.value_loss.{switch}: what the KL takes from returns has "
                "no bound, set placement=loss or kind=mse"
            )
        bounds = self.return_range
        if bounds is None:
            if not {"low", "high"} <= settings.model_fields_set:
                raise ValueError(
                    f"algorithm.value_loss.{switch} with reward.verifier=function: its scores may be anything, give "
                    "algorithm.value_loss.low and high"
                )
        elif not (settings.low <= bounds[0] and bounds[1] <= settings.high):
            raise ValueError(
                f"algorithm.value_loss.low..high={settings.low:g}..{settings.high:g} does not hold the returns "
                f"{bounds[0]:g}..{bounds[1]:g} of reward.incorrect, reward.correct and algorithm.shaping: widen it"
            )

    @property
    def return_range(self) -> tuple[float, float] | None:
        """Least and greatest return of a response, KL penalties aside; None where a user's function gives scores."""
        rewards, algorithm = self.data.rewards(self.reward), self.algorithm
        if any(reward.verifier == "function" for reward in rewards):
            return None
        low, *_, high = sorted(worth for reward in rewards for worth in (reward.correct, reward.incorrect))
        low -= float(algorithm.shaping.soft_overlong is not None)
        if algorithm.advantage.gamma < 1:
            low, high = min(low, 0.0), max(high, 0.0)
        return low, high

    def _rollouts_fit(self) -> None:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 is greedy: policy gradients need sampled responses, 1.0 is usual "
                "(evaluation.temperature may be 0)"
            )
        if self.sampling.top_p != 1:
            raise ValueError(
                f"sampling.top_p={self.sampling.top_p}: the trainer's log-probs are those of the whole distribution, "
                "not of the part that was sampled from, set 1 (evaluation.top_p may differ)"
            )
        if self.rollout.collect_timeout_s >= self.cluster.collective_timeout_s:
            raise ValueError(
                f"rollout.collect_timeout_s={self.rollout.collect_timeout_s:g} s is not below "
                f"cluster.collective_timeout_s={self.cluster.collective_timeout_s:g} s: "
                "ranks would give up on a rollout that is still allowed, raise the latter"
            )

    def _agents_fit(self) -> None:
        algorithm, agent = self.algorithm, self.rollout.agent
        rounds = algorithm.dynamic_sampling.max_rounds
        if agent is None:
            if algorithm.advantage.credit == "turn":
                raise ValueError(
                    "algorithm.advantage.credit=turn without rollout.agent: a response is one turn, name an agent or "
                    "set credit=token"
                )
            return
        for key, on, remedy in (
            (f"algorithm.dynamic_sampling.max_rounds={rounds}", algorithm.dynamic_sampling.enabled, "set it to null"),
            ("algorithm.advantage.estimator=remax", algorithm.advantage.estimator == "remax", "use gae or rloo"),
            ("data.prompt.chat_template=false", not self.data.prompt.chat_template, "set it to true"),
        ):
            if on:
                raise ValueError(f"rollout.agent={agent} with {key}: episodes cannot be had so, {remedy}")

    def _old_responses_fit(self) -> None:
        staleness, algorithm = self.rollout.asynchronous.max_staleness, self.algorithm
        partial, estimator = self.rollout.partial_responses.oversampling, self.algorithm.advantage.estimator
        if not staleness and not partial:
            return
        key = f"asynchronous.max_staleness={staleness}" if staleness else f"partial_responses.oversampling={partial}"
        key = f"rollout.{key}"
        if partial and estimator in GROUP_ESTIMATORS:
            raise ValueError(
                f"{key} with algorithm.advantage.estimator={estimator}: it compares responses of a group, whose tokens "
                "are of different weights then, use gae or reinforce_pp"
            )
        if algorithm.importance_sampling.kind == "none" and not algorithm.policy_loss.of_rollout:
            raise ValueError(
                f"{key} with algorithm.importance_sampling.kind=none: responses are of older weights than those that "
                "are trained, and nothing corrects for it; set kind=tis or mis (or policy_loss.kind=sao)"
            )
        if estimator == "remax":
            raise ValueError(
                f"{key} with algorithm.advantage.estimator=remax: its greedy responses are of newer weights than the "
                "others, choose another estimator"
            )

    def _windows_fit(self) -> None:
        algorithm, rounds = self.algorithm, self.algorithm.dynamic_sampling.max_rounds
        for key, on, remedy in (
            (f"shaping.truncated={algorithm.shaping.truncated}", algorithm.shaping.truncated != "window", "window"),
            (f"dynamic_sampling.max_rounds={rounds}", algorithm.dynamic_sampling.enabled, "null"),
            (f"advantage.function={algorithm.advantage.function}", algorithm.advantage.function is not None, "null"),
            ("policy_loss.kind=gspo", algorithm.policy_loss.kind == "gspo", "ppo_clip"),
        ):
            if on and self.rollout.windows > 1:
                raise ValueError(
                    f"rollout.windows={self.rollout.windows} with algorithm.{key}: a step has a part of a response, "
                    f"which has no reward yet; set it to {remedy}, or rollout.windows=1"
                )

    def _grade_is_there(self) -> None:
        algorithm, rounds = self.algorithm, self.algorithm.dynamic_sampling.max_rounds
        if all(reward.correct_above is not None for reward in self.data.rewards(self.reward)):
            return
        for key, on in (
            ("policy_loss.positive_nll.coef", algorithm.policy_loss.positive_nll.coef > 0),
            (f"dynamic_sampling.max_rounds={rounds}", algorithm.dynamic_sampling.enabled),
            ("advantage.estimator=raft", algorithm.advantage.estimator == "raft"),
        ):
            if on:
                raise ValueError(
                    f"algorithm.{key} needs the verifier's grade, reward.correct_above=null leaves none: give "
                    "reward.correct_above, or switch it off"
                )

    @property
    def pretraining_algorithm(self) -> AlgorithmConfig:
        """The algorithm of value pretraining, whose responses are written whole: with windows, those that are cut off
        there are so for good, and count as wrong as they do at the end of their last window."""
        if self.rollout.windows == 1:
            return self.algorithm
        shaping = self.algorithm.shaping.model_copy(update={"truncated": "terminal"})
        return self.algorithm.model_copy(update={"shaping": shaping})

    @property
    def has_critic_model(self) -> bool:
        """Whether there is a critic with weights of its own, and not a probe or none."""
        return self.algorithm.uses_critic and self.critic.kind != "probe"

    @property
    def has_reference_model(self) -> bool:
        """Whether there is a reference with weights of its own: a policy with adapters has its own in itself."""
        algorithm = self.algorithm
        return algorithm.uses_reference and (self.actor.kind == "model" or algorithm.kl.reference_path is not None)

    @property
    def reference_source(self) -> Path:
        """The Hugging Face directory that the reference starts from."""
        return Path(self.algorithm.kl.reference_path or self.model.path)

    @property
    def critic_source(self) -> Path:
        """The Hugging Face directory that the critic starts from."""
        return Path(self.critic.init_path or self.critic.model_path or self.model.path)

    @property
    def shares_base(self) -> bool:
        """Whether actor and critic train adapters on the same frozen weights, which are then held once."""
        mine, its = ((section.kind, section.layout, section.precision) for section in (self.actor, self.critic))
        return mine == its and mine[0] == "adapter" and self.critic_source == Path(self.model.path)

    @property
    def critic_key(self) -> str:
        """The key that names critic_source."""
        paths = (("critic.init_path", self.critic.init_path), ("critic.model_path", self.critic.model_path))
        return next((key for key, path in paths if path), "model.path")

    @property
    def samples(self) -> int:
        """Responses of an iteration."""
        return self.batch.prompts_per_step * self.batch.samples_per_prompt

    def updates_per_rollout(self, name: str) -> int:
        """Optimizer steps of a model, actor or critic, in an iteration."""
        update = self.algorithm.update
        rounds = update.critic_updates_per_policy_update if name == "critic" else 1
        return rounds * update.updates(self.samples, self.batch.prompts_per_step)

    def trainable(self, name: str) -> ActorConfig | CriticConfig:
        """The section of the critic, or of the actor; the reference's, which is a whole model, is made of that."""
        if name == "reference":
            return self.actor.model_copy(update={"kind": "model"})
        return self.critic if name == "critic" else self.actor

    @property
    def model_sizes(self) -> dict[str, int]:
        """Ranks of a replica, by model."""
        sizes = {"actor": self.actor.layout.model_size}
        if self.has_critic_model:
            sizes["critic"] = self.critic.layout.model_size
        return sizes


# By what a preset leaves out of VAPO: the key that it is named after, which of its values undo that, what it wants.
_LEFT_OUT: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "value_pretraining": ("value_pretraining.enabled", bool, "false"),
    "decoupled_gae": ("algorithm.advantage.lambda_critic", lambda value: value == 1, "less than 1"),
    "length_adaptive_gae": ("algorithm.advantage.lambda_policy", lambda value: value == "length_adaptive", "a number"),
    "token_level_loss": ("algorithm.policy_loss.aggregation", lambda value: value == "token_mean", "sequence_mean"),
    "positive_nll": ("algorithm.policy_loss.positive_nll.coef", bool, "0"),
    "critic": ("algorithm.advantage.estimator", lambda value: value == "gae", "one without a critic, such as grpo"),
    "group_sampling": ("batch.samples_per_prompt", lambda value: value > 1, "1, and as many responses by prompts"),
}


def _check_preset(config: TrainConfig) -> None:
    """Raise ValueError, in one line, where a file or an override takes back what the preset is named after."""
    preset, loss = config.preset or "", config.algorithm.policy_loss
    updates = config.updates_per_rollout("actor") // config.algorithm.update.epochs
    key, undoes, expected = _LEFT_OUT.get(preset.removeprefix("vapo_without_"), ("preset", lambda _: False, ""))
    value = reduce(getattr, key.split("."), config)
    if preset in ("rloo", "remax") and updates != 1:
        undone, expected = f"algorithm.update: updates of a rollout={updates}", "one: set minibatches=1 there"
    elif preset.startswith("vapo_direct") and config.algorithm.advantage.calibration == "none":
        undone, expected = "algorithm.advantage.calibration=none", "trust, or values"
    elif preset == "vapo_without_clip_higher" and loss.clip_high != loss.clip_low:
        undone, expected = f"algorithm.policy_loss.clip_high={loss.clip_high}", f"clip_low={loss.clip_low:g}"
    elif undoes(value):
        undone = f"{key}={value}"
    else:
        return
    raise ValueError(
        f"{undone} undoes preset={preset}, which wants {expected}: take it out of the file or the overrides, or choose "
        "another preset"
    )


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
            state = "neither is" if self.model is None else "both are"
            raise ValueError(f"{state} given of model (engines of our own) and server (external): give one of them")
        self.data.check_rewards(self.reward)
        if self.server is not None and self.server.api == "completions" and self.data.prompt.chat_template:
            raise ValueError(
                "server.api=completions with data.prompt.chat_template=true: plain text has no chat template, set "
                "server.api=chat or data.prompt.chat_template=false"
            )
        if self.rollout.load_format == "dummy":
            raise ValueError("rollout.load_format=dummy leaves the engines without the checkpoint's weights: set auto")
        if self.rollout.external_urls:
            raise ValueError(
                "rollout.external_urls: those engines have a trainer's weights, leave it out, or give a server that is "
                "not ours as section server"
            )
        return self

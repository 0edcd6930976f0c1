"""The config of `vapo-megatron train`: all sections, and the rules across them."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from vapo_megatron.algorithms.registry import POLICY_LOSSES
from vapo_megatron.config.algorithm import OF_GREEDY, OF_GROUPS, SELECTS, AlgorithmConfig
from vapo_megatron.config.base import Section, nearest, refuse
from vapo_megatron.config.data import DataConfig
from vapo_megatron.config.model import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    RecomputeConfig,
    ReferenceConfig,
)
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
)
from vapo_megatron.config.value import ValuePretrainingConfig

# Prefixes of metrics that every step has.
_STEP_METRICS = ("reward/", "accuracy/", "response_length/", "actor/", "critic/")

# Settings that undo what a preset is named after.
_UNDOES = {
    "vapo_without_value_pretraining": "value_pretraining.enabled",
    "vapo_without_decoupled_gae": "algorithm.advantage.lambda_critic=1",
    "vapo_without_length_adaptive_gae": "algorithm.advantage.lambda_policy=length_adaptive",
    "vapo_without_token_level_loss": "algorithm.policy_loss.aggregation=token_mean",
    "vapo_without_positive_nll": "algorithm.policy_loss.positive_nll.coef>0",
    "vapo_without_critic": "algorithm.advantage.estimator=gae",
    "vapo_without_group_sampling": "batch.samples_per_prompt>1",
    "vapo_direct|vapo_direct_groups": "algorithm.advantage.calibration=none",
    "tether": "algorithm.advantage.calibration!=tether",
    "vapo_regression|reinforce_regression": "critic.kind!=regression",
}
_BOUNDED = "algorithm.value_loss.kind=hl_gauss, algorithm.value_loss.squash!=none"
_OLD_RESPONSES = "rollout.asynchronous.max_staleness>0, rollout.partial_responses.oversampling"
_CHOOSES_GROUPS = "algorithm.dynamic_sampling.max_rounds"
_READS_GRADES = f"algorithm.policy_loss.positive_nll.coef>0, {_CHOOSES_GROUPS}, {SELECTS}"


class TrainConfig(Section):
    """Reinforcement learning."""

    CONFLICTS = (
        (
            f"{OF_GROUPS}, {_CHOOSES_GROUPS}",
            "batch.samples_per_prompt=1",
            "it compares samples of the same prompt, and there is only one: raise "
            "samples_per_prompt, or use gae or reinforce_pp, and max_rounds=null",
        ),
        (
            "algorithm.advantage.calibration=tether",
            "batch.samples_per_prompt=1",
            "it mixes the value with the mean of a group, and there is only one sample: raise "
            "samples_per_prompt, or set calibration=values or trust",
        ),
        (
            "algorithm.advantage.calibration=tether",
            "critic.regression",
            "the regression has a coefficient for each already: set calibration=values or trust, "
            "or remove critic.regression",
        ),
        (
            "algorithm.advantage.tracker",
            "batch.samples_per_prompt>1",
            "a group is its own baseline: set tracker=false or samples_per_prompt=1",
        ),
        (
            "value_pretraining.enabled, critic.freeze_attention, critic.kind!=model, "
            "critic.init!=policy, critic.model_path, critic.privileged_field",
            "algorithm.advantage.estimator!=gae",
            "that has no critic: unset the former (value_pretraining.enabled=false), or use gae",
        ),
        (
            "critic.freeze_attention",
            "critic.kind=adapter",
            "its weights are frozen anyway: unset it, and leave linear_qkv and linear_proj out of "
            "model.adapter.layers",
        ),
        (
            "algorithm.kl.replace_reference_every",
            "actor.kind=adapter",
            "the reference is always the policy without its adapters: set "
            "replace_reference_every=null",
        ),
        (
            "reference.layout",
            "algorithm.kl.placement=none, algorithm.kl.replace_reference_every, "
            "actor.kind=adapter & algorithm.kl.reference_path=null",
            "only a fixed reference model can have its own layout: remove one of them, or name a "
            "model in algorithm.kl.reference_path",
        ),
        (
            "value_pretraining.enabled",
            "critic.kind=probe",
            "recorded responses have no hidden states to learn from: set it to false (preset "
            "vapo_direct)",
        ),
        (
            "value_pretraining.enabled",
            "critic.kind=regression",
            "it is fitted to past steps and has nothing to pretrain: set it to false (preset "
            "vapo_regression)",
        ),
        (
            "critic.kind=regression",
            "algorithm.value_loss.kind!=mse, algorithm.value_loss.squash!=none, "
            "algorithm.advantage.lambda_critic!=1, "
            "algorithm.update.critic_updates_per_policy_update>1",
            "a regression has no loss and no updates: unset the latter",
        ),
        (
            "critic.regression",
            "algorithm.advantage.gamma!=1, algorithm.advantage.off_policy!=none, "
            "algorithm.advantage.function, algorithm.advantage.tracker, "
            "algorithm.shaping.truncated=bootstrap|window, algorithm.kl.placement=reward",
            "it learns from the undiscounted returns of whole responses: unset the latter "
            "(tracker: set critic.regression.history)",
        ),
        (
            "critic.regression",
            "critic.kind!=regression & algorithm.advantage.calibration=none",
            "nothing would read its features: set calibration=values or trust, or "
            "critic.kind=regression",
        ),
        (
            "critic.regression.siblings, critic.regression.prefix",
            "batch.samples_per_prompt=1",
            "it compares responses to the same prompt, and there is only one: set it to false, or "
            "raise samples_per_prompt",
        ),
        (
            "critic.regression.entropy",
            "algorithm.update.rollout_logprobs_within",
            "entropies are of the pass that the latter leaves out: unset one of them",
        ),
        (
            "critic.init=reward_model",
            _BOUNDED,
            "a reward model's output is neither bins nor the input of a squash: set "
            "critic.init=policy, or kind=mse without bounds",
        ),
        (
            "algorithm.kl.placement=reward",
            _BOUNDED,
            "the KL makes returns unbounded: set placement=loss or kind=mse",
        ),
        (
            "sampling.temperature=0",
            "",
            "it is greedy, but policy gradients need sampling: 1.0 is usual "
            "(evaluation.temperature may be 0)",
        ),
        (
            "sampling.top_p!=1",
            "",
            "the trainer computes log-probs of the full distribution, not of the truncated one: "
            "set 1 (evaluation.top_p may differ)",
        ),
        (
            "sampling.top_k",
            "",
            "the trainer computes log-probs of the full distribution, not of the truncated one: "
            "leave it out (evaluation.top_k may be set)",
        ),
        (
            "algorithm.advantage.credit=turn",
            "rollout.agent=null, rollout.episode.max_turns=1",
            "there is one turn, name an agent with more of them or set credit=token",
        ),
        (
            "rollout.agent",
            f"{OF_GREEDY}, data.prompt.chat_template=false",
            "agents do not work with it: set the latter to gae or rloo, or to true",
        ),
        (
            "rollout.partial_responses.oversampling",
            OF_GROUPS,
            "it compares responses of a group, which then come from different weights: use gae or "
            "reinforce_pp",
        ),
        (
            _OLD_RESPONSES,
            "algorithm.importance_sampling.kind=none & "
            f"algorithm.policy_loss.kind!={POLICY_LOSSES.either(rollout_ratio=True)}",
            "responses come from older weights than those trained, and nothing corrects for it: "
            "set kind=tis or mis (or policy_loss.kind=sao)",
        ),
        (
            _OLD_RESPONSES,
            OF_GREEDY,
            "its greedy responses come from newer weights than the others: choose another "
            "estimator",
        ),
        (
            "algorithm.update.rollout_logprobs_within",
            "critic.kind=probe & algorithm.advantage.estimator=gae, rollout.router_replay, "
            f"{_OLD_RESPONSES}, rollout.windows>1",
            "that needs the pass that computes the trainer's: unset one of them",
        ),
        (
            "rollout.windows>1",
            f"algorithm.shaping.truncated!=window, {_CHOOSES_GROUPS}, "
            "algorithm.advantage.function, algorithm.mask_function, "
            f"algorithm.policy_loss.kind={POLICY_LOSSES.either(per_sequence=True)}",
            "a step has only part of a response, which has no reward yet: windows need "
            "shaping.truncated=window and the others unset",
        ),
    )

    preset: str | None = Field(
        None, description="one of config/presets, whose values are this file's defaults"
    )
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
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

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.algorithm.value_loss.has_bounds:
            self._values_fit()
        self._best_is_measured()
        self.data.check_rewards(self.reward)
        if any(reward.correct_above is None for reward in self.data.rewards(self.reward)):
            why = (
                "needs the verifier's grade, which reward.correct_above=null leaves out: set "
                "that, or switch this off"
            )
            refuse(self, _READS_GRADES, "", why)
        if self.rollout.collect_timeout_s >= self.cluster.collective_timeout_s:
            raise ValueError(
                f"rollout.collect_timeout_s={self.rollout.collect_timeout_s:g} s is not below "
                f"cluster.collective_timeout_s={self.cluster.collective_timeout_s:g} s: "
                "ranks would give up on a rollout that is still within its limit: raise the latter"
            )
        self._preset_is_kept()
        return self

    def _best_is_measured(self) -> None:
        best = self.checkpoint.keep.best
        if best is None:
            return
        measured = [name for entry in self.data.eval for name in entry.metric_names]
        if best.startswith("evaluation/") or "/" not in best:
            if best not in measured:
                guess = nearest(best, measured)
                if guess:
                    hint = f"did you mean {guess}?"
                elif measured:
                    hint = f"expected one of: {', '.join(measured)}"
                else:
                    hint = "that is empty, name a set or leave keep.best out"
                raise ValueError(
                    f"checkpoint.keep.best={best} is not a metric of data.eval: {hint}"
                )
        elif not best.startswith(_STEP_METRICS):
            raise ValueError(
                f"checkpoint.keep.best={best} is not a metric of a step: give one such as "
                "reward/mean"
            )

    def _preset_is_kept(self) -> None:
        """Raises ValueError if a file or an override undoes the point of the preset."""
        updates = self.updates_per_rollout("actor") // self.algorithm.update.epochs
        undone = "take it out of the file or the overrides, or choose another preset"
        if self.preset in ("rloo", "remax") and updates != 1:
            raise ValueError(
                f"preset={self.preset} needs one update per rollout, but algorithm.update gives "
                f"{updates}: {undone}"
            )
        if self.preset == "vapo_without_clip_higher":
            low = str(self.algorithm.policy_loss.clip_low).removesuffix(".0")
            refuse(
                self,
                f"algorithm.policy_loss.clip_high!={low}",
                "preset",
                f"it needs clip_low={low}: {undone}",
            )
        for preset, setting in _UNDOES.items():
            refuse(
                self,
                setting,
                f"preset={preset}",
                f"it undoes what the preset is named after: {undone}",
            )

    def _values_fit(self) -> None:
        settings = self.algorithm.value_loss
        if settings.kind == "hl_gauss":
            switch = "kind=hl_gauss"
        else:
            switch = f"squash={settings.squash}"
        bounds = self.return_range
        if bounds is None:
            if not {"low", "high"} <= settings.model_fields_set:
                raise ValueError(
                    f"algorithm.value_loss.{switch} with reward.verifier=function: its scores are "
                    "unbounded, give algorithm.value_loss.low and high"
                )
        elif not (settings.low <= bounds[0] and bounds[1] <= settings.high):
            raise ValueError(
                f"algorithm.value_loss.low..high={settings.low:g}..{settings.high:g} does not "
                f"contain the returns {bounds[0]:g}..{bounds[1]:g} of reward.incorrect, "
                "reward.correct and algorithm.shaping: widen it"
            )

    @property
    def return_range(self) -> tuple[float, float] | None:
        """Smallest and largest return of a response without KL penalties; None: unbounded
        scores."""
        rewards = self.data.rewards(self.reward)
        algorithm = self.algorithm
        if any(reward.verifier == "function" for reward in rewards):
            return None
        low, *_, high = sorted(
            worth for reward in rewards for worth in (reward.correct, reward.incorrect)
        )
        low -= float(algorithm.shaping.soft_overlong is not None)
        if algorithm.advantage.gamma < 1:
            low = min(low, 0.0)
            high = max(high, 0.0)
        return low, high

    @property
    def pretraining_algorithm(self) -> AlgorithmConfig:
        """The algorithm of value pretraining, which generates whole responses.

        With windows, truncated responses are final there and count as wrong, as at the end of their
        last window.
        """
        if self.rollout.windows == 1:
            return self.algorithm
        shaping = self.algorithm.shaping.model_copy(update={"truncated": "terminal"})
        return self.algorithm.model_copy(update={"shaping": shaping})

    @property
    def has_critic_model(self) -> bool:
        """Whether there is a critic with its own model, neither a probe nor a regression."""
        return self.algorithm.uses_critic and self.critic.kind in ("model", "adapter")

    @property
    def has_probe(self) -> bool:
        """Whether the critic is a probe, which needs the policy scored and keeps its hidden
        states."""
        return self.algorithm.uses_critic and self.critic.kind == "probe"

    @property
    def reads_policy_outputs(self) -> bool:
        """Whether values need the pass that scores the policy: its hidden states, or its
        entropies."""
        regression = self.critic.regression
        return self.has_probe or (regression is not None and regression.entropy)

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference has its own weights: a policy with adapters already contains its
        reference."""
        algorithm = self.algorithm
        return algorithm.uses_reference and (
            self.actor.kind == "model" or algorithm.kl.reference_path is not None
        )

    @property
    def sources(self) -> dict[str, tuple[str, Path]]:
        """The config key and Hugging Face directory that each model starts from, by model name."""
        policy = ("model.path", Path(self.model.path))
        reference = self.algorithm.kl.reference_path
        sources = {"actor": policy}
        if self.has_critic_model:
            sources["critic"] = self.critic_source
        if self.has_reference_model:
            sources["reference"] = policy
            if reference:
                sources["reference"] = ("algorithm.kl.reference_path", Path(reference))
        return sources

    @property
    def critic_source(self) -> tuple[str, Path]:
        """The key and the Hugging Face directory that the critic starts from."""
        paths = {
            "critic.init_path": self.critic.init_path,
            "critic.model_path": self.critic.model_path,
        }
        return next(
            ((key, Path(path)) for key, path in paths.items() if path),
            ("model.path", Path(self.model.path)),
        )

    @property
    def shares_base(self) -> bool:
        """Whether actor and critic train adapters on the same frozen weights, held once."""
        if self.actor.kind != "adapter" or self.critic.kind != "adapter":
            return False
        same_shards = (
            self.actor.layout == self.critic.layout
            and self.actor.precision == self.critic.precision
        )
        return same_shards and self.critic_source[1] == Path(self.model.path)

    @property
    def samples(self) -> int:
        """Responses per step."""
        return self.batch.prompts_per_step * self.batch.samples_per_prompt

    def updates_per_rollout(self, name: str) -> int:
        """Optimizer steps of a model, actor or critic, per rollout."""
        update = self.algorithm.update
        if name == "critic":
            rounds = update.critic_updates_per_policy_update
        else:
            rounds = 1
        return rounds * update.updates(self.samples, self.batch.prompts_per_step)

    def trainable(self, name: str) -> ActorConfig | CriticConfig:
        """The section of a model, "actor", "critic" or "reference".

        The reference has the actor's settings, as a whole model with its own layout; it shares
        prompts unless that is context-parallel.
        """
        if name == "reference":
            layout = self.reference.layout or self.actor.layout
            shares_prompts = self.actor.share_prompts and layout.cp == 1
            changes = {
                "kind": "model",
                "layout": layout,
                "recompute": RecomputeConfig(),
                "share_prompts": shares_prompts,
            }
            return self.actor.model_copy(update=changes)
        if name == "critic":
            return self.critic
        return self.actor

    @property
    def model_sizes(self) -> dict[str, int]:
        """Ranks per replica, by model."""
        return {name: self.trainable(name).layout.model_size for name in self.sources}

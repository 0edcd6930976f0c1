"""What is optimised: every choice that VAPO makes, or that its paper leaves open, as a switch (docs/algorithms.md).

The defaults are VAPO's.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from vapo_megatron.config.base import Section
from vapo_megatron.config.policy import IMPORT_PATH, Fraction, ImportanceSamplingConfig, KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig

Estimator = Literal[
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "group_baseline",
    "batch_baseline",
    "reinforce_pp",
    "remax",
    "raft",
    "function",
]
Lambda = Fraction | Literal["length_adaptive"]

# Those that compare a response with the others of its prompt, as a condition (base.refuse).
OF_GROUPS = "algorithm.advantage.estimator=grpo|dr_grpo|rloo|group_baseline|raft"


class AdvantageConfig(Section):
    """How good each token was."""

    CONFLICTS = (
        ("estimator=function", "function=null", "name the function, package.module:name"),
        (
            "function",
            "estimator!=function|gae",
            "both give the advantages, set estimator=function (or gae, for a function that reads values), or remove "
            "function",
        ),
        (
            "gamma!=1",
            "estimator!=gae|reinforce_pp|function",
            "it discounts nothing, set gamma=1 or use gae or reinforce_pp",
        ),
        ("off_policy!=none", "estimator!=gae", "it corrects values, of gae alone: set off_policy=none or use gae"),
        (
            "calibration!=none",
            "estimator!=gae, function, off_policy!=none, gamma!=1",
            "it makes the advantages of undiscounted GAE out of a critic's values, set calibration=none or take the "
            "other back",
        ),
        (
            "credit=turn",
            "estimator!=gae, calibration!=none, off_policy!=none",
            "turns have the values of plain GAE alone, set credit=token",
        ),
        (
            "tracker",
            "estimator!=batch_baseline & calibration=none",
            "nothing reads a prompt's history there, set estimator=batch_baseline, or calibration=values or trust",
        ),
        ("whiten!=none", "estimator=raft", "its 1 and 0 select responses, set whiten=none"),
    )

    estimator: Estimator = Field("gae", description="gae has a critic, the others have none")
    function: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="package.module:name of f(ScoredResponses) -> advantages [T]; estimator=function has no critic, "
        "with estimator=gae there are values to read, the critic is trained, and it may return (advantages, value "
        "targets)",
    )
    gamma: Fraction = Field(1.0, description="discount")
    lambda_critic: Lambda = Field(1.0, description="lambda of the value targets; 1: Monte-Carlo returns")
    lambda_policy: Lambda = Field("length_adaptive", description="lambda of the advantages")
    length_adaptive_alpha: float = Field(0.05, gt=0, description="lambda = 1 - 1 / (alpha * response tokens)")
    length_adaptive_floor: Fraction = Field(0.0, description="least length-adaptive lambda")
    calibration: Literal["none", "values", "trust"] = Field(
        "none",
        description="values: GAE of values that the returns of past steps calibrate; trust: mixed with return less "
        "value, as far as past steps say that the critic explains nothing",
    )
    tracker: bool = Field(
        False,
        description="one response a prompt: what earlier responses to its prompt earned stands in the place of a group "
        "(SPO), as the baseline of batch_baseline or among what calibration weighs",
    )
    credit: Literal["token", "turn"] = Field(
        "token",
        description="gae: over tokens, or over the turns of an agent's episode, with the value of a turn's first state "
        "and lambda counted in turns",
    )
    off_policy: Literal["none", "vtrace"] = Field(
        "none",
        description="vtrace: temporal differences are weighted by min(1, pi / mu) of each token, mu the policy that "
        "drew it (responses of earlier weights); gae alone",
    )
    whiten: Literal["none", "full", "scale"] = Field(
        "none", description="over all tokens of the batch: to mean 0 and variance 1 (full), or variance 1 alone (scale)"
    )


class SoftOverlongConfig(Section):
    """Punishment that grows from 0 to -1 over the last cache_length of max_length response tokens (DAPO)."""

    max_length: int = Field(ge=1, description="response tokens where it is -1")
    cache_length: int = Field(ge=1, description="response tokens over which it grows")

    @model_validator(mode="after")
    def _cache_fits(self) -> Self:
        if self.cache_length > self.max_length:
            raise ValueError(f"cache_length={self.cache_length} is above max_length={self.max_length}: lower it")
        return self


class ShapingConfig(Section):
    """What is added to the verifier's reward, and what a truncated response is."""

    truncated: Literal["terminal", "bootstrap", "window", "mask"] = Field(
        "terminal",
        description="reward of an incorrect answer and value 0 after it (terminal), the critic's value of its last "
        "state after it (bootstrap; window: for advantages alone, the critic learns from finished responses), or no "
        "loss at all (mask)",
    )
    soft_overlong: SoftOverlongConfig | None = Field(None, description="punishment of long responses; none: off")

    @property
    def bootstraps(self) -> bool:
        """Whether a value stands for what would have followed a truncated response."""
        return self.truncated in ("bootstrap", "window")


class UpdateConfig(Section):
    """How a rollout is cut into optimizer steps."""

    CONFLICTS = (
        (
            "minibatch_size",
            "minibatches",
            "both cut a rollout, give one, and set the other to null where a preset gives it",
        ),
    )

    minibatch_size: int | None = Field(
        None, ge=1, description="of one optimizer step, in minibatch_unit; none: 512, or what minibatches gives"
    )
    minibatches: int | None = Field(
        None, ge=1, description="instead of minibatch_size: optimizer steps that one pass over a rollout is cut into"
    )
    minibatch_unit: Literal["samples", "groups"] = Field("samples", description="responses, or prompts with all theirs")
    epochs: int = Field(1, ge=1, description="passes over a rollout")
    rollout_logprobs_within: float | None = Field(
        None,
        gt=0,
        description="take the engines' log-probs for the old ones, without a pass that computes them, where those of "
        "every sixteenth response are on average at most so far from the trainer's; none: compute all of them",
    )
    critic_updates_per_policy_update: int = Field(1, ge=1, description="passes of the critic for one of the policy")

    def size(self, samples: int, groups: int) -> int:
        """Of a mini-batch of a rollout of so many samples and groups, in minibatch_unit."""
        if self.minibatches is None:
            return self.minibatch_size or 512
        return -(-(samples if self.minibatch_unit == "samples" else groups) // self.minibatches)

    def updates(self, samples: int, groups: int) -> int:
        """Optimizer steps of the policy on such a rollout."""
        units = samples if self.minibatch_unit == "samples" else groups
        return self.epochs * -(-units // self.size(samples, groups))


class DynamicSamplingConfig(Section):
    """Only groups with both correct and incorrect responses are learnt from (DAPO)."""

    oversampling: float = Field(3.0, ge=1, description="prompts in flight, in units of those still wanted")
    max_rounds: int | None = Field(
        None,
        ge=1,
        description="draw prompts until enough groups are informative, at most so many times oversampling x "
        "prompts_per_step (DAPO: 10); then other groups fill the batch up; none: no dynamic sampling",
    )

    @property
    def enabled(self) -> bool:
        """Whether groups are chosen at all."""
        return self.max_rounds is not None


class AlgorithmConfig(Section):
    """The algorithm."""

    CONFLICTS = (
        (
            "shaping.truncated=bootstrap|window, value_loss.kind!=mse, value_loss.squash!=none, "
            "update.critic_updates_per_policy_update>1",
            "advantage.estimator!=gae",
            "it needs a critic, which gae alone has: use that, or unset it",
        ),
        (
            "shaping.soft_overlong",
            "shaping.truncated=bootstrap|window",
            "a truncated response has no reward then, and would escape the punishment for its length: choose one",
        ),
        (
            "shaping.truncated=bootstrap|window, kl.placement=reward",
            "advantage.calibration!=none",
            "it learns from the return of whole responses what values are worth, set calibration=none or take the "
            "other back",
        ),
        (
            "advantage.lambda_critic!=1, advantage.off_policy!=none",
            "shaping.truncated=window",
            "its value targets are Monte-Carlo returns of finished responses alone, choose bootstrap or unset it",
        ),
        (
            "importance_sampling.kind!=none",
            "policy_loss.kind=sao|dppo",
            "its ratio is to the rollout policy already, set importance_sampling.kind=none",
        ),
        (
            "update.rollout_logprobs_within",
            "importance_sampling.kind!=none, advantage.off_policy!=none, advantage.function, filter_function, "
            "metrics_function",
            "that reads the trainer's log-prob of every token, set one of them back",
        ),
    )

    advantage: AdvantageConfig = AdvantageConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    value_loss: ValueLossConfig = ValueLossConfig()
    kl: KlConfig = KlConfig()
    importance_sampling: ImportanceSamplingConfig = ImportanceSamplingConfig()
    shaping: ShapingConfig = ShapingConfig()
    update: UpdateConfig = UpdateConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    filter_function: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="package.module:name of f(ScoredResponses) -> bool [S], the responses that carry loss",
    )
    metrics_function: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description="package.module:name of f(ScoredResponses) -> {name: number}, which go into the step's row as "
        "custom/NAME",
    )

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is built."""
        return self.advantage.estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is built."""
        return self.kl.placement != "none"

    @property
    def saves_reference(self) -> bool:
        """Whether the reference changes during the run and must be checkpointed."""
        return self.uses_reference and self.kl.replace_reference_every is not None

    def update_gives_logprobs(self, samples: int, groups: int) -> bool:
        """Whether the policy's update reads each response of a rollout once and all of them before its only optimizer
        step: its forward pass then computes the old log-probs, exactly, and nothing before it needs them."""
        update = self.update
        needed_before = (
            self.kl.placement in ("reward", "advantage"),
            self.importance_sampling.kind != "none",
            self.advantage.function is not None,
            self.advantage.off_policy != "none",
            self.filter_function is not None,
            self.metrics_function is not None,
        )
        single = update.updates(samples, groups) == 1
        return single and not any(needed_before)

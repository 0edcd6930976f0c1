"""The algorithm: every choice that VAPO makes, or that its paper leaves open, as a switch
(docs/algorithms.md).

The defaults are VAPO's.
"""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from vapo_megatron.algorithms.registry import ESTIMATORS, POLICY_LOSSES, EstimatorTraits
from vapo_megatron.config.base import Section
from vapo_megatron.config.policy import (
    IMPORT_PATH,
    Fraction,
    ImportanceSamplingConfig,
    KlConfig,
    PolicyLossConfig,
)
from vapo_megatron.config.value import ValueLossConfig

if TYPE_CHECKING:
    Estimator = str
else:
    Estimator = Literal[
        (*ESTIMATORS.names(critic=True), *ESTIMATORS.names(critic=False), "function")
    ]
Lambda = Fraction | Literal["length_adaptive"]

# Conditions of base.refuse: estimators that compare a response with the others of its prompt, and
# those that draw a greedy response to each prompt.
OF_GROUPS = f"algorithm.advantage.estimator={ESTIMATORS.either(groups=True)}"
OF_GREEDY = f"algorithm.advantage.estimator={ESTIMATORS.either(greedy=True)}"
# Estimators that choose the responses that carry loss.
SELECTS = f"algorithm.advantage.estimator={ESTIMATORS.either(selects=True)}"


class AdvantageConfig(Section):
    """How advantages and value targets are estimated."""

    CONFLICTS = (
        ("estimator=function", "function=null", "name the function, package.module:name"),
        (
            "function",
            "estimator!=function|gae",
            "both give the advantages: set estimator=function (or gae for a function that reads "
            "values), or remove function",
        ),
        (
            "gamma!=1",
            f"estimator!={ESTIMATORS.either(discounts=True)}|function",
            "this estimator does not discount: set gamma=1, or use gae or reinforce_pp",
        ),
        (
            "off_policy!=none",
            "estimator!=gae",
            "it corrects the values of gae only: set off_policy=none or use gae",
        ),
        (
            "calibration!=none",
            "estimator!=gae, function, off_policy!=none, gamma!=1",
            "calibration needs plain, undiscounted GAE over a critic's values: set "
            "calibration=none or reset the other",
        ),
        (
            "credit=turn",
            "estimator!=gae, calibration!=none, off_policy!=none",
            "credit by turns works only with plain GAE: set credit=token",
        ),
        (
            "calibration=tether",
            "tracker",
            "it mixes the value with the mean of a group: set tracker=false, or calibration=values "
            "or trust",
        ),
        (
            "tracker",
            "estimator!=batch_baseline & calibration=none",
            "nothing would read a prompt's history: set estimator=batch_baseline, or "
            "calibration=values or trust",
        ),
        (
            "whiten!=none",
            f"estimator={ESTIMATORS.either(selects=True)}",
            "its 1 and 0 select responses: set whiten=none",
        ),
    )

    estimator: Estimator = Field("gae", description="advantage estimator; only gae uses a critic")
    function: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description=(
            "package.module:name of f(ScoredResponses) -> advantages [T]. With estimator=function "
            "there is no critic; with estimator=gae the critic is trained, its values can be read, "
            "and the function may return (advantages, value targets)"
        ),
    )
    gamma: Fraction = Field(
        1.0, description="discount factor per token, or per turn with credit=turn"
    )
    lambda_critic: Lambda = Field(
        1.0, description="GAE lambda of the value targets; 1: Monte-Carlo returns"
    )
    lambda_policy: Lambda = Field("length_adaptive", description="GAE lambda of the advantages")
    length_adaptive_alpha: float = Field(
        0.05, gt=0, description="alpha in lambda = 1 - 1 / (alpha * response tokens)"
    )
    length_adaptive_floor: Fraction = Field(
        0.0, description="lower bound of the length-adaptive lambda"
    )
    calibration: Literal["none", "values", "trust", "tether"] = Field(
        "none",
        description=(
            "values: GAE over values calibrated by the returns of past steps; trust: the less the "
            "critic explained returns in past steps, the more weight goes to return minus value "
            "instead of GAE; tether: GAE over the mixture of the group's mean and the value that "
            "predicted past returns best (Le Critique)"
        ),
    )
    tracker: bool = Field(
        False,
        description=(
            "with one response per prompt, use the past rewards of the same prompt in place of a "
            "group (SPO): as the baseline of batch_baseline, or as an input of the calibration"
        ),
    )
    credit: Literal["token", "turn"] = Field(
        "token",
        description=(
            "steps of GAE: tokens, or the turns of an agent's episode, each with the value of its "
            "first state and lambda applied per turn"
        ),
    )
    off_policy: Literal["none", "vtrace"] = Field(
        "none",
        description=(
            "vtrace: weight each token's temporal difference by min(1, pi / mu), with mu the "
            "policy that drew it; for responses drawn under earlier weights; gae only"
        ),
    )
    whiten: Literal["none", "full", "scale"] = Field(
        "none",
        description=(
            "normalise over the batch's tokens: mean 0 and variance 1 (full), or variance only "
            "(scale)"
        ),
    )

    @property
    def traits(self) -> EstimatorTraits:
        """The estimator's, none of them for a function."""
        return ESTIMATORS.traits.get(self.estimator, EstimatorTraits())


class SoftOverlongConfig(Section):
    """Penalty that grows from 0 to -1 over the last cache_length of max_length response tokens
    (DAPO)."""

    max_length: int = Field(ge=1, description="response tokens at which the penalty reaches -1")
    cache_length: int = Field(ge=1, description="response tokens over which the penalty grows")

    @model_validator(mode="after")
    def _cache_fits(self) -> Self:
        if self.cache_length > self.max_length:
            raise ValueError(
                f"cache_length={self.cache_length} is above max_length={self.max_length}: lower it"
            )
        return self


class ShapingConfig(Section):
    """What is added to the verifier's reward, and how truncated responses are treated."""

    truncated: Literal["terminal", "bootstrap", "window", "mask"] = Field(
        "terminal",
        description=(
            "a truncated response counts as incorrect with value 0 after it (terminal), is "
            "bootstrapped from the critic's value of its last state (bootstrap; window: for "
            "advantages only, the critic learns from finished responses), or carries no loss (mask)"
        ),
    )
    soft_overlong: SoftOverlongConfig | None = Field(
        None, description="penalty on long responses; none: off"
    )

    @property
    def bootstraps(self) -> bool:
        """Whether truncated responses are bootstrapped from a value."""
        return self.truncated in ("bootstrap", "window")


_SCORED_ONE_OF = 16


class UpdateConfig(Section):
    """How a rollout is split into optimizer steps."""

    CONFLICTS = (
        (
            "minibatch_size",
            "minibatches",
            "both split a rollout: give one of them, and set the other to null where a preset "
            "gives it",
        ),
    )

    minibatch_size: int | None = Field(
        None,
        ge=1,
        description=(
            "size of one optimizer step, in units of minibatch_unit; none: 512, or by minibatches"
        ),
    )
    minibatches: int | None = Field(
        None,
        ge=1,
        description=(
            "instead of minibatch_size: number of optimizer steps in one pass over a rollout; "
            "it may be fewer where this does not divide the rollout"
        ),
    )
    minibatch_unit: Literal["samples", "groups"] = Field(
        "samples", description="responses, or prompts with all theirs"
    )
    epochs: int = Field(1, ge=1, description="passes over a rollout")
    rollout_logprobs_within: float | None = Field(
        None,
        gt=0,
        description=(
            "skip the scoring pass and use the engines' log-probs as the old ones if, on every "
            "sixteenth response, they differ from the trainer's by at most this on average; none: "
            "compute all of them"
        ),
    )
    critic_updates_per_policy_update: int = Field(
        1, ge=1, description="critic passes per policy pass"
    )

    def scored_of(self, samples: int, ranks: int) -> int:
        """One of so many responses is scored where engines may stand in for the trainer
        (rollout_logprobs_within), at least one a rank; 1 where all are."""
        if self.rollout_logprobs_within is None:
            return 1
        return max(1, min(_SCORED_ONE_OF, samples // ranks))

    def size(self, samples: int, groups: int) -> int:
        """Size of a mini-batch, in minibatch_unit, for a rollout of this many samples and
        groups."""
        if self.minibatches is None:
            return self.minibatch_size or 512
        return -(-(samples if self.minibatch_unit == "samples" else groups) // self.minibatches)

    def updates(self, samples: int, groups: int) -> int:
        """Optimizer steps of the policy on a rollout of this many samples and groups."""
        if self.minibatch_unit == "samples":
            units = samples
        else:
            units = groups
        return self.epochs * -(-units // self.size(samples, groups))


class DynamicSamplingConfig(Section):
    """Train only on groups with both correct and incorrect responses (DAPO), or with different
    rewards of an agent."""

    oversampling: float = Field(
        3.0, ge=1, description="prompts in flight, as a multiple of those still needed"
    )
    max_rounds: int | None = Field(
        None,
        ge=1,
        description=(
            "draw prompts until enough groups are informative, at most this many times "
            "oversampling x prompts_per_step (DAPO: 10), then fill the batch with other groups; "
            "none: no dynamic sampling"
        ),
    )

    @property
    def enabled(self) -> bool:
        """Whether dynamic sampling is on."""
        return self.max_rounds is not None


class AlgorithmConfig(Section):
    """The algorithm."""

    CONFLICTS = (
        (
            "shaping.truncated=bootstrap|window, value_loss.kind!=mse, value_loss.squash!=none, "
            "update.critic_updates_per_policy_update>1",
            "advantage.estimator!=gae",
            "it needs a critic, which only gae has: use gae, or unset it",
        ),
        (
            "shaping.soft_overlong",
            "shaping.truncated=bootstrap|window",
            "a truncated response then has no reward and would escape the penalty for its length: "
            "choose one",
        ),
        (
            "shaping.truncated=bootstrap|window, kl.placement=reward",
            "advantage.calibration!=none",
            "calibration learns from the returns of whole responses: set calibration=none or "
            "reset the other",
        ),
        (
            "advantage.lambda_critic!=1, advantage.off_policy!=none",
            "shaping.truncated=window",
            "its value targets are Monte-Carlo returns of finished responses only: choose "
            "bootstrap, or unset it",
        ),
        (
            "importance_sampling.kind!=none",
            f"policy_loss.kind={POLICY_LOSSES.either(rollout_ratio=True)}",
            "its ratio is already taken to the rollout policy: set importance_sampling.kind=none",
        ),
        (
            "update.rollout_logprobs_within",
            "importance_sampling.kind!=none, advantage.off_policy!=none, advantage.function, "
            "filter_function, metrics_function",
            "that reads the trainer's log-prob of every token: unset one of them",
        ),
        (
            "mask_function",
            "advantage.credit=turn",
            "a mask may cut a turn in two: set advantage.credit=token",
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
        description=(
            "package.module:name of f(ScoredResponses) -> bool [S], true for responses that carry "
            "loss"
        ),
    )
    mask_function: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description=(
            "package.module:name of f(Sample, decode) -> bool [response], true for tokens that "
            "carry loss; the others count as observations"
        ),
    )
    metrics_function: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description=(
            "package.module:name of f(ScoredResponses) -> {name: number}; the numbers are logged "
            "with the step as custom/NAME"
        ),
    )

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is built."""
        return self.advantage.traits.critic

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is built."""
        return self.kl.placement != "none"

    @property
    def saves_reference(self) -> bool:
        """Whether the reference changes during the run and must be checkpointed."""
        return self.uses_reference and self.kl.replace_reference_every is not None

    def update_gives_logprobs(self, samples: int, groups: int) -> bool:
        """Whether the policy's update reads each response of a rollout once and all of them before
        its only optimizer
        step: its forward pass then computes the old log-probs, exactly, and nothing before it needs
            them."""
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

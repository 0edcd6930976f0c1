"""How the policy learns: its loss, its distance from a reference, and its correction for the
engine's policy."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from vapo_megatron.algorithms.registry import POLICY_LOSSES, LossTraits
from vapo_megatron.config.base import IMPORT_PATH, Section

Fraction = Annotated[float, Field(ge=0, le=1)]
if TYPE_CHECKING:
    LossKind = str
else:
    LossKind = Literal[(*POLICY_LOSSES.names(), "function")]


class PositiveNllConfig(Section):
    """Language-model loss on correct responses."""

    coef: float = Field(0.1, ge=0, description="weight of the loss; 0 switches it off")


class PolicyLossConfig(Section):
    """The loss of the policy."""

    CONFLICTS = (
        ("aggregation=constant", "constant=null", "give the number of tokens"),
        ("aggregation!=constant", "constant", "remove it, or set aggregation=constant"),
        ("kind=function", "function=null", "name the function, package.module:name"),
        ("kind!=function", "function", "remove it, or set kind=function"),
        (
            "dual_clip",
            f"kind!={POLICY_LOSSES.either(dual_clip=True)}",
            "only ppo_clip has a dual clip, remove it",
        ),
        (
            f"kind={POLICY_LOSSES.either(per_sequence=True)}",
            "aggregation!=sequence_mean",
            "its ratio is per sequence, set sequence_mean",
        ),
    )

    kind: LossKind = Field(
        "ppo_clip",
        description="formula of a token's loss (docs/algorithms.md), or your function",
    )
    function: str | None = Field(
        None,
        pattern=IMPORT_PATH,
        description=(
            "package.module:name of f(PolicyTerms) -> loss of each token [t], for kind=function"
        ),
    )
    clip_low: Fraction = Field(
        0.2,
        description=(
            "ratios below 1 - clip_low are clipped (cispo: no low bound); dppo: largest fall in "
            "probability"
        ),
    )
    clip_high: float = Field(
        0.28,
        ge=0,
        description="ratios above 1 + clip_high are clipped; dppo: largest rise in probability",
    )
    dual_clip: float | None = Field(
        None, description="cap of the loss where A < 0, in units of -A; ppo_clip only"
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="how token losses are averaged over the whole mini-batch (docs/algorithms.md)",
    )
    constant: float | None = Field(
        None, gt=0, description="divisor of a response's loss, aggregation=constant"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    positive_nll: PositiveNllConfig = PositiveNllConfig()

    @property
    def traits(self) -> LossTraits:
        """The loss's, none of them for a function."""
        return POLICY_LOSSES.traits.get(self.kind, LossTraits())

    @model_validator(mode="after")
    def _dual_clip_is_outer(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip={self.dual_clip} is not above 1 + clip_high = {1 + self.clip_high}: 3 "
                "is usual"
            )
        return self


class KlConfig(Section):
    """Distance kept from a reference policy."""

    CONFLICTS = (
        (
            "replace_reference_every, reference_path",
            "placement=none",
            "there is no reference: set placement and coef, or remove it",
        ),
        (
            "replace_reference_every",
            "reference_path",
            "a teacher is not replaced by the policy: remove one of them",
        ),
        ("placement=none", "coef>0", "set placement, or remove coef"),
        ("placement!=none", "coef=0", "set coef above 0, or placement=none"),
        ("placement=loss", "estimator=k1", "its gradient is 0 on average, choose k2 or k3"),
        ("placement=reward|advantage", "estimator!=k1", "only k1 is unbiased there, choose it"),
    )

    placement: Literal["none", "reward", "loss", "advantage"] = Field(
        "none",
        description=(
            "where the KL is applied: subtracted from token rewards (gae, reinforce_pp) or the "
            "response's; in the loss; subtracted from token advantages, undiscounted and "
            "unwhitened (on-policy distillation)"
        ),
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="KL estimator: k1 for placement=reward or advantage, k2 or k3 for loss"
    )
    coef: float = Field(0.0, ge=0, description="weight of the KL")
    reference_path: str | None = Field(
        None,
        min_length=1,
        description=(
            "Hugging Face directory of the reference, such as a teacher; it may be of any size, "
            "and has the policy's tokenizer (layout: reference.layout); none: model.path"
        ),
    )
    replace_reference_every: int | None = Field(
        None,
        ge=1,
        description="steps after which the policy becomes the reference; none: it stays as it is",
    )


class ImportanceSamplingConfig(Section):
    """Weight on the policy loss that corrects for differences between the engine's policy and the
    trainer's."""

    kind: Literal["none", "tis", "mis"] = Field(
        "none", description="weight by the ratio, capped (tis), or set to 0 outside low..high (mis)"
    )
    cap: float = Field(2.0, gt=0, description="upper bound on the ratio (tis)")
    low: float = Field(0.5, ge=0, description="smallest ratio that keeps its weight (mis)")
    high: float = Field(2.0, gt=0, description="largest ratio that keeps its weight (mis)")

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if not self.low <= 1 <= self.high:
            raise ValueError(
                f"low={self.low}..high={self.high} does not hold 1, where both policies agree"
            )
        return self

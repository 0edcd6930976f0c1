"""Which features of the prefix take part in values by regression (algorithms/regression.py)."""

from pydantic import Field

from vapo_megatron.config.base import Section


class RegressionConfig(Section):
    """Features on which the returns of past steps are regressed. All are free except entropy, which
    needs a forward pass."""

    siblings: bool = Field(
        True, description="mean return of the other responses to the prompt, for groups"
    )
    prefix: bool = Field(
        True,
        description=(
            "mean return of the siblings that share this prefix, observations included; for groups"
        ),
    )
    surprise: bool = Field(
        True,
        description=(
            "log-probs of the earlier tokens, from the engine: sum, minimum, and how many "
            "probabilities are below 0.2"
        ),
    )
    entropy: bool = Field(
        False,
        description=(
            "entropies at the earlier tokens, sum and maximum; needs the pass that computes old "
            "log-probs"
        ),
    )
    history: bool = Field(
        False, description="mean return of the prompt in earlier steps, faded (SPO's tracker)"
    )
    position: bool = Field(
        True,
        description="coefficients by position, in bins of powers of two; false: one set for all",
    )

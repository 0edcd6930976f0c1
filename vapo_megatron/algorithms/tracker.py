"""What earlier steps say of a prompt: SPO's tracker (arXiv 2509.13232, section 3.1), a baseline for one response a prompt.

A prompt's value is the posterior mean of its return, whose evidence fades each time the prompt is answered. SPO fades it
by how far the policy has moved since; here the factor is a constant, the lower end of SPO's range.
"""

import torch
from torch import Tensor

FADE = 0.875
PRIOR = 1.0  # responses that the prior mean is worth


def tracked_values(sums: Tensor, weights: Tensor, prior: float) -> Tensor:
    """The value of each prompt before its next response.

    Args:
        sums, weights: float64 [...], faded sums of returns and of responses; 0 of a prompt that was never answered.
        prior: value of such a prompt.

    Returns:
        float64 [...].
    """
    return (sums + PRIOR * prior) / (weights + PRIOR)


def with_responses(sums: Tensor, weights: Tensor, returns: Tensor, responses: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and weights after a step.

    Args:
        sums, weights: float64 [P], of the prompts that were answered in it.
        returns: float64 [P], sum of the returns of each prompt's responses.
        responses: float64 [P], how many these are.
    """
    return FADE * sums + returns, FADE * weights + responses

"""Value losses per token, un-reduced. All arguments [T] unless said otherwise."""

import torch
from torch import Tensor


def value_mse(values: Tensor, returns: Tensor) -> Tensor:
    """(V - R)^2 / 2."""
    return (values - returns.detach()).square() / 2


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_clip - R)^2) / 2 with V_clip within `clip` of old_values (PPO's reference
    implementation)."""
    near_old = old_values.detach() + (values - old_values.detach()).clamp(-clip, clip)
    return torch.maximum(value_mse(values, returns), value_mse(near_old, returns))


_SIGMA_BINS = 0.75  # standard deviation of HL-Gauss's Gaussian, in bin widths


def hl_gauss(logits: Tensor, returns: Tensor, low: float, high: float) -> Tensor:
    """Cross-entropy against a Gaussian histogram of the return (HL-Gauss, arXiv 2403.03950, section
    3.1).

    Args:
        logits: [T, bins], the value head's.
        returns: [T]; those outside [low, high] are clamped to it.
        low, high: the least and greatest value that the bins cover.
    """
    bins = logits.shape[-1]
    edges = torch.linspace(low, high, bins + 1, device=logits.device)
    sigma = _SIGMA_BINS * (high - low) / bins
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target = returns.detach().to(logits.dtype).clamp(low, high)
    # Rescaled to the mass that falls between the outer edges.
    mass = torch.special.ndtr((edges - target[:, None]) / sigma)
    probabilities = mass.diff(dim=-1) / (mass[:, -1:] - mass[:, :1])
    return -(probabilities * logits.log_softmax(dim=-1)).sum(dim=-1)


def hl_gauss_value(logits: Tensor, low: float, high: float) -> Tensor:
    """Mean of the predicted histogram: [T, bins] -> [T], float32."""
    edges = torch.linspace(low, high, logits.shape[-1] + 1, device=logits.device)
    return logits.float().softmax(dim=-1) @ ((edges[:-1] + edges[1:]) / 2)


def bounded_value(outputs: Tensor, low: float, high: float) -> Tensor:
    """Outputs squashed into (low, high): m + h tanh(x / h) with middle m and half-width h, slope 1
    in the middle."""
    middle = (low + high) / 2
    half = (high - low) / 2
    return middle + half * torch.tanh(outputs / half)


def arctan_value(outputs: Tensor, low: float, high: float) -> Tensor:
    """low + (high - low) (1/2 + arctan(x) / pi): outputs squashed into (low, high) (BPCO, arXiv
    2608.23566)."""
    return low + (high - low) * (0.5 + torch.arctan(outputs) / torch.pi)

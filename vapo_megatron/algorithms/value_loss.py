"""Value losses per token, un-reduced, and how good values are. All arguments [T] unless said otherwise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vapo_megatron.algorithms.segments import check_bounds


def value_mse(values: Tensor, returns: Tensor) -> Tensor:
    """(V - R)^2 / 2."""
    return (values - returns.detach()).square() / 2


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_clip - R)^2) / 2 with V_clip within `clip` of old_values (PPO's reference implementation).

    Raises ValueError unless clip is positive.
    """
    if clip <= 0:
        raise ValueError(f"clip must be positive, got {clip}")
    near_old = old_values.detach() + (values - old_values.detach()).clamp(-clip, clip)
    return torch.maximum(value_mse(values, returns), value_mse(near_old, returns))


def bin_edges(bins: int, low: float, high: float, device: torch.device | None = None) -> Tensor:
    """bins + 1 equally spaced edges from low to high, float32. Raises ValueError unless bins >= 2 and low < high."""
    if bins < 2 or low >= high:
        raise ValueError(f"needs two bins or more and low < high, got {bins} bins from {low} to {high}")
    return torch.linspace(low, high, bins + 1, device=device)


def hl_gauss(logits: Tensor, returns: Tensor, low: float, high: float, sigma_bins: float = 0.75) -> Tensor:
    """Cross-entropy against a Gaussian histogram of the return (HL-Gauss, arXiv 2403.03950, section 3.1).

    Args:
        logits: [T, bins], the value head's.
        returns: [T]; those outside [low, high] are clamped to it.
        low, high: the least and greatest value that the bins cover.
        sigma_bins: standard deviation of the Gaussian, in bin widths.
    """
    if sigma_bins <= 0:
        raise ValueError(f"sigma_bins must be positive, got {sigma_bins}")
    bins = logits.shape[-1]
    edges = bin_edges(bins, low, high, logits.device)
    sigma = sigma_bins * (high - low) / bins
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target = returns.detach().to(logits.dtype).clamp(low, high)
    # Rescaled to the mass that falls between the outer edges.
    mass = torch.special.ndtr((edges - target[:, None]) / sigma)
    probabilities = mass.diff(dim=-1) / (mass[:, -1:] - mass[:, :1])
    return -(probabilities * logits.log_softmax(dim=-1)).sum(dim=-1)


def hl_gauss_value(logits: Tensor, low: float, high: float) -> Tensor:
    """Mean of the predicted histogram: [T, bins] -> [T], float32."""
    edges = bin_edges(logits.shape[-1], low, high, logits.device)
    return logits.float().softmax(dim=-1) @ ((edges[:-1] + edges[1:]) / 2)


def self_imitation_value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """((R - V)+)^2 / 2 (arXiv 1806.05635, eq. 3)."""
    return (returns.detach() - values).clamp(min=0).square() / 2


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 - Var(R - V) / Var(R) over the tokens whose mask is not 0 (all without one): scalar float64.

    1 at best, without lower bound; 0 where all returns are equal or there are none: nothing is there to explain.
    """
    actual, predicted = returns.double(), values.double()
    if mask is not None:
        actual, predicted = actual[mask != 0], predicted[mask != 0]
    if actual.numel() == 0:
        return actual.new_zeros(())
    variance = actual.var(correction=0)
    residual = (actual - predicted).var(correction=0)
    return torch.where(variance > 0, 1 - residual / variance.where(variance > 0, 1), 0)


@torch.no_grad()
def bias_by_position(
    values: Tensor,
    returns: Tensor,
    cu_seqlens: Tensor,
    quantiles: Sequence[float] = (0, 0.25, 0.5, 0.75, 0.95),
) -> Tensor:
    """Mean over responses of V - R at the token floor(q (l - 1)) of each response of l tokens.

    Returns float64, one entry per quantile; empty responses do not count, and with none at all it is 0.
    Raises ValueError for a quantile outside [0, 1].
    """
    check_bounds(cu_seqlens, values.numel())
    if any(not 0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles must be in [0, 1], got {tuple(quantiles)}")
    cu_seqlens = cu_seqlens.to(values.device, torch.int64)
    lengths = cu_seqlens.diff()
    starts, lengths = cu_seqlens[:-1][lengths > 0], lengths[lengths > 0]
    q = torch.tensor(list(quantiles), dtype=torch.float64, device=values.device)
    token = starts + (q[:, None] * (lengths - 1)).floor().long()
    bias = values[token].double() - returns[token].double()
    return bias.sum(dim=1) / max(1, lengths.numel())

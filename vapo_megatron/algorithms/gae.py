"""Generalised advantage estimation over packed responses (Schulman et al. 2016, arXiv 1506.02438,
eq. 16).

    delta_t = r_t + gamma * V_{t+1} - V_t          A_t = sum_k (gamma * lambda)^k delta_{t+k}

V_t is the value of the state before response token t. After the last token it is 0, or the
bootstrap value given for a response that was cut off.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms.registry import estimator
from vapo_megatron.algorithms.segments import (
    check_bounds,
    last_tokens,
    place_terminal,
    segment_sum,
    to_tokens,
)
from vapo_megatron.algorithms.suffix_scan import suffix_scan_


def length_adaptive_lambda(lengths: Tensor, alpha: float, floor: float = 0.0) -> Tensor:
    """lambda_policy = 1 - 1 / (alpha * l), clamped to [floor, 1] (VAPO, arXiv 2504.05118, section
    4.2).

    Args:
        lengths: [S] response tokens l that carry loss, the end token included.
        alpha: positive; VAPO's is 0.05. Responses of 1 / alpha tokens or fewer are clamped.
        floor: the least lambda, in [0, 1].

    Returns:
        float32 [S].
    """
    return (1 - 1 / (alpha * lengths.double())).clamp(min=floor).float()


@torch.no_grad()
def segmented_gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    lam: float | Tensor,
    gamma: float = 1.0,
    bootstrap_values: Tensor | None = None,
    of: Tensor | None = None,
) -> Tensor:
    """Advantages of S packed responses; linear in tokens, no step over time.

    Args:
        rewards: [T] token rewards.
        values: [T] value of the state before each token.
        cu_seqlens: [S + 1] int32 or int64.
        lam: lambda in [0, 1], a scalar or one per response [S].
        gamma: discount in [0, 1].
        bootstrap_values: [S] value of the state after the last token; None is 0 for every response.
        of: int64, the lengths of all responses, if these are only a part of them, so that a
            response has the same sums to the bit in any part. None: these are all.

    Returns:
        [T], float32 or the wider dtype of rewards and values. Carries no gradient.

    Raises:
        ValueError: shapes that do not fit each other, or lambda or gamma outside [0, 1].
    """
    (advantages,) = _advantages(rewards, values, cu_seqlens, (lam,), gamma, bootstrap_values, of)
    return advantages


@estimator("gae", critic=True, per_token=True, discounts=True)
@torch.no_grad()
def decoupled_gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    lam_policy: float | Tensor,
    lam_critic: float | Tensor,
    gamma: float = 1.0,
    bootstrap_values: Tensor | None = None,
    of: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages under lam_policy and value targets A + V under lam_critic (VC-PPO, arXiv
    2503.01491, section 3.3).

    Arguments and errors as in `segmented_gae`. Returns two [T]. The targets come from advantages
    before whitening.
    """
    lambdas = (lam_policy, lam_critic)
    policy, critic = _advantages(rewards, values, cu_seqlens, lambdas, gamma, bootstrap_values, of)
    return policy, critic.add_(values)


@torch.no_grad()
def monte_carlo_returns(
    rewards: Tensor, cu_seqlens: Tensor, gamma: float, earlier: Tensor | None
) -> Tensor:
    """gamma^n R, with n the number of tokens that follow in the response: the lambda = 1 target of
    a terminal reward.

    rewards float32 [S], cu_seqlens int64 [S + 1] -> float32 [T]. A response's returns do not depend
    on the other responses. earlier, [T]: the part of the rewards that came before the end, at its
    token.
    """
    if earlier is not None:
        placed = place_terminal(rewards, cu_seqlens, earlier.numel(), earlier)
        return segmented_gae(placed, torch.zeros_like(placed), cu_seqlens, 1.0, gamma)
    following = to_tokens(cu_seqlens[1:] - 1, cu_seqlens) - torch.arange(int(cu_seqlens[-1]))
    if rewards.numel():
        longest = int(cu_seqlens.diff().max())
    else:
        longest = 0
    discounts = gamma ** torch.arange(longest, dtype=torch.float64)
    return discounts.float()[following] * to_tokens(rewards, cu_seqlens)


def bootstrap_of_truncated(values: Tensor, truncated: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The value of the last state of each truncated response, 0 for those that ended: [T], bool [S]
    -> [S].

    It stands for the value after the last token, which the critic did not compute.
    """
    responses, last = last_tokens(cu_seqlens)
    bootstrap = values.new_zeros(truncated.numel())
    bootstrap[responses] = values[last] * truncated[responses]
    return bootstrap


def temporal_differences(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t; arguments as in `segmented_gae`.

    Returns [T], float32 or the wider dtype of rewards and values; cu_seqlens as int64 on the device
    of rewards.
    """
    if rewards.dim() != 1 or rewards.shape != values.shape:
        raise ValueError(
            f"rewards and values must be [T], got {list(rewards.shape)} and {list(values.shape)}"
        )
    check_bounds(cu_seqlens, rewards.numel())
    responses = cu_seqlens.numel() - 1
    if bootstrap_values is not None and list(bootstrap_values.shape) != [responses]:
        raise ValueError(
            f"bootstrap_values must be [S] = [{responses}], got {list(bootstrap_values.shape)}"
        )
    cu_seqlens = cu_seqlens.to(rewards.device, torch.int64)
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    deltas = torch.sub(rewards.to(dtype), values)
    ended, last = last_tokens(cu_seqlens)
    terminal = deltas[last]
    if bootstrap_values is not None:
        terminal += gamma * bootstrap_values[ended].to(dtype)
    deltas[:-1].add_(values[1:], alpha=gamma)
    # The token after a last token belongs to another response.
    deltas[last] = terminal
    return deltas, cu_seqlens


def _advantages(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    lambdas: tuple[float | Tensor, ...],
    gamma: float,
    bootstrap_values: Tensor | None,
    of: Tensor | None,
) -> list[Tensor]:
    deltas, bounds = temporal_differences(rewards, values, cu_seqlens, gamma, bootstrap_values)
    decays = [decay(lam, gamma, cu_seqlens.numel() - 1, rewards.device) for lam in lambdas]
    return suffix_scan_(deltas, bounds.diff(), decays, of)


def decay(lam: float | Tensor, gamma: float, responses: int, device: torch.device) -> Tensor:
    """gamma * lambda, float64 [S]."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    per_response = torch.as_tensor(lam, dtype=torch.float64, device=device).expand(responses)
    if not bool(((per_response >= 0) & (per_response <= 1)).all()):
        raise ValueError("lambda must be in [0, 1] for every response")
    return per_response * gamma


def turn_bounds(places: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of turns among T response tokens, and of responses among turns.

    Args:
        places: int64 [T], the place of each response token in its packed sequence; observations are
            in the gaps.
        cu_seqlens: int64 [S + 1], of the responses; none is empty.

    Returns:
        int64 [U + 1], bounds of U turns among tokens; int64 [S + 1], bounds of responses among
        turns.
    """
    begins = torch.ones(len(places), dtype=torch.bool)
    begins[1:] = places.diff() != 1
    begins[cu_seqlens[:-1]] = True
    starts = begins.nonzero().squeeze(1)
    return torch.cat((starts, cu_seqlens[-1:])), torch.searchsorted(starts, cu_seqlens)


@torch.no_grad()
def turn_gae(
    rewards: Tensor,
    values: Tensor,
    turns: Tensor,
    responses: Tensor,
    lam_policy: float | Tensor,
    lam_critic: float | Tensor,
    gamma: float = 1.0,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages under lam_policy and value targets under lam_critic, both [T] and the same within
    a turn.

    turns, responses: from turn_bounds(). The others are as in decoupled_gae; lambdas may be one per
        response.
    """
    per_turn = segment_sum(rewards, turns)
    first = values[turns[:-1]]
    advantages, targets = decoupled_gae(
        per_turn, first, responses, lam_policy, lam_critic, gamma, bootstrap_values=bootstrap_values
    )
    return to_tokens(advantages, turns), to_tokens(targets, turns)

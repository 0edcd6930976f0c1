"""Credit by turns: GAE whose steps are the turns of an episode rather than its tokens.

    V_k is the value of the state before the first token of turn k, r_k the sum of the rewards on its tokens,
    delta_k = r_k + gamma * V_{k+1} - V_k, and A_k goes to every token of the turn.

Observations between turns are no steps; lambda and gamma count turns.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms.gae import decoupled_gae
from vapo_megatron.algorithms.segments import segment_sum, to_tokens


def turn_bounds(places: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where turns begin among T response tokens, and which of them belong to which response.

    Args:
        places: int64 [T], where each response token stands in its packed sequence; observations lie in the gaps.
        cu_seqlens: int64 [S + 1], of the responses; none is empty.

    Returns:
        int64 [U + 1], bounds of U turns among tokens; int64 [S + 1], bounds of responses among turns.
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
    """Advantages under lam_policy and value targets under lam_critic, both [T] and the same within a turn.

    turns, responses: of turn_bounds(). The others are as in decoupled_gae; lambdas may be one for each response.
    """
    per_turn, first = segment_sum(rewards, turns), values[turns[:-1]]
    advantages, targets = decoupled_gae(
        per_turn, first, responses, lam_policy, lam_critic, gamma, bootstrap_values=bootstrap_values
    )
    return to_tokens(advantages, turns), to_tokens(targets, turns)

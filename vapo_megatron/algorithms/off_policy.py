"""Advantages and value targets from responses that another policy has drawn.

rho and c are weights made from pi / mu of each token, pi the policy that is trained and mu the one that drew the token:
`importance.tis` for V-trace and Retrace, `importance.mis` for bands.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms.gae import decay, temporal_differences
from vapo_megatron.algorithms.segments import last_tokens, to_tokens
from vapo_megatron.algorithms.varying_scan import varying_suffix_scan


@torch.no_grad()
def corrected_gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    lam_policy: float | Tensor,
    lam_critic: float | Tensor,
    rho: Tensor,
    c: Tensor,
    gamma: float = 1.0,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decoupled GAE under the policy pi, of tokens drawn by mu; linear in tokens.

        D_t = rho_t delta_t + gamma lambda c_t D_{t+1}
        v_t = V_t + D_t                                  with lam_critic
        A_t = delta_t + gamma lambda D_{t+1}             with lam_policy

    v is the target of V-trace (IMPALA, arXiv 1802.01561, eq. 1) for rho = min(rho_bar, pi / mu) and
    c = min(c_bar, pi / mu), lambda as in its remark 2. A is its r + gamma v_{t+1} - V_t (section 4.2) without the
    weight of the token itself, which belongs to the policy loss. With rho = c = min(1, pi / mu), A is Retrace(lambda)
    (arXiv 1606.02647, eq. 3 and 4) with V for Q: A_t = delta_t + gamma lambda c_{t+1} A_{t+1}. With rho = c = 1 both
    are those of `decoupled_gae`. A weight of 0 ends what earlier tokens see of the response: V stands for the rest.

    Args:
        rho: [T], at least 0 and finite; weight of the token's own temporal difference.
        c: [T], at least 0 and finite; weight of what follows the token.
        The others as in `segmented_gae`.

    Returns:
        Advantages and value targets, two [T], float32 or the wider dtype of rewards and values.

    Raises:
        ValueError: as in `segmented_gae`, and for weights that are not [T].
    """
    if rho.shape != rewards.shape or c.shape != rewards.shape:
        raise ValueError(f"rho and c must be [T] = {list(rewards.shape)}, got {list(rho.shape)} and {list(c.shape)}")
    deltas, bounds, _ = temporal_differences(rewards, values, cu_seqlens, gamma, None, bootstrap_values)
    ends, most = last_tokens(bounds)[1], torch.finfo(deltas.dtype).max
    weighted = deltas * rho

    def corrections(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        """gamma * lambda of each token, 0 on the last of its response; D."""
        discounts = to_tokens(decay(lam, gamma, bounds.numel() - 1, deltas.device).to(deltas.dtype), bounds)
        discounts[ends] = 0
        # In float64: what stands beside a response, and so how sums are cut, is then lost in the rounding to float32.
        found = varying_suffix_scan(weighted.double(), (discounts * c).double())
        return discounts, found.clamp(-most, most).to(deltas.dtype)

    targets = corrections(lam_critic)[1] + values
    discounts, following = corrections(lam_policy)
    advantages = deltas.addcmul(discounts, following.roll(-1))
    return advantages, targets

"""Weights for the difference between the engine's and the trainer's policies; they multiply the
policy loss.

log_ratio is log pi_train - log pi_rollout of each token.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms.gae import decay, temporal_differences
from vapo_megatron.algorithms.policy_loss import bounded_ratio
from vapo_megatron.algorithms.segments import last_tokens, to_tokens


@torch.no_grad()
def tis(log_ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(exp(log_ratio), cap): [T] -> [T]."""
    return bounded_ratio(log_ratio).clamp(max=cap)


@torch.no_grad()
def mis(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Masked importance weights: exp(log_ratio) where it lies in [low, high], else 0: [T] -> [T].

    IcePop's mask (INTELLECT-3, arXiv 2512.16144, eq. 1).
    """
    ratio = bounded_ratio(log_ratio)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0)


CHUNK = 16


def varying_suffix_scan(x: Tensor, decays: Tensor) -> Tensor:
    """Scan x from its last token to its first.

    Args:
        x: [T] floating point, finite.
        decays: [T], at least 0 and finite, dtype of x; 0 on the last token of each response
            separates responses.

    Returns:
        y [T] with y_t = x_t + decays_t * y_{t+1} and y_T = 0. Overflow stays at the largest finite
        number, so that no response spoils another.
    """
    if x.numel() <= CHUNK:
        return _scan_rows(x[None], decays[None])[0][0]
    chunks = -(-x.numel() // CHUNK)
    padding = chunks * CHUNK - x.numel()
    rows = [torch.nn.functional.pad(part, (0, padding)).view(chunks, CHUNK) for part in (x, decays)]
    sums, products = _scan_rows(*rows)
    following = varying_suffix_scan(sums[:, 0].contiguous(), products[:, 0].contiguous())
    carry = torch.nn.functional.pad(following[1:], (0, 1))
    return _finite(sums.addcmul_(products, carry[:, None])).reshape(-1)[: x.numel()]


def _scan_rows(x: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
    """Scan each row of x [N, K], nothing following it; also the products of decays from each token
    to the row's end."""
    # Steps go over rows: K contiguous vectors of N.
    sums, products = (part.t().clone(memory_format=torch.contiguous_format) for part in (x, decays))
    for step in range(sums.shape[0] - 2, -1, -1):
        # Step + 1 holds its own sum and product by now.
        _finite(sums[step].addcmul_(products[step], sums[step + 1]))
        _finite(products[step].mul_(products[step + 1]))
    return sums.t(), products.t()


def _finite(x: Tensor) -> Tensor:
    most = torch.finfo(x.dtype).max
    return x.clamp_(-most, most)


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
    c = min(c_bar, pi / mu), lambda as in its remark 2. A is its r + gamma v_{t+1} - V_t (section
    4.2) without the weight of the token itself, which belongs to the policy loss. With rho = c =
    min(1, pi / mu), A is Retrace(lambda) (arXiv 1606.02647, eq. 3 and 4) with V for Q: A_t =
    delta_t + gamma lambda c_{t+1} A_{t+1}. With rho = c = 1 both equal `decoupled_gae`. A weight
    of 0 hides the rest of the response from earlier tokens: V stands for it.

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
        raise ValueError(
            f"rho and c must be [T] = {list(rewards.shape)}, got {list(rho.shape)} and "
            f"{list(c.shape)}"
        )
    deltas, bounds = temporal_differences(rewards, values, cu_seqlens, gamma, bootstrap_values)
    ends = last_tokens(bounds)[1]
    most = torch.finfo(deltas.dtype).max
    weighted = deltas * rho

    def corrections(lam: float | Tensor) -> tuple[Tensor, Tensor]:
        """gamma * lambda of each token, 0 on the last of its response; D."""
        discounts = to_tokens(
            decay(lam, gamma, bounds.numel() - 1, deltas.device).to(deltas.dtype), bounds
        )
        discounts[ends] = 0
        # In float64: what stands beside a response, and so how sums are cut, is then lost in the
        # rounding to float32.
        scanned = varying_suffix_scan(weighted.double(), (discounts * c).double())
        return discounts, scanned.clamp(-most, most).to(deltas.dtype)

    targets = corrections(lam_critic)[1] + values
    discounts, following = corrections(lam_policy)
    advantages = deltas.addcmul(discounts, following.roll(-1))
    return advantages, targets

"""Calibrated values on the samples of all ranks; the formulas are in algorithms/calibration.py."""

from typing import Any

import torch
from torch import Tensor

from vapo_megatron.algorithms import calibration
from vapo_megatron.algorithms.critic_metrics import Figures, explained, figures_of
from vapo_megatron.algorithms.gae import segmented_gae
from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.monitoring import names
from vapo_megatron.training.shards import ShardedBatch


class ReturnHistory:
    """What past steps of a run said of returns; the same on every rank, and part of its checkpoints."""

    def __init__(self, state: list[Any] | None = None) -> None:
        """state: of a checkpoint."""
        self.past = calibration.Moments.from_state(state) if state else None

    def state(self) -> list[Any]:
        """For a checkpoint; empty before the first step."""
        return self.past.state() if self.past is not None else []

    def add(self, step: calibration.Moments) -> None:
        """Remember a step, and forget a part of those before it."""
        self.past = step if self.past is None else self.past.followed_by(step)


def calibrated_advantages(
    batch: ShardedBatch, token_rewards: Tensor, lam: Tensor, known: Tensor, history: ReturnHistory, trusted: bool
) -> tuple[Tensor, dict[str, float]]:
    """Collective: A = g GAE(V~) + (1 - g) (R - V~), and metrics; the batch becomes part of the history.

    Args:
        batch: with values and shaped rewards.
        token_rewards: float32 [own T].
        lam: float32 [own S], lambda of each response.
        known: bool [S], the responses that have a return: the others say nothing of later ones.
        history: past steps. Without any, V~ is the mean of the others and g is 0.
        trusted: False: g is 1 throughout.

    Returns:
        float32 [own T], metrics by name.
    """
    own, table, bounds = batch.own, batch.table, batch.own.response_cu_seqlens
    assert own.values is not None and table.shaped_rewards is not None, "values and rewards come before advantages"
    returns = table.shaped_rewards
    siblings, others = torch.zeros(2, batch.samples, dtype=torch.float64)
    siblings[known], others[known] = calibration.means_of_siblings(returns[known], table.group_ids[known])
    metrics: dict[str, float] = {}
    if history.past is None:
        values, trust = to_tokens(others[batch.at_home].float(), bounds), 0.0
    else:
        fit = calibration.coefficients(history.past)
        values, trust = calibration.calibrated_values(own.values, siblings[batch.at_home], bounds, fit), fit.trust
        metrics = {names.CRITIC_SLOPE: fit.slope, names.GROUP_WEIGHT: fit.group_weight}
    trust = trust if trusted else 1.0
    of = table.response_lengths
    bootstrapped = segmented_gae(token_rewards, values, bounds, lam, of=of)
    unbiased = segmented_gae(token_rewards, values, bounds, 1.0, of=of)
    if known.any():
        own_returns = to_tokens(returns[batch.at_home], bounds)
        figures = Figures.read(batch.everywhere(figures_of(values, own_returns, bounds))).only(known)
        metrics |= {names.EXPLAINED_CALIBRATED: float(explained(figures)), names.TRUST: trust}
        sums = batch.everywhere(calibration.response_sums(own.values, bounds))[known]
        history.add(calibration.moments(sums, returns[known], siblings[known]))
    return trust * bootstrapped + (1 - trust) * unbiased, metrics

"""Advantages over values that the returns of past steps have set right, by the config.

The formulas are in algorithms/calibration.py, tether.py and regression.py; the statistics of past
steps are the run's ReturnHistory.
"""

import torch
from torch import Tensor

from vapo_megatron.algorithms import calibration, tether
from vapo_megatron.algorithms.baselines import leave_one_out, siblings_mean
from vapo_megatron.algorithms.critic_metrics import Figures, explained, figures_of
from vapo_megatron.algorithms.gae import turn_gae
from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig
from vapo_megatron.monitoring import names
from vapo_megatron.training.credit import policy_lambda, turns_of
from vapo_megatron.training.regression import regressed_values
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.token_rewards import paid, returns_known


def calibrated_advantages(
    batch: ShardedBatch,
    token_rewards: Tensor,
    lam: Tensor,
    known: Tensor,
    history: ReturnHistory,
    config: AdvantageConfig,
) -> tuple[Tensor, dict[str, float]]:
    """Collective: A = g GAE(V~) + (1 - g) (R - V~), and metrics; then adds the batch to the
    history.

    The history is of whole returns, of which a turn's reward, once paid, is a known part: V~ is
    calibrated with it and used without it.

    Args:
        batch: with values and shaped rewards.
        token_rewards: float32 [local T].
        lam: float32 [local S], lambda of each response.
        known: bool [S], the responses that have a return; the others do not enter the history.
        history: past steps. Without any, V~ is the mean of the others and g is 0.
        config: what takes part. With tracker m is the history of the prompt; with
            calibration=values and tether g is 1.

    Returns:
        float32 [local T], metrics by name.
    """
    local = batch.local
    table = batch.table
    bounds = local.response_cu_seqlens
    values = local.values
    returns = table.shaped_rewards
    assert values is not None and returns is not None, "values and rewards come before advantages"
    siblings = torch.zeros(batch.samples, dtype=torch.float64)
    others = torch.zeros(batch.samples, dtype=torch.float64)
    siblings[known] = siblings_mean(returns[known], table.group_ids[known])
    others[known] = leave_one_out(returns[known], table.group_ids[known])
    metrics: dict[str, float] = {}
    if config.tracker:
        assert table.prompt_keys is not None, "a batch of samples knows their prompts"
        siblings, metrics[names.TRACKED] = history.track(table.prompt_keys, returns, known)

    mine = batch.local_slice
    before = paid(local)
    whole_values = values + before
    whole_baseline, trust, row = baseline_of_past(
        whole_values, siblings[mine], others[mine], bounds, history, config
    )
    baseline = (whole_baseline - before).float()
    metrics |= row
    if known.any():
        rest = to_tokens(returns[mine], bounds) - before
        local_figures = figures_of(baseline, rest, bounds)
        figures = Figures.read(batch.gather_samples(local_figures)).only(known)
        metrics[names.EXPLAINED_CALIBRATED] = float(explained(figures))
        sums = batch.gather_samples(calibration.response_sums(whole_values[None], bounds))[known]
        if config.calibration == "tether":
            history.mix(tether.best_mixture(sums, returns[known], others[known]))
        else:
            history.add(calibration.moments(sums, returns[known], siblings[known][None]))
    else:
        del metrics[names.TRUST]
    lengths = table.response_lengths
    estimates = calibration.trusted_advantages(token_rewards, baseline, bounds, lam, trust, lengths)
    return estimates, metrics


def baseline_of_past(
    values: Tensor,
    siblings: Tensor,
    others: Tensor,
    bounds: Tensor,
    history: ReturnHistory,
    config: AdvantageConfig,
) -> tuple[Tensor, float, dict[str, float]]:
    """V~ of each token, float32 [T], the trust g in its differences, and metrics.

    values: [T], of whole returns; siblings, others: [S], the means that a response is compared
    with; bounds: int64 [S + 1].
    """
    if config.calibration == "tether":
        rho = history.mixture
        row = {names.CRITIC_SLOPE: rho, names.GROUP_WEIGHT: 1 - rho, names.TRUST: rho}
        return tether.baseline(values, others, bounds, rho), 1.0, row
    fit = None
    row = {}
    if history.past is not None:
        fit = calibration.coefficients(history.past)
        row = {names.CRITIC_SLOPE: fit.slope, names.GROUP_WEIGHT: fit.group_weight}
    baseline, trust = calibration.baseline_and_trust(values, siblings, others, bounds, fit)
    if config.calibration != "trust":
        trust = 1.0
    return baseline, trust, row | {names.TRUST: trust}


def regression_advantages(
    batch: ShardedBatch, config: AlgorithmConfig, rewards: Tensor, history: ReturnHistory
) -> dict[str, float]:
    """Collective: fill advantages by values that are regressed on the returns of past steps, and
    values where there is no critic; then adds the batch to the history. Returns metrics.

    A = g GAE(V~) + (1 - g) (R - V~); g is 1 except with calibration=trust. rewards: float32 [local
    T].
    """
    local = batch.local
    table = batch.table
    settings = config.advantage
    assert history.regression is not None, "the config regresses values"
    known = returns_known(table.truncated, config.shaping)
    tracked, metrics = history.regressor(batch, known)
    if settings.credit == "turn":
        turns = turns_of(local)
    else:
        turns = None
    values, trust, row = regressed_values(batch, known, history.regression, tracked, turns)
    if settings.calibration != "trust":
        trust = 1.0
    if turns is None:
        lam = policy_lambda(local.response_lengths, settings)
        local.advantages = calibration.trusted_advantages(
            rewards, values, local.response_cu_seqlens, lam, trust, table.response_lengths
        )
    else:
        lam = policy_lambda(turns[1].diff(), settings)
        local.advantages, _ = turn_gae(rewards, values, *turns, lam_policy=lam, lam_critic=1.0)
    if local.values is None:
        local.values = values
    return metrics | row | {names.TRUST: trust}

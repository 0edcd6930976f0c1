"""Fills a scored batch with advantages and value targets, by the config; the formulas are in
algorithms/.

The functions stand in the order in which a batch passes through them.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from vapo_megatron.algorithms import advantages, importance
from vapo_megatron.algorithms.critic_faults import beginnings, value_faults
from vapo_megatron.algorithms.critic_metrics import Figures, figures_of, sign_agreement, signs_of
from vapo_megatron.algorithms.gae import (
    bootstrap_of_truncated,
    decoupled_gae,
    turn_gae,
)
from vapo_megatron.algorithms.importance import corrected_gae
from vapo_megatron.algorithms.registry import ESTIMATORS, call_with
from vapo_megatron.algorithms.segments import segment_sum, to_tokens
from vapo_megatron.algorithms.selection import loss_mask
from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig
from vapo_megatron.config.policy import KlConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.credit import (
    clamped,
    lambda_of,
    policy_lambda,
    returns_of,
    turns_of,
)
from vapo_megatron.training.metrics import advantage_metrics, turn_metrics, value_metrics
from vapo_megatron.training.past_returns import calibrated_advantages, regression_advantages
from vapo_megatron.training.regression import first_states, response_hashes
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.token_rewards import (
    kl_penalty,
    new_tokens,
    returns_known,
    shaped_rewards,
    token_rewards,
)
from vapo_megatron.training.user_functions import user_advantages, user_metrics, user_selection


def estimate_advantages(
    batch: ShardedBatch,
    config: AlgorithmConfig,
    recorder: Recorder,
    new_critic: bool = False,
    history: ReturnHistory | None = None,
) -> None:
    """Collective: fill shaped_rewards, selected, advantages and, with a critic, returns of a scored
    batch.

    new_critic: nothing has trained the critic yet. history: of the run, for calibration and
        tracker.
    """
    traits = config.advantage.traits
    function = config.advantage.function
    best = None
    with recorder.timer("advantages"):
        batch.fill(shaped_rewards=shaped_rewards(batch.table, config.shaping))
        if traits.critic:
            estimate_from_values(batch, config, recorder, history)
        elif traits.per_token:
            estimate_by_token(batch, config)
        elif function is None:
            best = estimate_by_response(batch, config, recorder, history)
        if function is not None:
            estimate_by_users_function(batch, function, config.uses_critic)
        select_responses(batch, config, best, recorder)
        whiten(batch, config.advantage)
        if config.kl.placement == "advantage":
            distil(batch.local, config.kl)
    recorder.add(advantage_metrics(batch))
    if config.metrics_function is not None:
        recorder.add(batch.run_on_rank0(partial(user_metrics, config.metrics_function)))
    regressed = traits.critic and batch.local.returns is None
    recorder.add(critic_row(batch, config, new_critic, regressed))


def estimate_from_values(
    batch: ShardedBatch,
    config: AlgorithmConfig,
    recorder: Recorder,
    history: ReturnHistory | None,
) -> None:
    """Collective: fill advantages and returns by GAE, over calibrated values where the config says
    so."""
    local = batch.local
    table = batch.table
    rewards = token_rewards(local, config)
    if local.values is not None:
        gae(local, rewards, config, table.response_lengths)
    if history is not None and history.regression is not None:
        recorder.add(regression_advantages(batch, config, rewards, history))
    elif config.advantage.calibration != "none":
        assert history is not None, "the run's history of returns calibrates values"
        local.advantages, row = calibrated_advantages(
            batch,
            rewards,
            policy_lambda(local.response_lengths, config.advantage),
            returns_known(table.truncated, config.shaping),
            history,
            config.advantage,
        )
        recorder.add(row)
    steps = table.response_lengths
    if config.advantage.credit == "turn":
        steps = batch.gather_samples(turns_of(local)[1].diff())
    lam = policy_lambda(steps, config.advantage)
    recorder.add(
        {
            "advantage/lambda_mean": float(lam.mean()),
            "advantage/lambda_clamped": clamped(lam, config.advantage),
        }
    )


def gae(batch: ExperienceBatch, rewards: Tensor, config: AlgorithmConfig, of: Tensor) -> None:
    """Fill advantages and returns by decoupled, length-adaptive GAE (VAPO, sections 4.1 and 4.2).

    With off_policy=vtrace both are corrected as if the trained policy had drawn the responses. A
    truncated response continues with V of its last state where shaping.truncated says so; T-PPO's
    window (arXiv 2506.15050) teaches no value from it (teaches_critic).

    Args:
        batch: scored responses, these or more than these in the step.
        rewards: float32 [T], token_rewards().
        of: int64, the lengths of all responses of the step. With credit=turn turns take the place
            of tokens, and the length-adaptive lambda counts them.
    """
    values = batch.values
    bounds = batch.response_cu_seqlens
    lengths = batch.response_lengths
    assert values is not None, "no values: the batch is not scored"
    settings = config.advantage
    formula: Callable[..., tuple[Tensor, Tensor]]
    if settings.credit == "turn":
        turns, responses = turns_of(batch)
        lengths = responses.diff()
        formula = partial(turn_gae, turns=turns, responses=responses)
    elif settings.off_policy == "vtrace":
        assert batch.old_logprobs is not None, "no log-probs: the batch is not scored"
        weights = importance.tis(batch.old_logprobs - batch.rollout_logprobs, 1.0)
        formula = partial(corrected_gae, cu_seqlens=bounds, rho=weights, c=weights)
    else:
        formula = partial(decoupled_gae, cu_seqlens=bounds, of=of)
    bootstrap_values = None
    if config.shaping.bootstraps:
        bootstrap_values = bootstrap_of_truncated(values, batch.truncated, bounds)
    batch.advantages, batch.returns = formula(
        rewards,
        values,
        lam_policy=policy_lambda(lengths, settings),
        lam_critic=lambda_of(settings.lambda_critic, lengths, settings),
        gamma=settings.gamma,
        bootstrap_values=bootstrap_values,
    )


def estimate_by_token(batch: ShardedBatch, config: AlgorithmConfig) -> None:
    """Fill advantages by an estimator that has no critic and gives one for each token."""
    local = batch.local
    table = batch.table
    assert table.shaped_rewards is not None, "rewards come before advantages"
    known = {
        "rewards": table.shaped_rewards[batch.local_slice],
        "penalty": kl_penalty(local, config.kl),
        "cu_seqlens": local.response_cu_seqlens,
        "gamma": config.advantage.gamma,
        "of": table.response_lengths,
        "earlier": local.turn_rewards,
        "group_ids": table.group_ids[batch.local_slice],
        "hashes": response_hashes(local),
    }
    local.advantages = call_with(ESTIMATORS.formula(config.advantage.estimator), known)


def estimate_by_response(
    batch: ShardedBatch,
    config: AlgorithmConfig,
    recorder: Recorder,
    history: ReturnHistory | None,
) -> Tensor | None:
    """Collective: fill advantages by an estimator that gives one for all tokens of a response.

    Returns the responses that it selects, bool [S]; None for an estimator that selects none.
    """
    estimate = response_advantages(batch, config, recorder, history)
    bounds = batch.local.response_cu_seqlens
    batch.local.advantages = to_tokens(estimate[batch.local_slice], bounds)
    if config.advantage.traits.selects:
        return (estimate > 0) & batch.table.correct
    return None


def response_advantages(
    batch: ShardedBatch,
    config: AlgorithmConfig,
    recorder: Recorder,
    history: ReturnHistory | None,
) -> Tensor:
    """Collective: advantages from rewards alone, float32 [S].

    A KL penalty in the reward is summed over the response.
    """
    local = batch.local
    table = batch.table
    rewards = batch.table.shaped_rewards
    assert rewards is not None, "rewards come before advantages"
    if config.kl.placement == "reward":
        penalty = segment_sum(kl_penalty(local, config.kl), local.response_cu_seqlens)
        rewards = rewards - batch.gather_samples(penalty)
    if config.advantage.tracker:
        assert history is not None, "the run's history tracks the returns of its prompts"
        assert table.prompt_keys is not None, "a batch of samples knows their prompts"
        known = returns_known(table.truncated, config.shaping)
        baselines, share = history.track(table.prompt_keys, rewards, known)
        recorder.add({names.TRACKED: share})
        return (rewards - baselines).float()
    outcomes = {
        "rewards": rewards,
        "group_ids": table.group_ids,
        "lengths": table.response_lengths,
        "greedy_rewards": table.greedy_rewards,
    }
    estimate: Tensor = call_with(ESTIMATORS.formula(config.advantage.estimator), outcomes)
    return estimate


def estimate_by_users_function(batch: ShardedBatch, function: str, has_critic: bool) -> None:
    """Collective: fill advantages, and returns where it gives them, by a function of the user's."""
    estimates = batch.scatter_token_columns(partial(user_advantages, function, has_critic), 2)
    batch.local.advantages, targets = estimates.t().contiguous()
    if not targets.isnan().any():
        batch.local.returns = targets


def select_responses(
    batch: ShardedBatch, config: AlgorithmConfig, best: Tensor | None, recorder: Recorder
) -> None:
    """Collective: fill selected, the responses that carry loss. best: bool [S], those that the
    estimator selects."""
    filtered = None
    if config.filter_function is not None:
        filtered = batch.run_on_rank0(partial(user_selection, config.filter_function))
        recorder.add({"filter/kept": float(filtered.float().mean())})
    masks_truncated = config.shaping.truncated == "mask"
    batch.fill(selected=loss_mask(batch.table.truncated, masks_truncated, best, filtered))


def whiten(batch: ShardedBatch, config: AdvantageConfig) -> None:
    """Collective: whiten advantages, if the config says so, over the tokens of all samples that
    carry loss; the others get 0. Value targets are never whitened."""
    local = batch.local
    if config.whiten == "none":
        return
    assert local.advantages is not None and local.selected is not None, "estimates come before"
    bounds = local.response_cu_seqlens
    counted = to_tokens(local.selected, bounds)
    new = new_tokens(local)
    if new is not None:
        counted = counted & new
    sums = batch.gather_samples(advantages.whitening_sums(local.advantages, counted, bounds))
    shift_mean = config.whiten == "full"
    local.advantages = advantages.whiten(
        local.advantages, counted, shift_mean=shift_mean, sums=sums
    )


def distil(batch: ExperienceBatch, config: KlConfig) -> None:
    """Subtract the distance to the teacher from advantages; it is never whitened."""
    estimates = batch.advantages
    old = batch.old_logprobs
    reference = batch.ref_logprobs
    assert estimates is not None, "the estimator has filled them in"
    assert old is not None and reference is not None, "the batch is not scored"
    batch.advantages = advantages.distilled(estimates, old, reference, config.coef)


def critic_row(
    batch: ShardedBatch,
    config: AlgorithmConfig,
    new_critic: bool = False,
    regressed: bool = False,
) -> dict[str, float]:
    """Collective: metrics of advantages, and of the critic's values before it trains on this batch.

    new_critic: it has never been updated. regressed: the values are a regression's, which has no
        weights to be at
    fault.
    """
    local = batch.local
    table = batch.table
    bounds = local.response_cu_seqlens
    assert local.advantages is not None, "no advantages: estimate them first"
    known = returns_known(table.truncated, config.shaping)
    if not known.any():
        return {}
    signs = batch.gather_samples(signs_of(local.advantages, bounds))[known]
    agreement = sign_agreement(signs, table.response_lengths[known], table.rewards[known])
    row = {names.SIGN_AGREEMENT: float(agreement)}
    if local.values is None:
        return row

    rewards = token_rewards(local, config)
    returns = returns_of(local, rewards, config.advantage, table.response_lengths)
    figures = Figures.read(batch.gather_samples(figures_of(local.values, returns, bounds)))
    if regressed:
        faults = []
    else:
        begins = beginnings(table.group_ids, batch.gather_samples(first_states(local)))
        faults = value_faults(figures, begins, known)
    row |= value_metrics(batch, local.values, returns, known)
    if config.advantage.credit == "turn":
        row |= turn_metrics(batch, rewards, *turns_of(local), config.advantage.gamma, known)
    for fault in faults:
        # A new head is zero: constant, and not broken.
        if not (new_critic and fault == "constant"):
            row[f"{names.CRITIC_FAULT}{fault}"] = 1.0
    return row

"""What an iteration of one optimizer step reports of itself, written out from its responses in
float64."""

import math
import statistics
from collections.abc import Sequence

import torch
from switch_formulas import ADAM, Iteration, cut, importance, lambda_of, others_of, surrogate
from torch import Tensor

from vapo_megatron.monitoring import names


def k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio


def reported(found: Iteration, position: float | None) -> dict[str, float]:
    """Every metric of the row, times and memory apart. position: what the table by position
    explains, which tests/algorithms has; None without a critic."""
    row = of_scores(found) | of_advantages(found) | of_policy_update(found)
    if found.critic is not None:
        assert position is not None
        row |= of_values(found, position) | of_critic_update(found)
    return {name: float(value) for name, value in row.items()}


def of_scores(found: Iteration) -> dict[str, Tensor]:
    old = torch.cat(found.old)
    rollout = torch.cat([r.rollout for r in found.responses])
    with torch.no_grad():
        entropies = torch.cat([found.policy.both(r)[1] for r in found.responses])
    divergence = k3(old - rollout)
    row = {
        names.TRAIN_INFER_KL: divergence.mean(),
        names.TRAIN_INFER_KL_MAX: divergence.max(),
        "actor/train_infer_logprob_diff_max": (old - rollout).abs().max(),
        names.ENTROPY: entropies.mean(),
    }
    if found.config.kl.placement != "none":
        distance = k3(torch.cat(found.ref) - old)
        row |= {names.REFERENCE_KL: distance.mean(), names.REFERENCE_KL_MAX: distance.max()}
    if found.config.importance_sampling.kind == "tis":
        weights = torch.cat(
            [
                importance(found.config, o, r.rollout)
                for o, r in zip(found.old, found.responses, strict=True)
            ]
        )
        ratio = (old - rollout).exp()
        row |= {
            "importance/weight_mean": weights.mean(),
            "importance/weight_min": weights.min(),
            "importance/ratio_max": ratio.max(),
            "importance/cut_share": (ratio > found.config.importance_sampling.cap).double().mean(),
        }
    return row


def known(found: Iteration) -> list[int]:
    """The responses with a return: a truncated one has none where a value stands for its end, or it
    is masked."""
    return [
        s
        for s, r in enumerate(found.responses)
        if not r.truncated or found.config.shaping.truncated == "terminal"
    ]


def of_advantages(found: Iteration) -> dict[str, float]:
    responses = found.responses
    estimates = found.estimates
    advantage = found.config.advantage
    every = torch.cat(estimates.advantages).tolist()
    signs = [
        math.copysign(float(a != 0), a)
        for s in known(found)
        for a in estimates.advantages[s].tolist()
    ]
    outcomes = [responses[s].reward for s in known(found) for _ in range(responses[s].length)]
    row = {
        "advantage/mean": statistics.fmean(every),
        "advantage/std": statistics.pstdev(every),
        "reward/shaped_mean": statistics.fmean(estimates.rewards),
        names.SIGN_AGREEMENT: statistics.correlation(signs, outcomes),
    }
    if found.critic is not None:
        lambdas = [lambda_of(advantage.lambda_policy, r.length, found.config) for r in responses]
        row["advantage/lambda_mean"] = statistics.fmean(lambdas)
        clamped = [x <= advantage.length_adaptive_floor for x in lambdas]
        row["advantage/lambda_clamped"] = (
            statistics.fmean(clamped) if advantage.lambda_policy == "length_adaptive" else 0
        )
    return row


def explained(errors: Sequence[float], returns: Sequence[float]) -> float:
    return 1 - statistics.pvariance(errors) / statistics.pvariance(returns)


def of_values(found: Iteration, position: float) -> dict[str, float]:
    """Of the critic before its update, on the responses with a return. No KL is in the reward
    here."""
    assert found.values is not None
    gamma = found.config.advantage.gamma
    rewards = found.estimates.rewards
    members = known(found)
    values = {s: found.values[s].tolist() for s in members}
    returns = {
        s: [rewards[s] * gamma ** (len(values[s]) - 1 - t) for t in range(len(values[s]))]
        for s in members
    }
    errors = {s: [v - r for v, r in zip(values[s], returns[s], strict=True)] for s in members}
    siblings = {}
    for s in members:
        others = [i for i in others_of(found.responses, s) if i in members and i != s]
        others = others or [i for i in members if i != s]
        siblings[s] = statistics.fmean(returns[i][0] for i in others)

    def flat(numbers: dict[int, list[float]]) -> list[float]:
        return [x for s in members for x in numbers[s]]

    critic = explained(flat(errors), flat(returns))
    leave_one_out = explained([r - siblings[s] for s in members for r in returns[s]], flat(returns))
    slope, intercept = statistics.linear_regression(flat(values), flat(returns))
    everything = torch.cat(found.values).tolist()
    row = {
        names.EXPLAINED_VARIANCE: critic,
        names.BASELINE_LOO: leave_one_out,
        names.BASELINE_POSITION: position,
        names.CRITIC_GAIN: critic - max(0.0, leave_one_out, position),
        names.CALIBRATION_SLOPE: slope,
        "critic/calibration_intercept": intercept,
        "critic/value_mean": statistics.fmean(everything),
        "critic/value_std": statistics.pstdev(everything),
    }
    for kind, good in (("correct", True), ("incorrect", False)):
        of_kind = [errors[s] for s in members if found.responses[s].correct == good]
        row[f"{names.VALUE_BIAS}{kind}"] = statistics.fmean(x for part in of_kind for x in part)
    for percent in names.BIAS_POSITIONS:
        at = {s: errors[s][percent * (len(errors[s]) - 1) // 100] for s in members}
        row[f"{names.VALUE_BIAS}{percent}"] = statistics.fmean(at.values())
    return row


def norm_of(loss: Tensor, parameters: Sequence[torch.nn.Parameter]) -> float:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return math.sqrt(sum(float(g.square().sum()) for g in found if g is not None))


def of_update(name: str, norm: float) -> dict[str, float]:
    return {
        f"{name}/grad_norm": norm,
        f"{name}/grad_norm_max": norm,
        f"{name}/lr": ADAM["lr"],
        f"{name}/updates": 1,
    }


def of_critic_update(found: Iteration) -> dict[str, float]:
    critic = found.critic
    estimates = found.estimates
    values = found.values
    assert critic is not None and values is not None
    counted = [s for s, chosen in enumerate(estimates.selected) if chosen]
    losses = [
        critic.token_losses(found.responses[s], estimates.targets[s], values[s]) for s in counted
    ]
    loss = torch.cat(losses).mean()
    norm = norm_of(loss, [p for _, p in critic.named_parameters()])
    return {names.VALUE_LOSS: float(loss.detach()), **of_update("critic", norm)}


def of_policy_update(found: Iteration) -> dict[str, float]:
    """The policy is the one of the rollout's old log-probs; aggregation is token_mean."""
    config = found.config
    responses = found.responses
    estimates = found.estimates
    counted = [s for s, chosen in enumerate(estimates.selected) if chosen]
    of = [(responses[s], found.old[s], estimates.advantages[s]) for s in counted]

    def mean(parts: Sequence[Tensor]) -> float:
        return float(torch.cat(list(parts)).mean())

    clipped = [cut(config, old, old, r.rollout, a)[:2] for r, old, a in of]
    with torch.no_grad():
        entropies = [found.policy.both(r)[1] for r, _, _ in of]
    imitated = [old for r, old, _ in of if r.correct and not r.truncated]
    surrogates = [
        importance(config, o, r.rollout) * surrogate(config, o, o, r.rollout, a) for r, o, a in of
    ]
    row = {
        "actor/policy_loss": mean(surrogates),
        "actor/nll_loss": -mean(imitated),
        "actor/update_entropy": mean(entropies),
        names.CLIP_LOW: mean([low.double() for low, _ in clipped if low is not None]),
        names.CLIP_HIGH: mean([high.double() for _, high in clipped if high is not None]),
        "actor/ratio_mean": 1,
        "actor/ratio_max": 1,
        "actor/approx_kl": 0,
    }
    if config.policy_loss.dual_clip is not None:
        row["actor/clip_fraction_dual"] = 0
    if config.kl.placement == "loss":
        row["actor/kl_loss"] = mean([k3(found.ref[s] - found.old[s]) for s in counted])
    parameters = list(found.policy.model.parameters())
    return row | of_update("actor", norm_of(found.policy_loss(range(len(responses))), parameters))

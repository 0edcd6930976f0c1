"""Where a config leaves the proportions that its algorithm was published with (docs/algorithms.md has the reasons)."""

from collections.abc import Iterator

from vapo_megatron.config.train import TrainConfig

# At which the head of a probe learns within a few rollouts.
_PROBE_LR = 1e-3


def proportions_left(config: TrainConfig, response_tokens: float | None = None) -> list[str]:
    """One line for each proportion that is left, with the key and what to do; none of them stops a run.

    response_tokens: the mean length that is planned for; None: half of sampling.max_new_tokens.
    """
    length = response_tokens or config.sampling.max_new_tokens / 2
    algorithm = config.algorithm
    proportions = list(_lambdas(config, length)) if algorithm.uses_critic else []
    actor, critic = config.actor.optimizer.lr, config.critic.optimizer.lr
    if algorithm.uses_critic and critic < actor:
        proportions.append(
            f"critic.optimizer.lr={critic:g} is below actor.optimizer.lr={actor:g}: VAPO's critic learns twice as fast "
            f"as its actor ({2 * actor:g}); a slower one lags behind the policy that it judges"
        )
    if config.critic.kind == "probe" and critic < _PROBE_LR / 10:
        proportions.append(
            f"critic.optimizer.lr={critic:g} with critic.kind=probe: it is the learning rate of a model, a new head "
            f"wants about {_PROBE_LR:g}"
        )
    updates = config.updates_per_rollout("actor")
    if algorithm.policy_loss.kind == "reinforce" and algorithm.advantage.estimator != "raft" and updates > 1:
        proportions.append(
            f"algorithm.update: {updates} updates of a rollout with policy_loss.kind=reinforce, which has no ratio "
            "that accounts for all but the first: set minibatches=1 and epochs=1"
        )
    nll, reward = algorithm.policy_loss.positive_nll, config.reward
    spread = reward.correct - reward.incorrect
    if algorithm.uses_critic and nll.coef > 0 and reward.verifier == "math" and spread != 2:
        proportions.append(
            f"reward.incorrect={reward.incorrect:g} and reward.correct={reward.correct:g}: advantages scale with "
            f"their distance, policy_loss.positive_nll.coef={nll.coef:g} weighs {2 / spread:.2g} times what it does at "
            "-1 and 1: set those, or scale it"
            if spread
            else "reward.incorrect equals reward.correct: there is nothing to learn"
        )
    return proportions


def _lambdas(config: TrainConfig, length: float) -> Iterator[str]:
    settings, longest = config.algorithm.advantage, config.sampling.max_new_tokens
    adaptive = "length_adaptive" in (settings.lambda_policy, settings.lambda_critic)
    # SAO's and BPCO's alphas are their own.
    if adaptive and not config.algorithm.policy_loss.of_rollout:
        alpha = settings.length_adaptive_alpha
        if length <= 1 / alpha:
            yield (
                f"algorithm.advantage.length_adaptive_alpha={alpha:g}: lambda is clamped to "
                f"{settings.length_adaptive_floor:g} for responses of {1 / alpha:g} tokens or fewer, and most are "
                f"planned to be about {length:g} (at most {longest}): a later token tells nothing of an earlier one"
            )
        elif alpha > 0.5:
            yield (
                f"algorithm.advantage.length_adaptive_alpha={alpha:g}: the horizon, {alpha:g} of the response, is "
                "above half of it, so that the last reward reaches the first token and little is asked of the critic: "
                "VAPO's is 0.05"
            )
    for key in ("lambda_policy", "lambda_critic"):
        lam = getattr(settings, key)
        if not isinstance(lam, float) or lam in (0.0, 1.0):
            continue
        horizon = 1 / (1 - lam)
        if horizon > length / 2:
            yield (
                f"algorithm.advantage.{key}={lam:g}: its horizon of {horizon:.3g} tokens is above half of a response "
                f"of {length:g}; over the papers' 10,000 tokens 0.95 forgets within 0.2 % of them: set "
                f"{max(0.0, 1 - 1 / max(1.0, 0.002 * length)):.3g} for the same share, or take length_adaptive"
            )

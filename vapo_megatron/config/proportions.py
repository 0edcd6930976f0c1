"""Finds where a config departs from the proportions of its algorithm's paper (docs/algorithms.md gives the reasons)."""

from vapo_megatron.config.train import TrainConfig

# Learning rate at which the head of a probe learns within a few rollouts.
_PROBE_LR = 1e-3


def proportions_left(config: TrainConfig, response_tokens: float | None = None) -> list[str]:
    """One line for each departure, with its key and a remedy; none of them stops a run.

    response_tokens: the mean length that is planned for; None: half of sampling.max_new_tokens.
    """
    length = response_tokens or config.sampling.max_new_tokens / 2
    algorithm = config.algorithm
    settings, proportions = algorithm.advantage, []
    adaptive = "length_adaptive" in (settings.lambda_policy, settings.lambda_critic)
    alpha, is_alpha_vapos = settings.length_adaptive_alpha, not algorithm.policy_loss.of_rollout
    if algorithm.uses_critic and adaptive and is_alpha_vapos and length <= 1 / alpha:
        proportions.append(
            f"algorithm.advantage.length_adaptive_alpha={alpha:g}: lambda is clamped to "
            f"{settings.length_adaptive_floor:g} for responses of {1 / alpha:g} tokens or fewer, and most are planned "
            f"to be about {length:g} (at most {config.sampling.max_new_tokens}): a later token tells nothing of an "
            "earlier one"
        )
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

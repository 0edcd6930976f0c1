"""Finds where a config departs from the proportions of its algorithm's paper (docs/algorithms.md
gives the reasons)."""

from vapo_megatron.config.train import TrainConfig

# Learning rate at which the head of a probe learns within a few rollouts.
_PROBE_LR = 1e-3


def proportions_left(config: TrainConfig, response_tokens: float | None = None) -> list[str]:
    """One line for each departure, with its key and a remedy; none of them stops a run.

    response_tokens: the mean length that is planned for; None: half of sampling.max_new_tokens.
    """
    length = response_tokens or config.sampling.max_new_tokens / 2
    algorithm = config.algorithm
    settings = algorithm.advantage
    proportions = []
    adaptive = "length_adaptive" in (settings.lambda_policy, settings.lambda_critic)
    alpha = settings.length_adaptive_alpha
    is_alpha_vapos = not algorithm.policy_loss.traits.rollout_ratio
    if algorithm.uses_critic and adaptive and is_alpha_vapos and length <= 1 / alpha:
        proportions.append(
            f"algorithm.advantage.length_adaptive_alpha={alpha:g}: lambda is clamped to "
            f"{settings.length_adaptive_floor:g} for responses of {1 / alpha:g} tokens or fewer, "
            f"and most are planned to be about {length:g} (at most "
            f"{config.sampling.max_new_tokens}): a later token tells nothing of an earlier one"
        )
    actor = config.actor.optimizer.lr
    critic = config.critic.optimizer.lr
    if algorithm.uses_critic and critic < actor:
        proportions.append(
            f"critic.optimizer.lr={critic:g} is below actor.optimizer.lr={actor:g}: VAPO's critic "
            f"learns twice as fast as its actor ({2 * actor:g}); a slower one lags behind the "
            "policy that it judges"
        )
    if config.critic.kind == "probe" and critic < _PROBE_LR / 10:
        proportions.append(
            f"critic.optimizer.lr={critic:g} with critic.kind=probe: it is the learning rate of a "
            f"model, a new head wants about {_PROBE_LR:g}"
        )
    nll = algorithm.policy_loss.positive_nll
    reward = config.reward
    spread = reward.correct - reward.incorrect
    if algorithm.uses_critic and nll.coef > 0 and reward.verifier == "math" and spread != 2:
        if spread:
            proportions.append(
                f"reward.incorrect={reward.incorrect:g} and reward.correct={reward.correct:g}: "
                f"advantages scale with their distance, policy_loss.positive_nll.coef={nll.coef:g} "
                f"weighs {2 / spread:.2g} times as much as at -1 and 1: use those rewards, or "
                "scale it"
            )
        else:
            proportions.append("reward.incorrect equals reward.correct: nothing can be learnt")
    return proportions

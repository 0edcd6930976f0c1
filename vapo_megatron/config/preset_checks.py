"""A preset that the rest of the config undoes is refused by name: a run would bear the name of what it does not do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vapo_megatron.config.train import TrainConfig


def check_preset(config: "TrainConfig") -> None:
    """Raise ValueError, in one line, where a file or an override takes back what the preset is named after."""
    algorithm = config.algorithm
    advantage, loss = algorithm.advantage, algorithm.policy_loss
    updates = config.updates_per_rollout("actor") // algorithm.update.epochs
    kept: dict[str, tuple[str, object, bool, str]] = {
        "vapo_without_value_pretraining": (
            "value_pretraining.enabled",
            config.value_pretraining.enabled,
            not config.value_pretraining.enabled,
            "false",
        ),
        "vapo_without_decoupled_gae": (
            "algorithm.advantage.lambda_critic",
            advantage.lambda_critic,
            advantage.lambda_critic != 1,
            "less than 1",
        ),
        "vapo_without_length_adaptive_gae": (
            "algorithm.advantage.lambda_policy",
            advantage.lambda_policy,
            advantage.lambda_policy != "length_adaptive",
            "a number",
        ),
        "vapo_without_clip_higher": (
            "algorithm.policy_loss.clip_high",
            loss.clip_high,
            loss.clip_high == loss.clip_low,
            f"clip_low={loss.clip_low:g}",
        ),
        "vapo_without_token_level_loss": (
            "algorithm.policy_loss.aggregation",
            loss.aggregation,
            loss.aggregation != "token_mean",
            "sequence_mean",
        ),
        "vapo_without_positive_nll": (
            "algorithm.policy_loss.positive_nll.coef",
            loss.positive_nll.coef,
            loss.positive_nll.coef == 0,
            "0",
        ),
        "vapo_without_group_sampling": (
            "batch.samples_per_prompt",
            config.batch.samples_per_prompt,
            config.batch.samples_per_prompt == 1,
            "1, and as many prompts_per_step as there were responses",
        ),
        "rloo": ("algorithm.update: updates of a rollout", updates, updates == 1, "one: set minibatches=1 there"),
        "remax": ("algorithm.update: updates of a rollout", updates, updates == 1, "one: set minibatches=1 there"),
    }
    if config.preset in kept:
        key, value, holds, expected = kept[config.preset]
        if not holds:
            raise ValueError(
                f"{key}={value} undoes preset={config.preset}, which wants {expected}: take it out of the file or the "
                "overrides, or choose another preset"
            )

"""A preset that the rest of the config undoes is refused by name: a run would bear the name of what it does not do."""

from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vapo_megatron.config.train import TrainConfig


def check_preset(config: "TrainConfig") -> None:
    """Raise ValueError, in one line, where a file or an override takes back what the preset is named after."""
    advantage, loss = config.algorithm.advantage, config.algorithm.policy_loss
    # The key that a preset is named after, whether its value is still of that kind, and what would be.
    kept: dict[str, tuple[str, bool, str]] = {
        "value_pretraining": ("value_pretraining.enabled", not config.value_pretraining.enabled, "false"),
        "decoupled_gae": ("algorithm.advantage.lambda_critic", advantage.lambda_critic != 1, "less than 1"),
        "length_adaptive_gae": (
            "algorithm.advantage.lambda_policy",
            advantage.lambda_policy != "length_adaptive",
            "a number",
        ),
        "clip_higher": (
            "algorithm.policy_loss.clip_high",
            loss.clip_high == loss.clip_low,
            f"clip_low={loss.clip_low:g}",
        ),
        "token_level_loss": (
            "algorithm.policy_loss.aggregation",
            loss.aggregation != "token_mean",
            "sequence_mean",
        ),
        "positive_nll": ("algorithm.policy_loss.positive_nll.coef", loss.positive_nll.coef == 0, "0"),
        "critic": ("algorithm.advantage.estimator", advantage.estimator != "gae", "one without a critic, such as grpo"),
        "group_sampling": (
            "batch.samples_per_prompt",
            config.batch.samples_per_prompt == 1,
            "1, and as many prompts_per_step as there were responses",
        ),
    }
    preset = config.preset or ""
    updates = config.updates_per_rollout("actor") // config.algorithm.update.epochs
    if preset in ("rloo", "remax") and updates != 1:
        undone, expected = f"algorithm.update: updates of a rollout={updates}", "one: set minibatches=1 there"
    elif preset.startswith("vapo_direct") and advantage.calibration == "none":
        undone, expected = "algorithm.advantage.calibration=none", "trust, or values"
    elif (left_out := preset.removeprefix("vapo_without_")) in kept and not kept[left_out][1]:
        key, _, expected = kept[left_out]
        undone = f"{key}={reduce(getattr, key.split('.'), config)}"
    else:
        return
    raise ValueError(
        f"{undone} undoes preset={preset}, which wants {expected}: take it out of the file or the overrides, or choose "
        "another preset"
    )

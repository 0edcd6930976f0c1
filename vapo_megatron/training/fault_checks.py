"""Faults of a critic's update that can be known while it runs, by name (algorithms/critic_faults.py)."""

import torch
from torch import Tensor

from vapo_megatron.algorithms.critic_faults import loss_faults, target_faults
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.metrics import StepResult
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.training.advantages import gae, token_rewards
from vapo_megatron.training.losses import ValueLoss, values_of

# How far values may be apart that one critic gives one batch twice, cut into other micro-batches; times their size.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def first_update_faults(
    critic: Trainable, minibatch: ExperienceBatch, loss: ValueLoss, result: StepResult, config: AlgorithmConfig
) -> list[str]:
    """Collective: what the first optimizer step on a rollout gives away.

    Args:
        critic: which has just made the step.
        minibatch: with the values that the rollout was scored with.
        loss: of the step.
        result: of the step; its outputs are those of the critic before it.
        config: of the algorithm.
    """
    assert minibatch.selected is not None and minibatch.returns is not None and minibatch.values is not None
    found = loss_faults(loss.weights, minibatch.selected, minibatch.response_cu_seqlens)
    again = minibatch.select(range(minibatch.samples))
    assert again.shaped_rewards is not None, "no shaped rewards: estimate_advantages comes first"
    gae(again, token_rewards(again, again.shaped_rewards, config), config)
    assert again.returns is not None
    found += target_faults(minibatch.returns, again.returns)
    if "targets" not in found and result.outputs is not None:
        recorded = minibatch.values if loss.old_values is None else loss.old_values
        found += target_faults(values_of(result.outputs, config.value_loss), recorded, _tolerance(critic, recorded))
    if result.metrics["value_loss"] > 1e-12 and not critic.head_has_gradient():
        found.append("frozen")
    return found


def _tolerance(critic: Trainable, values: Tensor) -> float:
    rounding = _ROUNDING[critic.dtype] if critic.config.precision.fp8 == "none" else 2 * _ROUNDING[torch.bfloat16]
    return rounding * max(1.0, float(values.abs().max()))

"""Faults of a critic's update that can be known while it runs, by name (algorithms/critic_faults.py)."""

from dataclasses import replace

import torch

from vapo_megatron.algorithms.critic_faults import loss_counts, loss_faults, target_faults
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.megatron.metrics import StepResult, largest_over_ranks, sum_over_ranks
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.training.advantages import gae, teaches_critic, token_rewards
from vapo_megatron.training.exchange import seat
from vapo_megatron.training.losses import ValueLoss, values_of
from vapo_megatron.training.shards import Part

# How far values may be apart that one critic gives one batch twice, cut into other micro-batches; times their size.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}


# What first_update_faults reads of the first mini-batch beside values and returns, where it is filled in.
RECOMPUTED = ("old_logprobs", "ref_logprobs")


def first_update_faults(
    critic: Trainable, part: Part, loss: ValueLoss, result: StepResult, config: AlgorithmConfig
) -> list[str]:
    """Collective: what the first optimizer step on a rollout gives away.

    Args:
        critic: which has just made the step.
        part: of its mini-batch, with the values that the rollout was scored with.
        loss: of the step.
        result: of the step; its outputs are those of the critic before it.
        config: of the algorithm.
    """
    batch = part.batch
    assert batch.selected is not None and batch.returns is not None and batch.values is not None
    counts = loss_counts(loss.weights, teaches_critic(batch, config.shaping), batch.response_cu_seqlens)
    found = loss_faults(sum_over_ranks(counts))  # of each sample as often as of any other: shares are those of one
    again = replace(batch)
    gae(again, token_rewards(again, config), config, again.response_lengths)
    assert again.returns is not None
    recorded = loss.old_values
    assert recorded is not None, "values are sent with a mini-batch"
    here = [
        float(bool(target_faults(batch.returns, again.returns))),
        float(recorded.abs().max()) if len(recorded) else 0.0,
    ]
    remade, largest = largest_over_ranks(*here)
    remade = 0.0 if config.advantage.function is not None else remade  # value targets may be the user's own
    if not remade and result.outputs is not None:
        differs = len(part.reported[seat()[0]]) and target_faults(
            values_of(result.outputs, config.value_loss), recorded, _tolerance(critic, largest)
        )
        (remade,) = largest_over_ranks(float(bool(differs)))
    found += ["targets"] if remade else []
    if result.metrics["value_loss"] > 1e-12 and not critic.head_has_gradient():
        found.append("frozen")
    return found


def _tolerance(critic: Trainable, largest: float) -> float:
    rounding = _ROUNDING[critic.dtype] if critic.config.precision.fp8 == "none" else 2 * _ROUNDING[torch.bfloat16]
    return rounding * max(1.0, largest)

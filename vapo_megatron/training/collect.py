"""Collecting a rollout: prompts out, graded groups back, as a batch on rank 0."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.collectives import broadcast_value
from vapo_megatron.config.algorithm import AlgorithmConfig, ShapingConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Sample
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rollout.stream import StopAsked
from vapo_megatron.training.metrics import rollout_metrics
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.shards import ShardedBatch, scatter
from vapo_megatron.training.token_rewards import shaped_rewards


def collect(
    rollouts: Rollouts, config: AlgorithmConfig, step: int, recorder: Recorder
) -> ExperienceBatch | None:
    """Collective: the groups of the next step that Rollouts.begin has said how to choose, graded,
    on rank 0.

    Raises:
        StopAsked: on all ranks, where rank 0 is asked to stop meanwhile.
    """
    batch = None
    interruption = None
    with rollouts.engines.rank0_uses_engines():
        if dist.get_rank() == 0:
            try:
                samples = rollouts.take(recorder)
            except StopAsked as stop:
                interruption = str(stop)
            else:
                assert rollouts.stream is not None, "it was taken from"
                recorder.samples(
                    step, samples, [sample for group in rollouts.stream.dropped for sample in group]
                )
                batch = from_samples(samples)
                if config.advantage.traits.greedy:
                    batch.greedy_rewards = greedy_rewards(
                        rollouts, samples, config.shaping, recorder
                    )
    if interruption := broadcast_value(interruption):
        raise StopAsked(interruption, shared=True)
    rollouts.remember_probe(batch)
    if batch is not None:
        if batch.greedy_rewards is not None:
            recorder.add({"reward/greedy_mean": float(batch.greedy_rewards.mean())})
        recorder.add(rollout_metrics(batch))
        version = float(rollouts.engine_weights.version)
        recorder.add(
            {
                "rollout/tokens": float(batch.table().new_lengths.sum()),
                "rollout/weight_version": version,
            }
        )
    return batch


def spread(batch: ExperienceBatch | None, recorder: Recorder) -> ShardedBatch:
    """Collective: rank 0's batch, each sample at home on one rank."""
    with recorder.timer("broadcast"):
        return scatter(batch)


def greedy_rewards(
    rollouts: Rollouts, samples: Sequence[Sample], config: ShapingConfig, recorder: Recorder
) -> Tensor:
    """On rank 0: the shaped reward of the greedy response to the prompt of each sample, float32 [S]
    (ReMax).

    Greedy responses are the baseline alone: nothing is trained on them.
    """
    prompts = {sample.group: sample.prompt for sample in samples}
    answers = rollouts.generate_greedy(list(prompts.values()), recorder)
    rewards = shaped_rewards(from_samples(answers), config).tolist()
    by_group = dict(zip(prompts, rewards, strict=True))
    return torch.tensor([by_group[sample.group] for sample in samples])

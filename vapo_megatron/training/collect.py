"""Collecting a rollout: prompts out, responses back, grades on them, the same batch on every rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.algorithms.selection import informative_groups
from vapo_megatron.config.algorithm import AlgorithmConfig, DynamicSamplingConfig, ShapingConfig
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.experience.batch import ExperienceBatch, from_samples
from vapo_megatron.experience.sample import Sample
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import shaped_rewards
from vapo_megatron.training.broadcast import broadcast_batch
from vapo_megatron.training.metrics import rollout_metrics
from vapo_megatron.training.rollouts import Rollouts


def collect(
    rollouts: Rollouts,
    size: BatchConfig,
    config: AlgorithmConfig,
    step: int,
    recorder: Recorder,
    fixed_policy: bool = False,
) -> ExperienceBatch:
    """Collective: size.prompts_per_step groups of size.samples_per_prompt graded responses (group sampling).

    fixed_policy: the policy is not trained on them. Then groups that dynamic sampling would drop are wanted as well,
    and the experts that the engines chose are not (rollout.router_replay).
    """
    batch = None
    if dist.get_rank() == 0:
        if config.dynamic_sampling.enabled and not fixed_policy:
            samples = collect_informative(rollouts, size, config.dynamic_sampling, recorder)
        else:
            samples = collect_groups(rollouts, size.prompts_per_step, size, recorder, with_experts=not fixed_policy)
        recorder.samples(step, samples)
        batch = from_samples(samples)
        if config.advantage.estimator == "remax":
            batch.greedy_rewards = greedy_rewards(rollouts, samples, config.shaping, recorder)
    with recorder.timer("broadcast"):
        batch = broadcast_batch(batch)
    if batch.greedy_rewards is not None:
        recorder.add({"reward/greedy_mean": float(batch.greedy_rewards.mean())})
    rollouts.remember_probe(batch)
    recorder.add(rollout_metrics(batch))
    version = float(rollouts.engines.version)
    recorder.add({"rollout/tokens": float(batch.response_tokens), "rollout/weight_version": version})
    return batch


def collect_groups(
    rollouts: Rollouts, prompts: int, size: BatchConfig, recorder: Recorder, with_experts: bool = True
) -> list[Sample]:
    """On rank 0: graded responses to the next prompts, in the order of group and index."""
    assert rollouts.prompts is not None, "prompts are rank 0's"
    return rollouts.generate(rollouts.prompts.take(prompts), size.samples_per_prompt, recorder, with_experts)


def greedy_rewards(rollouts: Rollouts, samples: Sequence[Sample], config: ShapingConfig, recorder: Recorder) -> Tensor:
    """On rank 0: the shaped reward of the greedy response to the prompt of each sample, float32 [S] (ReMax).

    Greedy responses are the baseline alone: nothing is trained on them.
    """
    prompts = {sample.group: sample.prompt for sample in samples}
    answers = rollouts.generate_greedy(list(prompts.values()), recorder)
    rewards = shaped_rewards(from_samples(answers), config).tolist()
    by_group = dict(zip(prompts, rewards, strict=True))
    return torch.tensor([by_group[sample.group] for sample in samples])


def collect_informative(
    rollouts: Rollouts, size: BatchConfig, config: DynamicSamplingConfig, recorder: Recorder
) -> list[Sample]:
    """On rank 0: groups with both correct and incorrect responses alone (DAPO's dynamic sampling).

    After max_rounds what was found is filled up with other groups, so that a step always has its size.
    """
    wanted, n = size.prompts_per_step, size.samples_per_prompt
    kept: list[list[Sample]] = []
    spare: list[list[Sample]] = []
    rounds = drawn = 0
    while len(kept) < wanted and rounds < config.max_rounds:
        count = max(1, round((wanted - len(kept)) * config.oversampling))
        samples = collect_groups(rollouts, count, size, recorder)
        rounds, drawn = rounds + 1, drawn + count
        correct = torch.tensor([bool(sample.correct) for sample in samples])
        informative = informative_groups(correct, torch.tensor([sample.group for sample in samples]))
        for start in range(0, len(samples), n):
            (kept if informative[start] else spare).append(samples[start : start + n])
    recorder.add(
        {
            "dynamic_sampling/rounds": float(rounds),
            "dynamic_sampling/prompts": float(drawn),
            "dynamic_sampling/kept": float(min(len(kept), wanted)),
        }
    )
    groups = (kept + spare)[:wanted]
    for number, group in enumerate(groups):
        for sample in group:
            sample.group = number
    return [sample for group in groups for sample in group]

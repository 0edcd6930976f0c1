"""Collecting a rollout: prompts out, responses back, grades on them, the same batch on every rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.experience.batch import ExperienceBatch, from_samples
from vapo_megatron.experience.sample import Sample
from vapo_megatron.monitoring import names
from vapo_megatron.rewards.grading import grade_samples
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.rollout.routed_experts import ExpertChoices
from vapo_megatron.training.advantages import shaped_rewards
from vapo_megatron.training.broadcast import broadcast_batch
from vapo_megatron.training.metrics import rollout_metrics
from vapo_megatron.training.run import Run


def collect(run: Run, every_group: bool = False, for_policy: bool = True) -> ExperienceBatch:
    """Collective: batch.prompts_per_step groups of batch.samples_per_prompt graded responses (group sampling).

    every_group: also those that dynamic sampling would drop, for what is to see the policy as it is.
    for_policy: the policy is trained on them, so that it is to know the experts that the engines chose
    (rollout.router_replay).
    """
    batch, config = None, run.config.algorithm
    if dist.get_rank() == 0:
        dynamic = config.dynamic_sampling
        if dynamic.enabled and not every_group:
            samples = collect_informative(run, dynamic)
        else:
            samples = collect_groups(run, run.config.batch.prompts_per_step, for_policy)
        run.recorder.samples(run.step, samples)
        batch = from_samples(samples)
        if config.advantage.estimator == "remax":
            batch.greedy_rewards = greedy_rewards(run, samples)
    with run.recorder.timer("broadcast"):
        batch = broadcast_batch(batch)
    if batch.greedy_rewards is not None:
        run.recorder.add({"reward/greedy_mean": float(batch.greedy_rewards.mean())})
    run.remember_probe(batch)
    run.recorder.add(rollout_metrics(batch))
    run.recorder.add(
        {"rollout/tokens": float(batch.response_tokens), "rollout/weight_version": float(run.engines.version)}
    )
    return batch


def collect_groups(run: Run, prompts: int, for_policy: bool = True) -> list[Sample]:
    """On rank 0: graded responses to the next prompts, in the order of group and index. for_policy: see collect."""
    n = run.config.batch.samples_per_prompt
    assert run.source is not None and run.verifier is not None
    drawn = run.source.take(prompts)
    config = run.config
    experts = ExpertChoices.of(run.spec) if config.rollout.router_replay and for_policy else None
    request = GenerationRequest(drawn, n, config.sampling, config.run.seed, run.engines.version, experts)
    with run.recorder.phase("rollout", total=request.num_samples) as advance:
        samples = run.engines.collect(request, advance)
    with run.recorder.phase("verify", total=len(samples)) as advance:
        failed = grade_samples(samples, run.verifier, run.tokenizer.decode, run.config.reward, advance)
    run.recorder.add({names.FAILED_GRADES: failed})
    return samples


def greedy_rewards(run: Run, samples: Sequence[Sample]) -> Tensor:
    """On rank 0: the shaped reward of the greedy response to the prompt of each sample, float32 [S] (ReMax).

    Greedy responses are the baseline alone: nothing is trained on them.
    """
    assert run.verifier is not None
    prompts = list({sample.group: sample.prompt for sample in samples}.values())
    sampling = run.config.sampling.model_copy(update={"temperature": 0.0})
    request = GenerationRequest(prompts, 1, sampling, run.config.run.seed, run.engines.version)
    with run.recorder.phase("rollout_greedy", total=len(prompts)) as advance:
        answers = run.engines.collect(request, advance)
    grade_samples(answers, run.verifier, run.tokenizer.decode, run.config.reward)
    by_group = dict(
        zip(
            {sample.group: None for sample in samples},
            shaped_rewards(from_samples(answers), run.config.algorithm.shaping).tolist(),
            strict=True,
        )
    )
    return torch.tensor([by_group[sample.group] for sample in samples])


def collect_informative(run: Run, config: DynamicSamplingConfig) -> list[Sample]:
    """On rank 0: groups with both correct and incorrect responses alone (DAPO's dynamic sampling).

    After max_rounds what was found is filled up with other groups, so that a step always has its size.
    """
    wanted, n = run.config.batch.prompts_per_step, run.config.batch.samples_per_prompt
    kept: list[list[Sample]] = []
    spare: list[list[Sample]] = []
    rounds = drawn = 0
    while len(kept) < wanted and rounds < config.max_rounds:
        count = max(1, round((wanted - len(kept)) * config.oversampling))
        samples = collect_groups(run, count)
        rounds, drawn = rounds + 1, drawn + count
        for start in range(0, len(samples), n):
            group = samples[start : start + n]
            informative = 0 < sum(bool(s.correct) for s in group) < len(group)
            (kept if informative else spare).append(group)
    run.recorder.add(
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

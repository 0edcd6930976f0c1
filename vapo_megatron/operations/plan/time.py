"""Seconds of a step by phase, from operations, bytes, stated rates and the shares of them that are reached."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from vapo_megatron.megatron.memory_plan import Phase
from vapo_megatron.operations.hardware import Hardware
from vapo_megatron.operations.plan.activations import EXPERT_IMBALANCE
from vapo_megatron.operations.plan.engines import PlannedEngine
from vapo_megatron.operations.plan.memory import microbatches, minibatch_samples, on_device, phases_of
from vapo_megatron.operations.plan.models import PlannedModel, PlannedRun
from vapo_megatron.operations.plan.rollout import (
    Flops,
    drawn_prompts,
    forward_flops,
    mlp_share,
    rollout_seconds,
    training_flops,
)

# Work of the largest micro-batch of a rank over that of its mean one, less one: what a pipeline loses in each stage
# that waits. Measured at 8,192 samples over 64 ranks, by `python -m benchmarks.balance`, column "uneven".
_UNEVEN = 0.03


@dataclass(frozen=True)
class StepTime:
    """Seconds of each phase of one step, of value pretraining before the first, and of one evaluation problem set."""

    phases: dict[str, float]
    value_pretraining: dict[str, float]
    evaluation: float

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.phases.values())

    @property
    def pretraining(self) -> float:
        """Seconds of value pretraining as a whole."""
        return sum(self.value_pretraining.values())


def _compute_seconds(model: PlannedModel, flops: Flops, passes: float, count: float, hardware: Hardware) -> float:
    """Seconds of a rank's products; a layer's pass over one of `count` micro-batches takes no less than launching it.

    passes: of a layer over a micro-batch, in units of a forward pass.
    """
    efficiency = hardware.efficiency
    gain = efficiency.fp8_gain if model.config.precision.fp8 != "none" else 1.0
    # Only the ranks of a pipeline's last stage compute the head, and all others wait for them.
    head = flops.head * model.layout.pp / efficiency.linear
    # Where experts are spread over ranks, all wait for the one whose experts get most tokens.
    waiting = (EXPERT_IMBALANCE - 1) * mlp_share(model.spec) if model.layout.ep > 1 else 0.0
    body = flops.linear * (1 + waiting) / (efficiency.linear * gain) + flops.attention / efficiency.attention
    launching = passes * count * model.spec.num_layers / model.layout.pp * efficiency.layer_overhead
    return max((body + head) / (hardware.bf16 * model.world), launching)


def _pass_bytes_seconds(model: PlannedModel, tokens: float, training: bool, hardware: Hardware) -> float:
    """Seconds that a rank waits for other ranks in passes over some tokens of the whole run."""
    layout, spec, width = model.layout, model.spec, model.width
    layers = spec.num_layers / layout.pp
    mine = tokens / (model.dp * layout.cp)
    full = training and model.config.recompute.granularity == "full"
    seconds = 0.0
    if layout.tp > 1:
        # Gather and scatter round attention and MLP (or sums of twice the bytes), backward as well and once more for
        # the gradients of weights.
        times = 4 + (6 if training else 0) + (4 if full else 0)
        moved = times * layers * mine * spec.hidden_size * width * (layout.tp - 1) / layout.tp
        seconds += moved / hardware.link(layout.tp)
    if layout.cp > 1:
        times = 1 + (2 if training else 0) + (1 if full else 0)
        moved = times * layers * mine * 2 * spec.kv_size / layout.tp * width * (layout.cp - 1)
        seconds += moved / hardware.link(layout.tp * layout.cp)
    if layout.ep > 1:
        times = 2 * (1 + (2 if training else 0) + (1 if full else 0))
        share = mine / (layout.tp if layout.sequence_parallel else 1) * spec.experts_per_token
        seconds += (
            times * layers * share * spec.hidden_size * width * (layout.ep - 1) / layout.ep / hardware.link(layout.ep)
        )
    if layout.pp > 1:
        times = (2 if training else 1) * (layout.vpp or 1)
        cut = layout.tp if layout.sequence_parallel else 1
        seconds += times * mine * spec.hidden_size * width / cut / hardware.link(model.world // layout.pp + 1)
    return seconds


def _bubble(model: PlannedModel, count: int) -> float:
    """Time of a pipelined pass in units of the time without waiting (Narayanan et al. 2021, section 2.2).

    Micro-batches come by falling work: those that fill the pipeline are the largest.
    """
    return 1 + (model.layout.pp - 1) * (1 + _UNEVEN) / (count * (model.layout.vpp or 1))


def _unevenness(model: PlannedModel, samples: float) -> float:
    """Work of the rank with most samples in units of the mean."""
    per_rank = samples / model.dp
    return math.ceil(per_rank) / per_rank


def score_seconds(run: PlannedRun, model: PlannedModel, samples: float) -> float:
    """Seconds of one forward pass over some samples."""
    lengths, hardware = run.lengths, run.hardware
    tokens = samples * lengths.sample
    flops = forward_flops(model.spec, model.head, tokens, samples * lengths.mean_square, samples * lengths.mean)
    count = max(1, math.ceil(tokens / model.dp / (model.config.max_tokens_per_microbatch * model.layout.cp)))
    seconds = _compute_seconds(model, flops, 1.0, count, hardware) * _unevenness(model, samples)
    return (seconds + _pass_bytes_seconds(model, tokens, False, hardware)) * _bubble(model, count)


def update_seconds(run: PlannedRun, model: PlannedModel, samples: float) -> float:
    """Seconds of training once on some samples, in optimizer steps of a mini-batch each."""
    lengths, hardware, minibatch = run.lengths, run.hardware, minibatch_samples(run.config)
    tokens = samples * lengths.sample
    forward = forward_flops(model.spec, model.head, tokens, samples * lengths.mean_square, samples * lengths.mean)
    flops = training_flops(model.spec, forward, model.layout, model.config.recompute)
    steps, count = max(1.0, samples / minibatch), microbatches(run, model)
    # Backward launches about twice as much as forward.
    passes = 4.0 if model.config.recompute.granularity == "full" else 3.0
    seconds = _compute_seconds(model, flops, passes, steps * count, hardware)
    seconds *= _unevenness(model, min(samples, minibatch))
    seconds = (seconds + _pass_bytes_seconds(model, tokens, True, hardware)) * _bubble(model, count)
    return seconds + steps * optimizer_seconds(model, hardware)


def optimizer_seconds(model: PlannedModel, hardware: Hardware) -> float:
    """Seconds of one optimizer step: gradients are reduced, states updated, weights gathered; nothing overlaps."""
    stages = range(model.layout.pp)
    parameters = max(model.trained(stage).parameters for stage in stages)
    state = max(model.bytes_of("optimizer", stage) for stage in stages)
    replicas = model.dp * model.layout.cp
    moved = parameters * (4 + model.width) * (replicas - 1) / replicas
    # The ranks of one stage stand side by side.
    seconds = moved / hardware.link(model.world // model.layout.pp) if replicas > 1 else 0.0
    touched = 2 * state + parameters * (8 + model.width) / replicas
    return seconds + touched / (hardware.memory_rate * hardware.efficiency.memory)


def move_seconds(model: PlannedModel, phases: Sequence[Phase], hardware: Hardware) -> float:
    """Seconds of a step in which parts of a model are onloaded and offloaded; gradients are allocated anew."""
    link, seconds = hardware.pcie * hardware.efficiency.pcie, 0.0
    held = [{*on_device(phase, model.name, model.config)} - {"gradients"} for phase in phases]
    changes = [part for before, after in itertools.pairwise([*held, held[0]]) for part in before ^ after]
    for stage in range(model.layout.pp):
        seconds = max(seconds, sum(model.bytes_of(part, stage) for part in changes) / link)
    return seconds


def sync_seconds(actor: PlannedModel, engine: PlannedEngine) -> float:
    """Seconds in which every rank gathers the whole model and the engines copy their part of it."""
    hardware = engine.hardware
    size = actor.spec.parameter_count() * actor.width
    block = actor.layout.tp * actor.layout.pp * actor.layout.ep
    spans = actor.world if actor.layout.pp > 1 else block
    gather = size * (block - 1) / block / hardware.link(spans) if block > 1 else 0.0
    copies = 2 * size + 2 * engine.weights
    return gather + copies / (hardware.memory_rate * hardware.efficiency.memory)


def plan_time(run: PlannedRun, engine: PlannedEngine, evaluation_samples: float) -> StepTime:
    """Seconds of every phase; evaluation_samples: responses of one evaluation over all sets."""
    config, models = run.config, run.models
    actor, critic, batch = models["actor"], models.get("critic"), config.batch
    update, n = config.algorithm.update, batch.samples_per_prompt
    samples = float(config.samples)
    engines = actor.world // config.rollout.tp

    def generate(prompts: float, responses: float) -> float:
        return rollout_seconds(engine, engines, prompts, responses, run.lengths)

    def grade(responses: float) -> float:
        return responses * config.plan.grade_seconds / config.reward.workers

    drawn = drawn_prompts(batch.prompts_per_step, config.algorithm.dynamic_sampling, config.plan.informative_share)
    rollout = generate(drawn, drawn * n)
    # Groups are graded while others are generated: the last one follows, or what the workers could not keep up with.
    phases: dict[str, float] = {"rollout": rollout, "verify": max(grade(n), grade(drawn * n) - rollout)}
    if config.algorithm.advantage.estimator == "remax":
        phases["rollout_greedy"] = generate(batch.prompts_per_step, batch.prompts_per_step)
    wanted = phases_of(config)
    for phase, name in (("score_reference", "reference"), ("score_policy", "actor"), ("score_values", "critic")):
        if phase in wanted:
            phases[phase] = score_seconds(run, models[name], samples)
    if config.algorithm.uses_reference and config.actor.kind == "adapter":
        phases["score_reference"] = score_seconds(run, actor, samples)
    if critic is not None:
        once = update_seconds(run, critic, samples)
        phases["update_critic"] = once * update.epochs * update.critic_updates_per_policy_update
    phases["update_policy"] = update.epochs * update_seconds(run, actor, samples)
    phases["offload_and_onload"] = sum(move_seconds(model, wanted, run.hardware) for model in models.values())
    phases["weight_sync"] = sync_seconds(actor, engine)
    pretraining: dict[str, float] = {}
    if critic is not None and config.value_pretraining.enabled:
        settings = config.value_pretraining
        trained = settings.updates(config.samples) * settings.minibatch_size
        # Every group that the policy writes is learnt from: one round.
        generated = generate(batch.prompts_per_step, samples)
        collected = max(generated + grade(n), grade(samples))
        pretraining = {
            "rollouts": settings.rollouts(config.samples) * collected,
            "critic updates": update_seconds(run, critic, trained),
        }
    evaluation = 0.0
    if evaluation_samples:
        evaluation = generate(evaluation_samples, evaluation_samples) + grade(evaluation_samples)
    return StepTime(phases, pretraining, evaluation)

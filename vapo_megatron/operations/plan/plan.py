"""A config with everything derived from it: models, memory, seconds of a step by phase.

Seconds are computed from operations, bytes, nominal rates and the shares of these that are
achieved.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from vapo_megatron.checkpoint.sizes import run_bytes
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.engines.engine_limits import check_engine_size
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.offload import WEIGHTS, Part, Phase, Residency
from vapo_megatron.models.layers import LatentAttention
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.models.stacked_experts import Stacked
from vapo_megatron.operations.plan.inputs import Hardware, planned_lengths
from vapo_megatron.operations.plan.memory import (
    PHASES,
    Memory,
    microbatches,
    minibatch_samples,
    on_device,
    phases_of,
    plan_memory,
    ranks_of,
)
from vapo_megatron.operations.plan.models import (
    EXPERT_IMBALANCE,
    PlannedModel,
    PlannedRun,
    planned_models,
)
from vapo_megatron.operations.plan.rollout import (
    Flops,
    PlannedEngine,
    drawn_prompts,
    forward_flops,
    matrix_parameters,
    rollout_seconds,
    training_flops,
)

# Seconds of a bucket of weights beside its bytes: requests, opened handles, checks. On CPUs 2.2 ms
# where one rank trains and 6.5 ms where two do (benchmarks/weight_sync.py, 2026-12-01).
_BUCKET_SECONDS = 0.0065
# Seconds in which an engine finds and marks the place of a tensor, from the second weight sync on
# (benchmarks/strict_loading.py, 12,288 tensors, 2026-12-01).
_TENSOR_SECONDS = 3.3e-6


@dataclass(frozen=True)
class StepTime:
    """Seconds of each phase of one step, and of value pretraining before the first."""

    phases: dict[str, float]
    value_pretraining: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.phases.values())


def _compute_seconds(model: PlannedModel, flops: Flops, hardware: Hardware) -> float:
    """Seconds of a rank's products."""
    efficiency = hardware.efficiency
    experts = 0.0
    waiting = 1.0
    if model.config.precision.fp8 != "none":
        gain = efficiency.fp8_gain
    else:
        gain = 1.0
    # Only the ranks of a pipeline's last stage compute the head, and all others wait for them.
    head = flops.head * model.layout.pp / efficiency.linear
    if model.spec.num_experts:
        # Where experts are spread over ranks, all wait for the one whose experts get most tokens.
        experts = matrix_parameters(model.spec, "mlp.") / matrix_parameters(model.spec)
        if model.layout.ep > 1:
            waiting = EXPERT_IMBALANCE
        else:
            waiting = 1.0
    linear = (1 - experts) / efficiency.linear + experts * waiting / efficiency.experts
    body = flops.linear * linear / gain + flops.attention / efficiency.attention
    body *= model.longest_stage * model.layout.pp / model.spec.num_layers
    return (body + head) / (hardware.bf16 * model.world)


def _exchange_seconds(
    model: PlannedModel, tokens: float, training: bool, hardware: Hardware
) -> float:
    """Seconds that a rank waits for other ranks in passes over some tokens of the whole run."""
    layout = model.layout
    spec = model.spec
    again = training and model.config.recompute.granularity == "full"
    mine = tokens / (model.dp * layout.cp)
    cut = layout.tp if layout.sequence_parallel else 1
    # By dimension: ranks of a collective, times in each layer, elements of a token that a rank
    # gets.
    kinds = [
        # Gather and scatter round attention and MLP (or sums of twice the bytes), backward as well
        # and once more for the gradients of weights.
        (layout.tp, 4 + 6 * training + 4 * again, spec.hidden_size * (layout.tp - 1) / layout.tp),
        (
            layout.cp,
            1 + 2 * training + again,
            2 * spec.attention.kv_size / layout.tp * (layout.cp - 1),
        ),
        (
            layout.ep,
            2 * (1 + 2 * training + again),
            spec.experts_per_token / cut * spec.hidden_size * (layout.ep - 1) / layout.ep,
        ),
    ]
    seconds = 0.0
    for (ranks, times, elements), spans in zip(
        kinds, (layout.tp, layout.tp * layout.cp, layout.ep), strict=True
    ):
        if ranks > 1:
            moved = times * model.longest_stage * mine * elements * model.width
            seconds += moved / hardware.link(spans)
    if layout.pp > 1:
        moved = (1 + training) * (layout.vpp or 1) * mine * spec.hidden_size * model.width / cut
        seconds += moved / hardware.link(model.world // layout.pp + 1)
    return seconds


def pass_seconds(run: PlannedRun, model: PlannedModel, samples: float, training: bool) -> float:
    """Seconds of scoring some samples, or of training on them once, in optimizer steps of a
    mini-batch each."""
    lengths = run.lengths
    layout = model.layout
    minibatch = minibatch_samples(run.config)
    tokens = samples * lengths.sample
    flops = forward_flops(
        model.spec, model.head, tokens, samples * lengths.mean_square, samples * lengths.mean
    )
    count = max(
        1, math.ceil(tokens / model.dp / (model.config.max_tokens_per_microbatch * layout.cp))
    )
    if training:
        flops = training_flops(model.spec, flops, layout, model.config.recompute)
        count = microbatches(run, model)
    # Time of a pipelined pass in units of the time without waiting (Narayanan et al. 2021, section
    # 2.2).
    bubble = 1 + (layout.pp - 1) / (count * (layout.vpp or 1))
    working = _compute_seconds(model, flops, run.hardware)
    seconds = (working + _exchange_seconds(model, tokens, training, run.hardware)) * bubble
    return seconds + training * max(1.0, samples / minibatch) * optimizer_seconds(
        model, run.hardware
    )


def optimizer_seconds(model: PlannedModel, hardware: Hardware) -> float:
    """Seconds of one optimizer step: gradients are reduced, states updated, weights gathered;
    nothing overlaps."""
    stages = range(model.layout.pp)
    parameters = max(model.trained(stage).parameters for stage in stages)
    state = max(model.bytes_of("optimizer", stage) for stage in stages)
    replicas = model.dp * model.layout.cp
    moved = parameters * (4 + model.width) * (replicas - 1) / replicas
    # The ranks of one stage stand side by side.
    if replicas > 1:
        seconds = moved / hardware.link(model.world // model.layout.pp)
    else:
        seconds = 0.0
    touched = 2 * state + parameters * (8 + model.width) / replicas
    return seconds + touched / (hardware.memory_rate * hardware.efficiency.memory)


def move_seconds(run: PlannedRun, engine: PlannedEngine, stays: Residency) -> float:
    """Seconds of a step in which parts of models are onloaded and offloaded. Parts leave while
    others arrive where there is room for both; weights that no update changed are not copied, nor
    are gradients."""
    phases = phases_of(run.config)
    ranks = ranks_of(run.models)
    steps = itertools.pairwise([*phases, phases[0]])
    return sum(max(_moved(run, engine, stays, step, stages) for stages in ranks) for step in steps)


def _moved(
    run: PlannedRun,
    engine: PlannedEngine,
    stays: Residency,
    step: tuple[Phase, Phase],
    stages: Mapping[str, int],
) -> float:
    """Seconds of the moves between two phases on one kind of rank."""
    hardware = run.hardware
    leaving = arriving = held = 0.0
    for name, model in run.models.items():
        before, after = (set(on_device(phase, name, model.config, stays)) for phase in step)
        held += sum(model.bytes_of(part, stages[name]) for part in before | after)
        arriving += sum(model.bytes_of(part, stages[name]) for part in after - before - _UNCOPIED)
        gone = before - after - _UNCOPIED
        if not _updated(name, model, step[0], run, stays):
            gone -= WEIGHTS
        leaving += sum(model.bytes_of(part, stages[name]) for part in gone)
    held += hardware.trainer_overhead
    if not run.config.rollout.external_urls:
        held += hardware.engine_overhead + engine.weights * ("weight_sync" in step)
    if held <= hardware.usable_memory:
        moved = max(leaving, arriving)
    else:
        moved = leaving + arriving
    return moved / (hardware.pcie * hardware.efficiency.pcie)


_UNCOPIED: frozenset[Part] = frozenset({"gradients"})


def _updated(
    name: str, model: PlannedModel, last: Phase, run: PlannedRun, stays: Residency
) -> bool:
    """Whether a model was updated since its weights arrived on the GPU, at the end of a phase."""
    phases = phases_of(run.config)
    end = phases.index(last)
    for phase in (*reversed(phases[: end + 1]), *reversed(phases[end + 1 :])):
        if "weights" not in on_device(phase, name, model.config, stays):
            return False
        if phase.startswith("update") and PHASES[phase] == name:
            return True
    return False


def sync_seconds(run: PlannedRun, engine: PlannedEngine, bucket: int) -> float:
    """Seconds of a weight sync, from the third on: ranks gather what they lack, bucket by bucket,
    and the engines copy their part of it. bucket: limit of a bucket, in bytes."""
    hardware = engine.hardware
    actor = run.models["actor"]
    size = actor.spec.parameter_count() * actor.width
    block = actor.layout.tp * actor.layout.pp * actor.layout.ep
    placed, gathered = float(size), size * (block - 1) / block
    if _sends_own_shares(run):
        stages = actor.layout.pp
        holders = stages * actor.layout.ep
        experts = _expert_parameters(actor.spec) * actor.width
        shares = (size - experts) / actor.layout.tp
        placed = experts + shares
        gathered = experts * (holders - 1) / holders + shares * (stages - 1) / stages
    if actor.layout.pp > 1:
        spans = actor.world
    else:
        spans = block
    seconds = gathered / hardware.link(spans)
    if run.config.rollout.external_urls:  # rank 0 sends it to all of them at once
        seconds += size / (hardware.network * hardware.efficiency.network)
    copied = 2 * placed + 2 * engine.weights
    seconds += copied / (hardware.memory_rate * hardware.efficiency.memory)
    seconds += _TENSOR_SECONDS * _tensors(actor.spec)
    return seconds + _BUCKET_SECONDS * math.ceil(size / bucket)


def _sends_own_shares(run: PlannedRun) -> bool:
    """Whether each rank of an engine gets the shares of one trainer rank
    (engines.weight_sync.own_shares)."""
    rollout = run.config.rollout
    actor = run.models["actor"]
    # Loaders of latent attention compute with whole weights, and get whole buckets.
    latent = isinstance(actor.spec.attention, LatentAttention)
    return (
        rollout.tp == actor.layout.tp > 1
        and not latent
        and rollout.sync.gather == "auto"
        and rollout.sync.transport in ("auto", "ipc")
        and rollout.quantization == "none"
        and not rollout.external_urls
    )


def _expert_parameters(spec: ModelSpec) -> int:
    """Parameters of all experts, which tensor-parallel ranks do not share out."""
    return sum(
        count * (layer.parameter_count(layer.experts) - layer.parameter_count(0))
        for layer, count in spec.kinds.items()
    )


def _tensors(spec: ModelSpec) -> int:
    """How many Hugging Face tensors a policy has."""
    rules = [spec.embedding, spec.final_norm, *spec.head_rules("lm")]
    count = sum(len(rule.hf) for rule in rules)
    for layer in spec.layers:
        count += sum(len(rule.hf) for rule in layer.rules)
        for rule in layer.expert_rules:
            # A stacked tensor holds all experts
            copies = 1 if isinstance(rule, Stacked) else layer.experts
            count += copies * len(rule.hf)
    return count


def plan_time(run: PlannedRun, memory: Memory) -> StepTime:
    """Seconds of every phase."""
    engine = memory.engine
    config = run.config
    models = run.models
    actor = models["actor"]
    critic = models.get("critic")
    batch = config.batch
    update = config.algorithm.update
    n = batch.samples_per_prompt
    samples = float(config.samples)

    def generate(prompts: float, responses: float) -> float:
        return rollout_seconds(engine, run.engines, prompts, responses, run.lengths, config.plan)

    def grade(responses: float) -> float:
        return responses * config.plan.grade_seconds / config.reward.workers

    drawn = drawn_prompts(
        batch.prompts_per_step, config.algorithm.dynamic_sampling, config.plan.informative_share
    )
    rollout = generate(drawn, drawn * n)
    # Groups are graded while others are generated: the last one follows, or what the workers could
    # not keep up with.
    phases: dict[str, float] = {
        "rollout": rollout,
        "verify": max(grade(n), grade(drawn * n) - rollout),
    }
    if config.algorithm.advantage.traits.greedy:
        phases["rollout_greedy"] = generate(batch.prompts_per_step, batch.prompts_per_step)
    phase_names = phases_of(config)
    for phase, name in (
        ("score_reference", "reference"),
        ("score_policy", "actor"),
        ("score_values", "critic"),
    ):
        if phase in phase_names:
            # Where engines' log-probs are the old ones, the policy scores a sample of them.
            if phase == "score_policy":
                scored = samples / update.scored_of(config.samples, actor.world)
            else:
                scored = samples
            phases[phase] = pass_seconds(run, models[name], scored, False)
    if config.algorithm.uses_reference and not config.has_reference_model:
        phases["score_reference"] = pass_seconds(run, actor, samples, False)
    if critic is not None:
        once = pass_seconds(run, critic, samples, True)
        phases["update_critic"] = once * update.epochs * update.critic_updates_per_policy_update
    phases["update_policy"] = update.epochs * pass_seconds(run, actor, samples, True)
    phases["offload_and_onload"] = move_seconds(run, engine, memory.stays)
    phases["weight_sync"] = sync_seconds(run, engine, memory.bucket)
    if config.rollout.external_urls and config.rollout.asynchronous.max_staleness:
        # Engines work ahead: the trainer waits for what takes them longer than it takes itself.
        waited = phases["rollout"] + phases.pop("verify") + phases.pop("rollout_greedy", 0.0)
        phases["rollout"] = max(0.0, waited - sum(phases.values()) + phases["rollout"])
    pretraining: dict[str, float] = {}
    if critic is not None and config.value_pretraining.enabled:
        settings = config.value_pretraining
        # Every group that the policy writes is learnt from: one round.
        generated = generate(batch.prompts_per_step, samples)
        collected = max(generated + grade(n), grade(samples))
        trained = settings.updates(config.samples) * settings.minibatch_size
        pretraining = {
            "rollouts": settings.rollouts(config.samples) * collected,
            "critic updates": pass_seconds(run, critic, trained, True),
        }
    return StepTime(phases, pretraining)


@dataclass(frozen=True)
class Plan(PlannedRun):
    """Memory and time of a run on `world` GPUs."""

    world: int
    memory: Memory
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether everything fits."""
        return not self.memory.problems

    @property
    def seconds(self) -> float:
        """Seconds of the run's steps and value pretraining; starting, evaluations and checkpoints
        are not counted."""
        return sum(self.time.value_pretraining.values()) + self.config.run.steps * self.time.step

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of these seconds, engines elsewhere included."""
        elsewhere = len(self.config.rollout.external_urls) * self.config.rollout.tp
        return (self.world + elsewhere) * self.seconds / 3600

    @property
    def disk_bytes(self) -> int:
        """Bytes of the run's checkpoints, the one being written too, and of its last export."""
        return run_bytes(self.config, {name: model.spec for name, model in self.models.items()})


def default_world(config: PlanConfig) -> int:
    """GPUs where the command line names none: plan.gpus, cluster.ranks, or one node."""
    return config.plan.gpus or config.cluster.ranks or config.hardware.gpus_per_node


def make_plan(config: PlanConfig, world: int) -> Plan:
    """The plan of a config.

    Raises:
        BadInput: the model's config.json cannot be read, or the model or the engines cannot be laid
            out over `world` GPUs as the config says. What has no room is in the plan's
            memory.problems.
    """
    hardware = Hardware(config.hardware)
    lengths = planned_lengths(config)
    node = config.hardware.gpus_per_node
    models = planned_models(config, world)
    if not config.rollout.external_urls:
        check_engine_size(config.rollout, min(world, node), world)
    if world > node and world % node:
        raise BadInput(
            f"{world} GPUs are not whole nodes of hardware.gpus_per_node={node}: choose a multiple"
        )
    run = PlannedRun(config, models, hardware, lengths)
    memory = plan_memory(run)
    return Plan(config, models, hardware, lengths, world, memory, plan_time(run, memory))

"""Bytes on the worst GPU in each phase, and on the worst node."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vapo_megatron.checks.sizes import check_capacity
from vapo_megatron.config.model import TrainableConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.offload import ONLOADED, PARTS, WEIGHTS, Part, Phase, Residency
from vapo_megatron.operations.plan.inputs import GIB
from vapo_megatron.operations.plan.models import PlannedModel, PlannedRun
from vapo_megatron.operations.plan.rollout import PlannedEngine

# The phases of a step in the order of training/loop.py, and the model that computes in each.
PHASES: dict[Phase, str | None] = {
    "rollout": None,
    "score_reference": "reference",
    "score_policy": "actor",
    "score_values": "critic",
    "update_critic": "critic",
    "update_policy": "actor",
    "weight_sync": None,
}


def on_device(
    phase: Phase, name: str, config: TrainableConfig, stays: Residency = ONLOADED
) -> tuple[Part, ...]:
    """The parts of a model that are on the GPU in a phase; all that it has where it never sleeps (a
    reference does)."""
    if config.offload == "never" and name != "reference":
        return PARTS
    held = stays.get(phase, ONLOADED[phase]).get(name, frozenset())
    return tuple(part for part in PARTS if part in held)


def phases_of(config: TrainConfig) -> list[Phase]:
    """The phases that a step of this config has."""
    models = {"actor"} | ({"critic"} if config.has_critic_model else set())
    # A policy with adapters is scored once more without them: as much as score_policy.
    models |= {"reference"} if config.has_reference_model else set()
    phases = [phase for phase, worker in PHASES.items() if worker is None or worker in models]
    if not config.reads_policy_outputs and config.algorithm.update_gives_logprobs(
        config.samples, config.batch.prompts_per_step
    ):
        phases.remove("score_policy")
    return phases


# Bytes of a token. ExperienceBatch: token, rollout log-prob; old log-prob, entropy, value,
# advantage, return, shaped reward, importance, reference log-prob.
_BATCH_BYTES = 4 * 10
_PROBE_BYTES = 4 * 4  # of a weight of a probe, float32: weight, gradient, two moments
# Per token of the samples that a rank scores. Input: token, rollout log-prob; output: log-prob,
# entropy.
_SCORED_BYTES = 4 * 4
# Collected and sent by rank 0: token, rollout log-prob; in addition the text, about four characters
# per token.
_ROLLOUT_BYTES = 4 * 2
_SAMPLE_BYTES = 4 * 3
# A packed micro-batch: ids, labels, positions and response_index, int64.
_MICROBATCH_BYTES = 8 * 4
# What parts that stay leave free on every GPU: the model of memory errs by about so much where
# pipelines are deep.
HEADROOM = 5 * GIB
# During a weight sync: two buckets, and gathered parts of parameters above a bucket's size.
_BUCKETS = 2 + 1 / 8
_BUFFERS = "weight sync buffers"


@dataclass(frozen=True)
class Holding:
    """Memory of a GPU, or a node, at one time: bytes by name. The total is the sum of the parts."""

    phase: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Memory:
    """Memory of a run.

    Attributes:
        phases: for each phase the GPU that holds most.
        host: the node that holds most, at its fullest moment.
        engine: one server.
        stays: the parts of models that are on the GPUs in each phase.
        problems: a line for each thing that does not fit: samples, a phase, the cache, a node's
            memory.
        bucket: limit of a bucket of weights, in bytes.
    """

    phases: tuple[Holding, ...]
    host: Holding
    engine: PlannedEngine
    stays: Residency
    problems: tuple[str, ...]
    bucket: int

    @property
    def worst(self) -> Holding:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def plan_memory(run: PlannedRun) -> Memory:
    """Memory of every phase, and what does not fit."""
    engine = _engine(run)
    stays = residency(run, engine)
    phases = [fullest(run, phase, engine, stays) for phase in phases_of(run.config)]
    host = _host(run, engine)
    problems = tuple(_problems(run, engine, phases, host))
    sync = next(phase for phase in phases if phase.phase == "weight_sync")
    bucket = _bucket_limit(run, sync.total - sync.parts[_BUFFERS])
    return Memory(tuple(phases), host, engine, stays, problems, bucket)


def fullest(run: PlannedRun, phase: Phase, engine: PlannedEngine, stays: Residency) -> Holding:
    """The GPU that holds most in a phase."""
    holdings = [_device(run, phase, stages, engine, stays) for stages in ranks_of(run.models)]
    return max(holdings, key=lambda holding: holding.total)


def residency(run: PlannedRun, engine: PlannedEngine) -> Residency:
    """The parts of models that are on the GPUs in each phase of a step: what a phase needs, and
    what models with offload=auto have there before and after it, where there is room beside the
    engine and everything else on the fullest GPU.

    A part that stays from one phase that needs it to the next saves its way to host memory and
    back. What saves most bytes for the room that it takes stays first: the parts that would be away
    for the fewest phases, the largest of them before others; gradients, which are not copied, last.
    """
    phases = phases_of(run.config)
    stays: dict[Phase, dict[str, frozenset[Part]]] = {
        phase: dict(ONLOADED[phase]) for phase in phases
    }

    def weight(absence: tuple[str, Part, list[Phase]]) -> tuple[bool, int, float]:
        name, part, away = absence
        model = run.models[name]
        size = max(model.bytes_of(part, stage) for stage in range(model.layout.pp))
        return part == "gradients", len(away), -size

    for name, part, away in sorted(_absences(run.models, phases, stays), key=weight):
        kept = {
            phase: stays[phase] | {name: stays[phase].get(name, frozenset()) | {part}}
            for phase in away
        }
        limit = run.hardware.usable_memory - HEADROOM
        if all(fullest(run, phase, engine, kept).total <= limit for phase in away):
            stays |= kept
    return {phase: _with_base(parts) for phase, parts in stays.items()}


def _with_base(parts: dict[str, frozenset[Part]]) -> dict[str, frozenset[Part]]:
    """Weights that actor and critic share are counted as the actor's, and present for either."""
    shared = {part for name in ("actor", "critic") for part in parts.get(name, ())} & WEIGHTS
    return parts | {"base": frozenset(shared)}


def _absences(
    models: Mapping[str, PlannedModel],
    phases: Sequence[Phase],
    held: Mapping[Phase, Mapping[str, frozenset[Part]]],
) -> Iterator[tuple[str, Part, list[Phase]]]:
    """The runs of phases, around the step, in which a part of a model that may stay is not
    needed."""
    for name, model in models.items():
        if model.config.offload == "always":
            continue
        for part in PARTS:
            needs = [part in held[phase].get(name, ()) for phase in phases]
            for start, needed in enumerate(needs):
                if needed:
                    away = []
                    following = (start + 1) % len(phases)
                    while not needs[following]:
                        away.append(phases[following])
                        following = (following + 1) % len(phases)
                    if away:
                        yield name, part, away


def ranks_of(models: dict[str, PlannedModel]) -> list[dict[str, int]]:
    """The pipeline stages of every model on each kind of rank."""
    world = next(iter(models.values())).world
    step = math.gcd(*(world // model.layout.pp for model in models.values()))
    kinds = [
        tuple((name, model.stage(rank)) for name, model in models.items())
        for rank in range(0, world, step)
    ]
    return [dict(kind) for kind in dict.fromkeys(kinds)]


def _engine(run: PlannedRun) -> PlannedEngine:
    """The engine on the GPU that leaves it least."""
    config, models, hardware, actor = run.config, run.models, run.hardware, run.models["actor"]
    taken = 0.0
    if not config.rollout.external_urls:
        taken = hardware.trainer_overhead + max(
            sum(
                model.bytes_of(part, stages[name])
                for name, model in models.items()
                for part in on_device("rollout", name, model.config)
            )
            for stages in ranks_of(models)
        )
    return PlannedEngine(actor.spec, config.rollout, actor.width, hardware, taken)


def _device(
    run: PlannedRun,
    phase: Phase,
    stages: dict[str, int],
    engine: PlannedEngine,
    stays: Residency,
) -> Holding:
    config = run.config
    models = run.models
    hardware = run.hardware
    parts: dict[str, float] = {}
    for name, model in models.items():
        for part in on_device(phase, name, model.config, stays):
            parts[f"{name} {part}"] = model.bytes_of(part, stages[name])
    if config.has_probe:
        units = models["actor"].spec.hidden_size + 1 + config.algorithm.value_loss.outputs
        parts["probe"] = _PROBE_BYTES * (
            units * config.critic.probe.width + config.algorithm.value_loss.outputs
        )
    if "critic weights" in parts and "actor weights" not in parts:
        critic = models["critic"]
        stage = stages["critic"]
        unshared = replace(critic, shares_base=False).bytes_of("weights", stage)
        parts["base weights"] = unshared - critic.bytes_of("weights", stage)
    working = PHASES[phase]
    if working is not None:
        model = models[working]
        training = phase.startswith("update")
        stage = stages[working]
        tokens = float(model.config.max_tokens_per_microbatch)
        if training:
            # Tokens of an optimizer step on a rank, were every sample as long as the longest.
            longest = (
                math.ceil(minibatch_samples(config) / model.dp)
                * run.lengths.longest_sample
                / model.layout.cp
            )
            parts["activations kept"] = model.activations_kept(tokens, stage, longest)
        parts["activations in passing"] = model.activations_passing(tokens, training)
        parts["chunk of logits"] = model.logits(tokens, stage, training)
        if config.has_probe and phase == "score_policy":
            parts["hidden states in passing"] = 2 * tokens * model.spec.hidden_size * 4
    if not config.rollout.external_urls:
        onloaded = phase == "rollout"
        if onloaded or phase == "weight_sync":
            parts["engine weights"] = engine.weights
        if onloaded:
            parts["KV cache"] = engine.cache
        parts["engine workspace"] = engine.workspace if onloaded else hardware.engine_overhead
    parts["trainer beside tensors"] = hardware.trainer_overhead
    if phase == "weight_sync":
        # A parameter above a bucket's size is a bucket alone, a small model is one bucket. For
        # engines in FP8 its tensors are quantised, and packed into a third buffer.
        spec = models["actor"].spec
        width = models["actor"].width
        limit = _bucket_limit(run, sum(parts.values()))
        largest = max(limit, spec.vocab_size * spec.hidden_size * width)
        bucket = float(min(largest, spec.parameter_count() * width))
        parts[_BUFFERS] = (_BUCKETS + 2 * (config.rollout.quantization == "fp8")) * bucket
    return Holding(phase, {name: size for name, size in parts.items() if size})


def _bucket_limit(run: PlannedRun, held: float) -> int:
    """Bytes of a bucket of weights on a GPU that holds so much beside buckets."""
    rollout = run.config.rollout
    if rollout.external_urls:
        free = 0.0
    else:
        free = max(1.0, run.hardware.usable_memory - held)
    return rollout.sync.bucket_bytes(free)


def microbatches(run: PlannedRun, model: PlannedModel) -> int:
    """Micro-batches of one optimizer step on a rank, from the mean length."""
    samples = minibatch_samples(run.config)
    capacity = model.config.max_tokens_per_microbatch * model.layout.cp
    per_rank = math.ceil(samples / model.dp) * run.lengths.sample
    count = max(1, math.ceil(per_rank / capacity))
    if model.layout.vpp:
        multiple = model.layout.pp
    else:
        multiple = 1
    return -(-count // multiple) * multiple


def minibatch_samples(config: TrainConfig) -> int:
    """Samples of one optimizer step."""
    update = config.algorithm.update
    batch = config.batch
    size = update.size(config.samples, batch.prompts_per_step)
    return min(
        size * (batch.samples_per_prompt if update.minibatch_unit == "groups" else 1),
        config.samples,
    )


def _host(run: PlannedRun, engine: PlannedEngine) -> Holding:
    """The node of rank 0, while it holds a scored rollout and all models are offloaded.

    The record of value pretraining is no part of it: its files are mapped, and the kernel drops
    their pages where memory is short.
    """
    config = run.config
    models = run.models
    hardware = run.hardware
    lengths = run.lengths
    world = models["actor"].world
    ranks = min(hardware.gpus_per_node, world)
    tokens = config.samples * lengths.sample
    minibatch = minibatch_samples(config) * lengths.sample
    # Indices of the experts that the engines chose, in each layer.
    spec = models["actor"].spec
    width = models["actor"].width
    replay_bytes = spec.num_layers * spec.experts_per_token * (1 if spec.num_experts <= 256 else 2)
    replay_bytes *= config.rollout.router_replay
    computed = max(
        max(tokens * _SCORED_BYTES, minibatch * _BATCH_BYTES) / model.dp
        + (tokens * replay_bytes / model.dp if name == "actor" else 0)
        + model.config.max_tokens_per_microbatch * _MICROBATCH_BYTES
        for name, model in models.items()
    )
    offloaded = max(
        sum(
            model.bytes_of(part, stages[name])
            for name, model in models.items()
            for part in ("weights", "optimizer")
            if part not in on_device("rollout", name, model.config)
        )
        for stages in ranks_of(models)
    )
    parts = {
        # As a batch, and once more while it is sent.
        "rollout, on rank 0": 2 * tokens * (_ROLLOUT_BYTES + replay_bytes),
        "samples at home on the node": tokens * ranks / world * (_BATCH_BYTES + replay_bytes),
        "samples that models compute": ranks * computed,
        # Where they were computed, and at home.
        "hidden states": config.has_probe * 2 * tokens * ranks / world * spec.hidden_size * width,
        "samples, on rank 0": tokens * _SAMPLE_BYTES,
        "offloaded weights and optimizers": ranks * offloaded,
        "ranks and engines beside tensors": ranks * hardware.rank_memory,
    }
    if config.rollout.sync.only_changes:
        parts["weights as the engines have them"] = engine.weights * config.rollout.tp
    saved = {"actor", "critic"} | ({"reference"} if config.algorithm.saves_reference else set())
    copied = max(
        sum(model.bytes_saved(stages[name]) for name, model in models.items() if name in saved)
        for stages in ranks_of(models)
    )
    parts["copy of the state that is being saved"] = ranks * copied
    if config.cluster.restarts:
        # A new copy in /dev/shm, and the one before until that is whole; of several nodes each
        # keeps another's as well.
        parts["copies of the state for restarts"] = (2 if ranks == world else 4) * ranks * copied
    return Holding("host", {name: size for name, size in parts.items() if size})


def _problems(
    run: PlannedRun, engine: PlannedEngine, phases: list[Holding], host: Holding
) -> Iterator[str]:
    config, hardware, rollout = run.config, run.hardware, run.config.rollout
    longest = run.lengths.longest_sample
    usable = hardware.usable_memory
    for name, model in run.models.items():
        try:
            check_capacity(model.config, name, longest, "the longest sample")
        except BadInput as error:
            yield str(error)
    worst = max(phases, key=lambda phase: phase.total)
    if worst.total > usable:
        yield (
            f"{worst.phase} needs {worst.total / GIB:.1f} GiB on a GPU, {usable / GIB:.1f} GiB are "
            "usable"
        )
    if engine.cache_tokens < longest:
        yield (
            f"an engine of rollout.tp={rollout.tp} and "
            f"rollout.mem_fraction_static={rollout.mem_fraction_static:g} has a KV cache of "
            f"{max(0, engine.cache_tokens)} tokens, the longest sample has {longest}"
        )
    if host.total > hardware.node_memory:
        yield (
            f"a node needs {host.total / GIB:.0f} GiB of host memory, hardware.node_memory_gib "
            f"is {config.hardware.node_memory_gib:g}"
        )

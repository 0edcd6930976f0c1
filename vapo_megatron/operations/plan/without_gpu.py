"""Memory of a run on a machine without GPUs, where ranks and engines share the host's."""

import math
from dataclasses import replace

import psutil

from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.environment import cpu_cache_tokens
from vapo_megatron.megatron.offload import PARTS
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.operations.plan.inputs import GIB, Hardware, planned_lengths
from vapo_megatron.operations.plan.memory import Holding, minibatch_samples
from vapo_megatron.operations.plan.models import PlannedModel, planned_models
from vapo_megatron.operations.plan.rollout import PlannedEngine

# Libraries and buffers beside tensors, as measured on x86-64 with PyTorch 2.13: of the starter with
# its verifiers, of a rank, of an engine's processes.
_STARTER_BYTES = 0.4 * GIB
_RANK_BYTES = 0.8 * GIB
_ENGINE_BYTES = 1.0 * GIB


def host_memory(config: PlanConfig, ranks: int) -> Holding:
    """Memory of a run whose ranks and engines are all on this machine, in its fullest phase: bytes
    by name.

    Every rank computes at once, and engines keep their memory. Nothing is offloaded.

    Raises:
        BadInput: a model's config.json cannot be read, or a layout cannot be made of these ranks.
    """
    models = {
        name: replace(model, fused=False) for name, model in planned_models(config, ranks).items()
    }
    longest = planned_lengths(config).longest_sample
    parts = {
        f"{name} {part}": sum(model.bytes_of(part, model.stage(rank)) for rank in range(ranks))
        for name, model in models.items()
        for part in PARTS
    }
    parts["activations and logits"] = ranks * max(
        _working_bytes(config, model, longest) for model in models.values()
    )
    parts["programs beside tensors"] = _STARTER_BYTES + ranks * _RANK_BYTES
    if not config.rollout.external_urls:
        count = config.rollout.num_engines
        actor = models["actor"]
        hardware = Hardware(config.hardware)
        engine = PlannedEngine(actor.spec, config.rollout, actor.width, hardware, 0.0)
        tp = config.rollout.tp
        cache = cpu_cache_tokens(config.rollout) * engine.cache_bytes_per_token
        parts["engine weights"] = count * tp * engine.weights
        parts["KV caches"] = count * tp * cache
        # In shared memory, for all engines of the machine
        parts["weight sync buffer"] = min(config.rollout.sync.bucket_bytes(0), tp * engine.weights)
        parts["programs beside tensors"] += count * _ENGINE_BYTES
    return Holding("host", {name: size for name, size in parts.items() if size})


def _working_bytes(config: TrainConfig, model: PlannedModel, longest: int) -> float:
    """Of one rank, while it trains a micro-batch of the longest samples."""
    per_rank = math.ceil(minibatch_samples(config) / model.dp) * longest / model.layout.cp
    tokens = min(float(model.config.max_tokens_per_microbatch), per_rank)
    stage = model.layout.pp - 1
    return (
        model.activations_kept(tokens, stage, per_rank)
        + model.activations_passing(tokens, True)
        + model.logits(tokens, stage, True)
    )


def memory_shortage(config: PlanConfig) -> tuple[str, str] | None:
    """Why this machine's free memory may not suffice for a run without GPUs, and what to do; None
    where it does.

    Only float32 runs are looked at, which is how models are trained on CPUs.
    """
    if current_platform().is_cuda or config.model.dtype != "float32":
        return None
    ranks = config.cluster.ranks or max(config.model_sizes.values())
    needed = host_memory(config, ranks)
    available = psutil.virtual_memory().available
    if needed.total <= available:
        return None
    largest = sorted(needed.parts.items(), key=lambda part: -part[1])[:4]
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return (
        f"without GPUs the run may need {needed.total / GIB:.1f} GiB ({named}), "
        f"{available / GIB:.1f} are free on this machine",
        "lower cluster.ranks, rollout.num_engines, max_tokens_per_microbatch, "
        "rollout.max_running_requests or rollout.context_length, or end other programs",
    )

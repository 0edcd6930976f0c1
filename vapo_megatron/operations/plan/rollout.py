"""Seconds in which the engines of a run answer prompts: one engine, several of unequal load."""

import math

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.operations.plan.engines import PlannedEngine
from vapo_megatron.operations.plan.flops import forward_flops, matrix_parameters
from vapo_megatron.operations.plan.lengths import Lengths

# Points at which the batch of a decoding engine is looked at while its last responses run out.
_TAIL_POINTS = 128
# Of the variance of response lengths, what prompts account for: responses of one group are long together.
BETWEEN_PROMPTS = 0.5


def rollout_seconds(engine: PlannedEngine, engines: int, prompts: float, samples: float, lengths: Lengths) -> float:
    """Seconds until the last of `engines` has answered its share of prompts with `samples` responses in all."""
    own = samples / engines * imbalance(engines, prompts, samples, lengths)
    return _engine_seconds(engine, prompts / engines, own, lengths)


def imbalance(engines: int, prompts: float, samples: float, lengths: Lengths) -> float:
    """Tokens of the engine that has most, in units of the mean, where each gets as many prompts, whatever their length.

    The largest of n normal variables is about sqrt(2 ln n) standard deviations above their mean.
    """
    response = lengths.mean_square - lengths.prompt**2 - 2 * lengths.prompt * lengths.mean
    relative = max(0.0, response / lengths.mean**2 - 1)
    variance = relative * engines * (BETWEEN_PROMPTS / prompts + (1 - BETWEEN_PROMPTS) / samples)
    return 1 + math.sqrt(2 * math.log(engines) * variance)


def drawn_prompts(prompts: int, settings: DynamicSamplingConfig, informative_share: float) -> float:
    """Prompts that engines answer for a step of so many informative groups (engines/ledger.py).

    At first oversampling times as many are in flight; what is too much is aborted, and counted here as if it were not.
    """
    if not settings.enabled:
        return prompts
    first = settings.oversampling * prompts
    return min(settings.max_rounds * first, max(first, prompts / informative_share))


def _engine_seconds(engine: PlannedEngine, prompts: float, samples: float, lengths: Lengths) -> float:
    """Seconds in which one engine answers: prompts are read once, then responses run, as many as the cache holds.

    While responses wait the batch is full; the last ones run out as their lengths are distributed. An engine without
    room for a single one, with which no plan fits, is counted as if it had that.
    """
    at_once = min(samples, max(1.0, engine.at_once(lengths.prompt + lengths.mean / 2)))
    prefill = prompts * prefill_seconds(engine, lengths.prompt)
    waiting = (samples - at_once) * lengths.mean
    full = waiting / at_once * decode_seconds(engine, at_once, lengths.prompt + lengths.mean / 2)
    width = lengths.longest / _TAIL_POINTS
    tail = 0.0
    for point in range(_TAIL_POINTS):
        produced = (point + 0.5) * width
        running = max(1.0, at_once * lengths.still_running(produced))
        tail += width * decode_seconds(engine, running, lengths.prompt + produced)
    return (prefill + full + tail) / reached_speed(engine)


def reached_speed(engine: PlannedEngine) -> float:
    """Of an engine, in units of that of one without batch-invariant kernels."""
    return engine.hardware.efficiency.deterministic if engine.deterministic else 1.0


def prefill_seconds(engine: PlannedEngine, tokens: float) -> float:
    """Seconds in which an engine reads one sequence."""
    flops = forward_flops(engine.spec, "lm", tokens, tokens**2, 1).total
    return flops / (_rate(engine) * engine.config.tp)


def _rate(engine: PlannedEngine) -> float:
    """Operations a second of an engine's matrix products."""
    efficiency = engine.hardware.efficiency
    return engine.hardware.bf16 * efficiency.linear * (efficiency.fp8_gain if engine.quantised else 1.0)


def decode_seconds(engine: PlannedEngine, batch: float, context: float) -> float:
    """Seconds of one decoding step: weights and cache are read, and each token goes through the weights."""
    spec, tp, hardware = engine.spec, engine.config.tp, engine.hardware
    efficiency = hardware.efficiency
    layers, head = float(matrix_parameters(spec)), float(spec.vocab_size * spec.hidden_size)
    active = layers + head
    if spec.num_experts:
        # Experts that at least one token of the batch is routed to are read.
        hit = 1 - (1 - spec.experts_per_token / spec.num_experts) ** batch
        experts = spec.parameter_count() - spec.active_parameter_count()
        chosen = experts * spec.experts_per_token / (spec.num_experts - spec.experts_per_token or 1)
        layers += hit * (experts + chosen) - chosen
    weights = (layers + engine.copied) * engine.layer_width + head * engine.width
    requests = batch / engine.config.attention_parts
    moved = weights / tp + requests * context * engine.cache_bytes_per_token
    memory = moved / (hardware.memory_rate * efficiency.memory)
    compute = 2 * active * batch / (tp * _rate(engine))
    # Two sums over the GPUs of a server in every layer.
    sums = 4 * spec.num_layers * batch * spec.hidden_size * engine.width * (tp - 1) / tp / hardware.link(tp)
    return max(memory, compute) + sums + efficiency.decode_overhead

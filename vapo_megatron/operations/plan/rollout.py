"""The engines of a run: their GPU memory, the responses that they generate concurrently, and their
time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.model import LayoutConfig, RecomputeConfig
from vapo_megatron.config.plan import PlannedRunConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.models.layers import AttentionKind, DeltaNet
from vapo_megatron.models.rules import Rule
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.operations.plan.inputs import Hardware, Lengths

# SGLang's prefill takes the prompts in pieces of at most this many tokens (its chunked_prefill_size
# on such GPUs).
_PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class PlannedEngine:
    """One server on `config.tp` GPUs. width: bytes of a cache entry and of a weight that is not
    quantised; taken: bytes of a GPU that the offloaded trainer keeps while the engine starts."""

    spec: ModelSpec
    config: RolloutConfig
    width: int
    hardware: Hardware
    taken: float

    @property
    def weights(self) -> float:
        """Bytes of weights on each of its GPUs; embedding and head are cut like the rest."""
        table = self.spec.vocab_size * self.spec.hidden_size
        outside = table * (1 if self.spec.tied else 2)
        layers = self.spec.parameter_count() - outside
        return (layers * self.layer_width + outside * self.width) / self.config.tp

    @property
    def layer_width(self) -> float:
        """Bytes of a weight of the layers; in FP8 a block of 128 x 128 has a scale of four
        bytes."""
        if self.config.quantization == "fp8":
            return 1 + 4 / 128**2
        return float(self.width)

    @cached_property
    def cache_bytes_per_token(self) -> float:
        """Bytes of what attention keeps of one token on each GPU that has it."""
        channels = sum(
            layer.attention.cached_size(self.config.tp)
            for layer in self.spec.layers
            if not isinstance(layer.attention, DeltaNet)
        )
        return channels * self.width

    @property
    def states(self) -> float:
        """Bytes of the states of delta nets on each GPU, float32, one for each request that runs,
        and what their convolutions still see."""
        numbers = 0.0
        for layer in self.spec.layers:
            if isinstance(layer.attention, DeltaNet):
                net = layer.attention
                seen = (net.kernel - 1) * net.mixed_size
                numbers += 4.0 * net.state_size + seen * self.width
        return self.config.max_running_requests * numbers / self.config.tp

    @property
    def cache_tokens(self) -> int:
        """Tokens that its KV cache holds; 0 or less where the weights alone do not fit. Weights and
        cache together get mem_fraction_static of the memory free at the engine's start."""
        static = self.config.mem_fraction_static * max(
            0.0, self.hardware.device_memory - self.taken
        )
        tokens = int((static - self.weights - self.states) / self.cache_bytes_per_token)
        limit = self.config.max_total_tokens
        if limit is None:
            return tokens
        return min(tokens, limit)

    @property
    def cache(self) -> float:
        """Bytes of the KV cache on each GPU."""
        return max(0, self.cache_tokens) * self.cache_bytes_per_token + self.states

    @property
    def workspace(self) -> float:
        """Bytes of a GPU beside weights and cache: context and graphs, a piece of prefill, the
        logits of a batch."""
        spec = self.spec
        tp = self.config.tp
        widest = max(
            3 * layer.mlp.active_size + 2 * _queries(layer.attention) for layer in spec.kinds
        )
        prefill = _PREFILL_TOKENS * (4 * spec.hidden_size + widest / tp) * self.width
        logits = 2 * 4 * self.config.max_running_requests * spec.vocab_size
        return self.hardware.engine_overhead + prefill + logits

    def at_once(self, tokens: float) -> float:
        """Responses generated together where each takes this many tokens of the cache on
        average."""
        return max(0.0, min(self.config.max_running_requests, self.cache_tokens / tokens))


def _queries(attention: AttentionKind) -> int:
    """Width of a token's queries, or of what a delta net mixes."""
    return attention.mixed_size if isinstance(attention, DeltaNet) else attention.query_size


@dataclass(frozen=True)
class Flops:
    """Operations of a forward pass over some tokens, by purpose."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.linear + self.attention + self.head


@cache
def matrix_parameters(spec: ModelSpec, part: str = "") -> int:
    """Weights of all layers that a token is multiplied with, of the experts those it is routed to.

    Embedding, head, biases and norms are not among them. part: how Megatron's names of a part of
    the layers begin; experts begin with "mlp.".
    """

    def matrices(rules: Iterable[Rule]) -> int:
        return sum(
            math.prod(shape) for rule in rules for shape in rule.hf_shapes() if len(shape) > 1
        )

    total = 0
    for layer, count in spec.kinds.items():
        shared = matrices(rule for rule in layer.rules if rule.megatron.startswith(part))
        experts = spec.experts_per_token * matrices(layer.expert_rules)
        total += count * (shared + experts)
    return total


def forward_flops(
    spec: ModelSpec, head: Head, tokens: float, squares: float, head_tokens: float
) -> Flops:
    """One forward pass.

    Args:
        spec: the model.
        head: "lm" computes logits, "value" n numbers a token.
        tokens: of all sequences together.
        squares: sum over sequences of their squared tokens; a causal token attends to half of its
            sequence.
        head_tokens: positions that the head is computed for.
    """
    if head == "lm":
        outputs = spec.vocab_size
    else:
        outputs = spec.value_outputs
    return Flops(
        linear=2.0 * matrix_parameters(spec) * tokens,
        # Scores and weighted values, 2 * n^2 * query_size operations each, of which causality
        # leaves half.
        attention=2.0 * spec.attention_width * squares,
        head=2.0 * spec.hidden_size * outputs * head_tokens,
    )


def training_flops(
    spec: ModelSpec, forward: Flops, layout: LayoutConfig, recompute: RecomputeConfig
) -> Flops:
    """Operations of forward and backward pass, recomputation included.

    Backward costs twice the forward pass; the fused attention kernels compute the scores once more
    (Dao 2023, FlashAttention-2, section 3.1: 2.5), and the head computes its logits again.
    """
    # Computed again
    linear = recompute.granularity == "full"
    attention = recompute.granularity != "none"
    return Flops(
        forward.linear * (3 + linear), forward.attention * (3.5 + attention), forward.head * 4
    )


# Seconds until a sum over GPUs of one node begins to move bytes; an assumption.
_SUM_SECONDS = 1e-5
# Points at which the batch of a decoding engine is looked at while its last responses run out.
_TAIL_POINTS = 128
# Share of the variance of response lengths due to prompts: responses of one group are long
# together.
BETWEEN_PROMPTS = 0.5


def rollout_seconds(
    engine: PlannedEngine,
    engines: int,
    prompts: float,
    samples: float,
    lengths: Lengths,
    episode: PlannedRunConfig,
) -> float:
    """Seconds until the last of `engines` has answered its share of prompts with `samples`
    responses in all.

    Prompts are read once, then responses run, as many as the cache holds. While responses wait the
    batch is full; the last ones run out as their lengths are distributed. An episode that waits for
    a tool leaves its place to others: the wait adds time only where it is longer than theirs for a
    place. An engine without room for a single response, with which no plan fits, is counted as if
    it had that.
    """
    prompts, samples = (
        prompts / engines,
        samples / engines * imbalance(engines, prompts, samples, lengths),
    )
    at_once = min(samples, max(1.0, engine.at_once(lengths.running)))
    prefill = prompts * prefill_seconds(engine, lengths.prompt)
    waiting = (samples - at_once) * lengths.mean
    full = waiting / at_once * decode_seconds(engine, at_once, lengths.running)
    width = lengths.longest / _TAIL_POINTS
    tail = 0.0
    for point in range(_TAIL_POINTS):
        produced = (point + 0.5) * width
        running = max(1.0, at_once * lengths.still_running(produced))
        tail += width * decode_seconds(engine, running, lengths.prompt + produced)
    return (
        prefill
        + full
        + tail
        + (episode.turns - 1) * max(0.0, episode.tool_seconds - full / episode.turns)
    )


def imbalance(engines: int, prompts: float, samples: float, lengths: Lengths) -> float:
    """Tokens of the engine that has most, in units of the mean, where each gets as many prompts,
    whatever their length.

    The largest of n normal variables is about sqrt(2 ln n) standard deviations above their mean.
    """
    response = lengths.mean_square - lengths.prompt**2 - 2 * lengths.prompt * lengths.mean
    relative = max(0.0, response / lengths.mean**2 - 1)
    variance = relative * engines * (BETWEEN_PROMPTS / prompts + (1 - BETWEEN_PROMPTS) / samples)
    return 1 + math.sqrt(2 * math.log(engines) * variance)


def drawn_prompts(prompts: int, settings: DynamicSamplingConfig, informative_share: float) -> float:
    """Prompts that engines answer for a step of so many informative groups (rollout/ledger.py).

    At first oversampling times as many are in flight; the surplus is aborted, but counted here as
    if it were not.
    """
    if not settings.enabled:
        return prompts
    first = settings.oversampling * prompts
    return min((settings.max_rounds or 1) * first, max(first, prompts / informative_share))


def prefill_seconds(engine: PlannedEngine, tokens: float) -> float:
    """Seconds in which an engine reads one sequence."""
    flops = forward_flops(engine.spec, "lm", tokens, tokens**2, 1).total
    return flops / (_rate(engine) * engine.config.tp)


def _rate(engine: PlannedEngine) -> float:
    """Operations a second of an engine's matrix products."""
    efficiency = engine.hardware.efficiency
    if engine.config.quantization == "fp8":
        gain = efficiency.fp8_gain
    else:
        gain = 1.0
    return engine.hardware.bf16 * efficiency.linear * gain


def decode_seconds(engine: PlannedEngine, batch: float, context: float) -> float:
    """Seconds of one decoding step: weights and cache are read, and each token goes through the
    weights."""
    spec = engine.spec
    tp = engine.config.tp
    hardware = engine.hardware
    efficiency = hardware.efficiency
    layers = float(matrix_parameters(spec))
    head = float(spec.vocab_size * spec.hidden_size)
    active = layers + head
    if spec.num_experts:
        # Experts that at least one token of the batch is routed to are read.
        hit = 1 - (1 - spec.experts_per_token / spec.num_experts) ** batch
        experts = spec.parameter_count() - spec.active_parameter_count()
        chosen = experts * spec.experts_per_token / (spec.num_experts - spec.experts_per_token or 1)
        layers += hit * (experts + chosen) - chosen
    weights = layers * engine.layer_width + head * engine.width
    rate = hardware.memory_rate * efficiency.memory
    # Linear layers wait for their weights or their products, attention for the cache, one after the
    # other.
    linear = max(weights / tp / rate, 2 * active * batch / (tp * _rate(engine)))
    cache = batch * context * engine.cache_bytes_per_token / rate
    # Two sums over the GPUs of a server in every layer.
    sums = (
        4
        * spec.num_layers
        * batch
        * spec.hidden_size
        * engine.width
        * (tp - 1)
        / tp
        / hardware.link(tp)
    )
    sums += 2 * spec.num_layers * _SUM_SECONDS * (tp > 1)
    return linear + cache + sums + efficiency.decode_overhead + batch * efficiency.request_overhead

"""The models of a run as a plan sees them: shapes, layouts, bytes of weights, states and activations.

Activations are those that forward keeps for backward, and temporary ones. PyTorch's layers (model.attention=sdpa) are
measured in tests/operations/test_plan_memory.py; those of Transformer Engine follow from the tensors that its fused
modules save.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from vapo_megatron.checkpoint.manifest import OPTIMIZER_BYTES
from vapo_megatron.config.model import AdapterConfig, LayoutConfig, TrainableConfig, logits_rows
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.mesh import check_layout, check_model_layout
from vapo_megatron.megatron.offload import Part
from vapo_megatron.operations.plan.inputs import Hardware, Lengths, model_directory
from vapo_megatron.weights.adapters import adapter_entries, check_adapter
from vapo_megatron.weights.families import EMBEDDING, FINAL_NORM
from vapo_megatron.weights.rules import Rule
from vapo_megatron.weights.spec import Head, ModelSpec, read_spec


@dataclass(frozen=True)
class Shard:
    """Parameters of a rank of one pipeline stage, padding rows of the vocabulary and a tied head's copy included.

    Attributes:
        dense: those that all data- and context-parallel ranks hold alike.
        expert: those of experts, which the ranks of the stage share out.
    """

    dense: int
    expert: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense + self.expert


@cache
def shard(spec: ModelSpec, head: Head, layout: LayoutConfig, stage: int) -> Shard:
    """The shard on a rank of pipeline stage `stage`, for a layout that divides the model."""
    layers = _layers(spec, layout, stage)
    outside: list[Rule] = []
    if stage == layout.pp - 1:
        outside += [FINAL_NORM, *spec.head_rules(head)]
    # Megatron keeps a copy of a tied embedding where the head is not on the embedding's rank.
    if stage == 0 or (outside and head == "lm" and spec.tied):
        outside.append(EMBEDDING)
    dense = len(layers) * _held(spec.table.layer, spec, layout.tp)
    experts = len(layers) * (spec.num_experts // layout.ep) * _held(spec.table.expert, spec, layout.tp)
    return Shard(dense + _held(outside, spec, layout.tp), experts)


@cache
def adapter_shard(spec: ModelSpec, head: Head, layout: LayoutConfig, stage: int, config: AdapterConfig) -> Shard:
    """The trained part of such a shard in a model with adapters: these, and a critic's head."""
    layers = _layers(spec, layout, stage)
    halves = adapter_entries(replace(spec, num_layers=1, num_experts=min(1, spec.num_experts)), config)
    dense = len(layers) * _held((half.rule for half in halves if half.expert is None), spec, layout.tp)
    expert = _held((half.rule for half in halves if half.expert is not None), spec, layout.tp)
    outside = spec.head_rules(head) if head == "value" and stage == layout.pp - 1 else ()
    experts = len(layers) * (spec.num_experts // layout.ep) * expert
    return Shard(dense + _held(outside, spec, layout.tp), experts)


def _layers(spec: ModelSpec, layout: LayoutConfig, stage: int) -> list[int]:
    chunks = layout.pp * (layout.vpp or 1)
    return [layer for layer in range(spec.num_layers) if layer * chunks // spec.num_layers % layout.pp == stage]


def _held(rules: Iterable[Rule], spec: ModelSpec, tp_size: int) -> int:
    return sum(math.prod(rule.shard_shape(spec, tp_size)) for rule in rules)


# Experts do not get equally many tokens: the rank with most of them is taken to get this multiple of the mean.
EXPERT_IMBALANCE = 1.5


@dataclass(frozen=True)
class PlannedModel:
    """One model over all ranks.

    Attributes:
        name: "actor", "critic" or "reference".
        spec, head: what it is.
        config: the section it is built from.
        world: ranks of the run.
        width: bytes of a weight and of an activation's element.
        fused: whether layers are Transformer Engine's.
        adapter: the adapters that are trained in place of the model; None where all of it is.
        shares_base: whether its frozen weights are the actor's, and are counted there.
    """

    name: str
    spec: ModelSpec
    head: Head
    config: TrainableConfig
    world: int
    width: int
    fused: bool
    adapter: AdapterConfig | None = None
    shares_base: bool = False

    @property
    def layout(self) -> LayoutConfig:
        """Its layout."""
        return self.config.layout

    @property
    def dp(self) -> int:
        """Replicas, each of which takes a part of the samples."""
        return self.world // self.layout.model_size

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank: stages are runs of consecutive ranks (megatron/mesh.py)."""
        return rank // (self.world // self.layout.pp)

    def shard(self, stage: int) -> Shard:
        """Parameters of a rank, adapters aside."""
        return shard(self.spec, self.head, self.layout, stage)

    def trained(self, stage: int) -> Shard:
        """Parameters of a rank that have gradients and optimizer states, and are saved."""
        if self.adapter is None:
            return self.shard(stage)
        return adapter_shard(self.spec, self.head, self.layout, stage, self.adapter)

    def bytes_of(self, part: Part, stage: int) -> float:
        """Bytes that a rank of a stage holds of one part while it is onloaded."""
        held = self.trained(stage)
        if part == "weights" and self.shares_base:
            return float(held.parameters * self.width)
        if part == "weights":
            # Transformer Engine keeps each matrix in FP8 by rows and by columns, over the micro-batches of a step.
            width = self.width + (0 if self.config.precision.fp8 == "none" else 2)
            adapters = 0
            if self.adapter is not None:
                adapters = adapter_shard(self.spec, "lm", self.layout, stage, self.adapter).parameters
            return float(self.shard(stage).parameters * width + adapters * self.width)
        if self.name == "reference":
            return 0.0
        if part == "gradients":
            return held.parameters * 4.0
        # Adam's two moments in fp32, and the fp32 weights where the model's own are narrower.
        state = 8.0 if self.width == 4 else 12.0
        return state * self._share(held)

    def bytes_saved(self, stage: int) -> float:
        """Bytes of a saved unit that a rank of a stage copies and writes: its share of what it and its replicas hold.

        A unit has fp32 weights and both moments of every parameter that is trained, whatever the optimizer keeps.
        """
        return (self.width + (0 if self.name == "reference" else OPTIMIZER_BYTES)) * self._share(self.trained(stage))

    def _share(self, held: Shard) -> float:
        """Parameters of a rank, shared out among the ranks that hold the same ones."""
        layout = self.layout
        return held.dense / (self.dp * layout.cp) + held.expert / (self.world // (layout.pp * layout.ep))

    @property
    def _cut(self) -> int:
        """Over how many ranks the sequence outside the tensor-parallel parts is cut."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    @property
    def _hidden(self) -> float:
        """Elements of a token's hidden state on this rank."""
        return self.spec.hidden_size / self._cut

    def layer(self) -> float:
        """Bytes that one layer keeps for a token, nothing computed again."""
        return self._norms() + self._attention(inputs_only=False) + self._mlp()

    def _norms(self) -> float:
        """Bytes per token of a layer's two norms and of their outputs, which the linear layers after them keep."""
        return 2 * (self._norm() + self._hidden * self.width)

    def _norm(self) -> float:
        """Bytes per token that a norm keeps: its input, fp32 statistics; PyTorch's in fp32 and the quotient as well."""
        kept = self._hidden * self.width if self.fused else 2 * self._hidden * 4
        return kept + 4 / self._cut

    def _attention(self, inputs_only: bool) -> float:
        spec, tp, fused = self.spec, self.layout.tp, self.fused
        query, kv = spec.query_size / tp, spec.kv_size / tp
        # Without Transformer Engine keys and values are gathered along the context: of the 2 * cp chunks of a sequence
        # a rank's two queries see cp + 1/2 times what it holds.
        seen = 1 if fused or self.layout.cp == 1 else self.layout.cp + 0.5
        kept = 2 * query + 2 * kv
        if not fused:
            kept += 0 if inputs_only else query + 2 * kv * (seen - 1)
        statistics = 0.0 if inputs_only else 4 * spec.num_heads / tp + (0 if fused else 25)
        if spec.qk_norm:
            if fused:
                kept += query + 2 * kv
            else:
                # In fp32 the input is a view of what the projection gave, all of which then stays; else a copy.
                statistics += 4 * ((3 * query + 3 * kv) if self.width == 4 else (2 * query + 2 * kv))
            statistics += 4 * (spec.num_heads + spec.num_kv_heads) / tp
        return kept * self.width + statistics

    def _mlp(self) -> float:
        spec = self.spec
        # Gate and up, their product; without Transformer Engine the activated gate as well.
        columns = 3 if self.fused else 4
        if not spec.num_experts:
            return columns * spec.ffn_size / self.layout.tp * self.width
        routed = spec.experts_per_token * EXPERT_IMBALANCE / self._cut
        # Inputs of the experts and their activations, weighted before the second product so that outputs are not
        # kept (Megatron-Core's experts.py); the router is float32.
        expert = routed * (columns * spec.expert_ffn_size + spec.hidden_size) * self.width
        return expert + 3 * 4 * spec.num_experts / self._cut

    def activations_kept(self, tokens: float, stage: int, step_tokens: float) -> float:
        """Bytes that forward passes keep for backward at the fullest moment of a pipeline stage's schedule.

        Args:
            tokens: of one micro-batch on this rank (of a context-parallel group, its part).
            stage: pipeline stage.
            step_tokens: of all micro-batches of one optimizer step on this rank, at most.
        """
        layout = self.layout
        chunks = layout.vpp or 1
        per_chunk = self.spec.num_layers // layout.pp // chunks
        if layout.vpp:
            # Megatron's interleaved schedule: warm-up passes of single chunks, and the one that turns round.
            warm = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
        else:
            warm = layout.pp - stage
        in_flight = min(warm * tokens, max(tokens, step_tokens) * chunks)
        kept, once = self._kept_by_chunk(per_chunk)
        return in_flight * kept + tokens * (once + (self._head_kept() if stage == layout.pp - 1 else 0))

    def _kept_by_chunk(self, layers: int) -> tuple[float, float]:
        """Bytes per token: of every pass in flight, and of what is being computed again."""
        recompute, state = self.config.recompute, self._hidden * self.width
        if recompute.granularity == "none":
            return layers * self.layer(), 0.0
        if recompute.granularity == "selective":
            return layers * (self._norms() + self._attention(inputs_only=True) + self._mlp()), 0.0
        block = min(recompute.layers, layers)
        return -(-layers // block) * state, block * self.layer()

    def _head_kept(self) -> float:
        """Bytes per token of the final norm and the head's own inputs."""
        norm = self._norm()
        if self.head == "value":
            return norm + 4 * self._hidden + 4 * self.spec.value_outputs
        return norm + self.spec.hidden_size * self.width + 32

    def activations_passing(self, tokens: float, training: bool) -> float:
        """Bytes needed for a moment in one layer: its widest outputs and, in training, their gradients."""
        spec, tp = self.spec, self.layout.tp
        attention = (2 * spec.query_size + 2 * spec.kv_size) / tp
        if spec.num_experts:
            routed = spec.experts_per_token * EXPERT_IMBALANCE / self._cut
            mlp = routed * (3 * spec.expert_ffn_size + 2 * spec.hidden_size)
        else:
            mlp = 3 * spec.ffn_size / tp
        widest = max(mlp, attention) + 2 * spec.hidden_size
        return tokens * widest * self.width * (2 if training else 1)

    def logits(self, tokens: float, stage: int, training: bool) -> float:
        """Bytes of a micro-batch's largest chunk of logits and what is computed of it; with gradients also those of the
        head's weight."""
        if self.head != "lm" or stage != self.layout.pp - 1:
            return 0.0
        words = self.spec.vocab_shard_size(self.layout.tp)
        # fp32 logits and their exponentials, and a copy in the weights' own type.
        rows = min(logits_rows(words), tokens) * words * (4 + 4 + self.width)
        # The weight's gradient is summed in fp32 over chunks, beside one chunk's part or the result in its own type.
        return rows + (words * self.spec.hidden_size * (4 + self.width) if training else 0)


@dataclass(frozen=True)
class PlannedRun:
    """A run as its memory and time are worked out from it: models by name, lengths of samples, hardware."""

    config: PlanConfig
    models: dict[str, PlannedModel]
    hardware: Hardware
    lengths: Lengths

    @property
    def engines(self) -> int:
        """Servers: those elsewhere, or as many as the run's GPUs hold."""
        return len(self.config.rollout.external_urls) or self.models["actor"].world // self.config.rollout.tp


def planned_models(config: TrainConfig, world: int) -> dict[str, PlannedModel]:
    """Actor, critic and reference, those that the algorithm has, by name; an actor with adapters is its own reference.

    Raises:
        BadInput: config.json cannot be read, or a layout cannot be made of these ranks and this model.
    """
    models = {}
    for name, (_, source) in config.sources.items():
        section = config.trainable(name)
        head: Head = "value" if name == "critic" else "lm"
        spec = read_spec(model_directory(str(source)), value_outputs=config.algorithm.value_loss.outputs)
        width = 4 if config.model.dtype == "float32" else 2
        adapter = config.model.adapter if section.kind == "adapter" else None
        fused, shares = config.model.attention != "sdpa", name == "critic" and config.shares_base
        models[name] = PlannedModel(name, spec, head, section, world, width, fused, adapter, shares)
        check_layout(section.layout, world, name)
        check_model_layout(spec, section.layout, name)
        check_adapter(spec, config.model.adapter, section, name)
    return models


def can_be_cut(spec: ModelSpec, layout: LayoutConfig, world: int) -> bool:
    """Whether a model can be laid out over these ranks in this way."""
    try:
        check_layout(layout, world, "")
        check_model_layout(spec, layout, "")
    except BadInput:
        return False
    return True

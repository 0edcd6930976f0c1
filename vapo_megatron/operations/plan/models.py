"""The models of a run as a plan sees them: shapes, layouts, bytes of weights, states and
activations.

Activations include the tensors that forward keeps for backward, and temporary ones. PyTorch's
layers (model.attention=sdpa) are measured in tests/operations/test_plan_memory.py; for Transformer
Engine, the tensors that its fused modules save are counted.
"""

from dataclasses import dataclass

from vapo_megatron.checkpoint.manifest import OPTIMIZER_BYTES
from vapo_megatron.config.model import AdapterConfig, LayoutConfig, TrainableConfig, logits_rows
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.mesh import check_layout, check_model_layout, stage_pieces
from vapo_megatron.megatron.offload import Part
from vapo_megatron.models.layers import (
    SINK_CHANNELS,
    DeltaNet,
    Experts,
    LatentAttention,
    Layer,
    SelfAttention,
)
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.operations.plan.inputs import Hardware, Lengths, model_directory
from vapo_megatron.operations.plan.shards import Shard, adapter_shard, layers_of, shard
from vapo_megatron.weights.adapters import check_adapter

# Experts do not get equally many tokens: the rank with most of them is taken to get this multiple
# of the mean.
EXPERT_IMBALANCE = 1.5


@dataclass(frozen=True)
class PlannedModel:
    """One model over all ranks.

    Attributes:
        name: "actor", "critic" or "reference".
        spec, head: its architecture.
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

    @property
    def longest_stage(self) -> int:
        """Layers of the pipeline stage with most of them, for which the others wait."""
        return max(
            layers_of(self.spec, self.layout, stage).total() for stage in range(self.layout.pp)
        )

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
            # Transformer Engine keeps each matrix in FP8 by rows and by columns, over the
            # micro-batches of a step.
            width = self.width + (0 if self.config.precision.fp8 == "none" else 2)
            adapters = 0
            if self.adapter is not None:
                adapters = adapter_shard(
                    self.spec, "lm", self.layout, stage, self.adapter
                ).parameters
            return float(self.shard(stage).parameters * width + adapters * self.width)
        if self.name == "reference":
            return 0.0
        if part == "gradients":
            return held.parameters * 4.0
        # Adam's two moments in fp32, and the fp32 weights where the model's own are narrower.
        state = 8.0 if self.width == 4 else 12.0
        return state * self._share(held)

    def bytes_saved(self, stage: int) -> float:
        """Bytes of a saved unit that a rank of a stage copies and writes: its share of the tensors
        that it and its replicas hold.

        A unit has fp32 weights and both moments of every parameter that is trained, whatever the
        optimizer keeps.
        """
        return (self.width + (0 if self.name == "reference" else OPTIMIZER_BYTES)) * self._share(
            self.trained(stage)
        )

    def _share(self, held: Shard) -> float:
        """Parameters of a rank, shared out among the ranks that hold the same ones."""
        layout = self.layout
        return held.dense / (self.dp * layout.cp) + held.expert / (
            self.world // (layout.pp * layout.ep)
        )

    @property
    def _cut(self) -> int:
        """Over how many ranks the sequence outside the tensor-parallel parts is cut."""
        if self.layout.sequence_parallel:
            return self.layout.tp
        return 1

    @property
    def _hidden(self) -> float:
        """Elements of a token's hidden state on this rank."""
        return self.spec.hidden_size / self._cut

    def layer(self, layer: Layer, inputs_only: bool = False) -> float:
        """Bytes that a layer keeps for a token; with inputs_only its attention is computed
        again."""
        attention = layer.attention
        if isinstance(attention, DeltaNet):
            kept = self._delta_net(attention)
        elif isinstance(attention, LatentAttention):
            kept = self._latent_attention(attention, inputs_only)
        else:
            kept = self._attention(attention, inputs_only)
        return self._norms(layer) + kept + self._mlp(layer)

    def _norms(self, layer: Layer) -> float:
        """Bytes per token of a layer's norms and of their outputs, which are kept by what comes
        after them."""
        norms = 2 * (layer.norm_before + layer.norm_after)
        return norms * self._norm() + 2 * self._hidden * self.width

    def _norm(self) -> float:
        """Bytes per token that a norm keeps: its input, fp32 statistics; PyTorch's in fp32 and the
        quotient as well."""
        if self.fused:
            kept = self._hidden * self.width
        else:
            kept = 2 * self._hidden * 4
        return kept + 4 / self._cut

    def _attention(self, attention: SelfAttention, inputs_only: bool) -> float:
        tp = self.layout.tp
        fused = self.fused
        query = attention.query_size / tp
        kv = attention.kv_size / tp
        # Without Transformer Engine keys and values are gathered along the context: a rank's two of
        # the 2 * cp query chunks of a sequence see cp + 1/2 times the keys that it holds.
        seen = 1 if fused or self.layout.cp == 1 else self.layout.cp + 0.5
        kept = 2 * query + 2 * kv
        if not fused:
            kept += 0 if inputs_only else query + 2 * kv * (seen - 1)
        if attention.sinks:  # channels of queries, keys, values and outputs
            heads = attention.num_heads + attention.num_kv_heads
            kept += 2 * SINK_CHANNELS * heads / tp
        if inputs_only:
            statistics = 0.0
        else:
            statistics = 4 * attention.num_heads / tp + (0 if fused else 25)
        if attention.qk_norm:
            if fused:
                kept += query + 2 * kv
            else:
                # In fp32 the input is a view of what the projection gave, all of which then stays;
                # else a copy.
                statistics += 4 * (
                    (3 * query + 3 * kv) if self.width == 4 else (2 * query + 2 * kv)
                )
            statistics += 4 * (attention.num_heads + attention.num_kv_heads) / tp
        return kept * self.width + statistics

    def _delta_net(self, net: DeltaNet) -> float:
        """Convolution and rule are computed again from their inputs (megatron/delta_net.py). Kept
        are the projections, these inputs beside them, and what the norm and its gate keep."""
        tp = self.layout.tp
        inputs = (net.mixed_size + 2 * net.value_heads) / tp
        projected = (net.mixed_size + net.value_size) / tp
        values = net.value_size / tp
        # In fp32 the norm's input and the gate, which in fp32 are no copies; the gate's silu.
        norm = (1 if self.width == 4 else 3) * 4 * values + 4 * net.value_heads / tp
        return (inputs + projected + 3 * values) * self.width + norm + 4 * values

    def _latent_attention(self, attention: LatentAttention, inputs_only: bool) -> float:
        """Of attention on local layers: no other runs."""
        tp = self.layout.tp
        heads = attention.num_heads / tp
        key = attention.head_dim
        value = attention.value_dim
        # Values are part of what the narrow vector is expanded to, all of which then stays.
        channels: float = 2 * key + attention.plain_dim + value
        statistics = 0.0
        if not inputs_only:
            width = max(key, value)
            # Queries, keys, values and outputs of one width, of which values are copies.
            channels = 4 * width
            statistics = 4 * heads + 25
            if self.layout.cp > 1:
                channels += (self.layout.cp - 0.5) * 2 * width
        # Norms of the narrow vectors, as _norm() has it, and their outputs.
        narrow = (attention.query_rank or 0) + attention.kv_rank
        norms = narrow * (self.width + 2 * 4) / self._cut
        return heads * (channels + value) * self.width + statistics + norms

    def _mlp(self, layer: Layer) -> float:
        mlp = layer.mlp
        # Gate and up, their product; without Transformer Engine the activated gate as well.
        columns = 3 if self.fused else 4
        if not isinstance(mlp, Experts):
            return columns * mlp.size / self.layout.tp * self.width
        routed = mlp.per_token * EXPERT_IMBALANCE / self._cut
        # Inputs of the experts and their activations, weighted before the second product so that
        # outputs are not kept (Megatron-Core's experts.py); the router is float32.
        expert = routed * (columns * mlp.size + self.spec.hidden_size) * self.width
        shared = columns * mlp.shared_size / self.layout.tp * self.width
        return expert + shared + 3 * 4 * mlp.count / self._cut

    def activations_kept(self, tokens: float, stage: int, step_tokens: float) -> float:
        """Bytes that forward passes keep for backward at the fullest moment of a pipeline stage's
        schedule.

        Args:
            tokens: of one micro-batch on this rank (of a context-parallel group, its part).
            stage: pipeline stage.
            step_tokens: of all micro-batches of one optimizer step on this rank, at most.
        """
        layout = self.layout
        chunks = layout.vpp or 1
        if layout.vpp:
            # Megatron's interleaved schedule: warm-up passes of single chunks, and the one that
            # turns round.
            warm = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
        else:
            warm = layout.pp - stage
        in_flight = min(warm * tokens, max(tokens, step_tokens) * chunks)
        kept, once = self._kept_by_chunk(stage)
        return in_flight * kept + tokens * (
            once + (self._head_kept() if stage == layout.pp - 1 else 0)
        )

    def _kept_by_chunk(self, stage: int) -> tuple[float, float]:
        """Bytes per token of a stage's chunk: of every pass in flight, and of the layers being
        recomputed."""
        recompute = self.config.recompute
        chunks = self.layout.vpp or 1
        layers = layers_of(self.spec, self.layout, stage)
        if recompute.granularity != "full":
            again = recompute.granularity == "selective"
            kept = sum(count * self.layer(layer, again) for layer, count in layers.items())
            return kept / chunks, 0.0
        largest = max(self.layer(layer) for layer in layers)
        pieces = stage_pieces(self.spec, self.layout)[stage :: self.layout.pp]
        blocks = sum(-(-len(piece) // recompute.layers) for piece in pieces) / chunks
        return blocks * self._hidden * self.width, recompute.layers * largest

    def _head_kept(self) -> float:
        """Bytes per token of the final norm and the head's own inputs."""
        norm = self._norm()
        if self.head == "value":
            return norm + 4 * self._hidden + 4 * self.spec.value_outputs
        return norm + self.spec.hidden_size * self.width + 32

    def activations_passing(self, tokens: float, training: bool) -> float:
        """Bytes needed for a moment in one layer: its widest outputs and, in training, their
        gradients."""
        widest = max(self._widest(layer) for layer in self.spec.kinds) + 2 * self.spec.hidden_size
        return tokens * widest * self.width * (2 if training else 1)

    def _widest(self, layer: Layer) -> float:
        """Elements per token of the widest output in a layer: of attention, or of its MLP."""
        tp = self.layout.tp
        attention = layer.attention
        mlp = layer.mlp
        if isinstance(attention, DeltaNet):
            projected = (attention.mixed_size + attention.value_size) / tp
        else:
            projected = (2 * attention.query_size + 2 * attention.kv_size) / tp
        if not isinstance(mlp, Experts):
            return max(projected, 3 * mlp.size / tp)
        routed = mlp.per_token * EXPERT_IMBALANCE / self._cut
        expert = routed * (3 * mlp.size + 2 * self.spec.hidden_size)
        return max(projected, expert + 3 * mlp.shared_size / tp)

    def logits(self, tokens: float, stage: int, training: bool) -> float:
        """Bytes of a micro-batch's largest chunk of logits with its derived tensors; in training
        also the gradient of the head's weight."""
        if self.head != "lm" or stage != self.layout.pp - 1:
            return 0.0
        words = self.spec.vocab_shard_size(self.layout.tp)
        # fp32 logits and their exponentials, and a copy in the weights' own type.
        rows = min(logits_rows(words), tokens) * words * (4 + 4 + self.width)
        # The weight's gradient is summed in fp32 over chunks, beside one chunk's part or the result
        # in its own type.
        return rows + (words * self.spec.hidden_size * (4 + self.width) if training else 0)


@dataclass(frozen=True)
class PlannedRun:
    """A run as its memory and time are worked out from it: models by name, lengths of samples,
    hardware."""

    config: PlanConfig
    models: dict[str, PlannedModel]
    hardware: Hardware
    lengths: Lengths

    @property
    def engines(self) -> int:
        """Servers: those elsewhere, or as many as the run's GPUs hold."""
        return (
            len(self.config.rollout.external_urls)
            or self.models["actor"].world // self.config.rollout.tp
        )


def planned_models(config: TrainConfig, world: int) -> dict[str, PlannedModel]:
    """Actor, critic and reference, those that the algorithm has, by name; an actor with adapters is
    its own reference.

    Raises:
        BadInput: config.json cannot be read, or a layout cannot be made of these ranks and this
            model.
    """
    models = {}
    for name, (_, source) in config.sources.items():
        section = config.trainable(name)
        head: Head = "value" if name == "critic" else "lm"
        spec = read_spec(
            model_directory(str(source)), value_outputs=config.algorithm.value_loss.outputs
        )
        width = 4 if config.model.dtype == "float32" else 2
        if section.kind == "adapter":
            adapter = config.model.adapter
        else:
            adapter = None
        fused = config.model.attention != "sdpa"
        shares = name == "critic" and config.shares_base
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

"""Bytes of activations on a rank: what forward keeps for backward, and what is needed for a moment only.

Two kinds of layers are known: PyTorch's (model.attention=sdpa, what every machine without Transformer Engine runs) and
Transformer Engine's, whose fused modules keep less. The former are measured in tests/operations/test_plan_memory.py;
the latter follow from which tensors the fused modules save.
"""

from dataclasses import dataclass

from vapo_megatron.config.model import LayoutConfig, RecomputeConfig
from vapo_megatron.weights.spec import Head, ModelSpec

# Experts do not get equally many tokens: the rank with most of them is taken to get this multiple of the mean.
EXPERT_IMBALANCE = 1.5


@dataclass(frozen=True)
class Activations:
    """Activations of one model on one rank.

    Attributes:
        spec, layout, recompute: of the model.
        width: bytes of an activation's element.
        fused: whether layers are Transformer Engine's.
        head: of the model.
        chunk: rows of logits held at once (lm).
    """

    spec: ModelSpec
    layout: LayoutConfig
    recompute: RecomputeConfig
    width: int
    fused: bool
    head: Head
    chunk: int

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
        if not spec.num_experts:  # dense layers of a model with experts are few, and counted as the others
            return columns * spec.ffn_size / self.layout.tp * self.width
        routed = spec.experts_per_token * EXPERT_IMBALANCE / self._cut
        # What is sent to experts and what they make of it, weighted before their second product so that what comes
        # back is not kept (Megatron-Core's experts.py); the router is float32.
        expert = routed * (columns * spec.expert_ffn_size + spec.hidden_size) * self.width
        expert += columns * spec.shared_ffn_size / self.layout.tp * self.width
        return expert + 3 * 4 * spec.num_experts / self._cut

    def _kept_by_layer(self) -> float:
        """Bytes per token of a layer under none or selective."""
        if self.recompute.granularity == "none":
            return self.layer()
        return self._norms() + self._attention(inputs_only=True) + self._mlp()

    def kept(self, tokens: float, stage: int, step_tokens: float) -> float:
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
        recompute, state = self.recompute, self._hidden * self.width
        if recompute.granularity != "full":
            return layers * self._kept_by_layer(), 0.0
        block = min(recompute.layers, layers)
        return -(-layers // block) * state, block * self.layer()

    def _head_kept(self) -> float:
        """Bytes per token of the final norm and the head's own inputs."""
        norm = self._norm()
        if self.head == "value":
            return norm + 4 * self._hidden + 4 * self.spec.value_outputs
        return norm + self.spec.hidden_size * self.width + 32

    def passing(self, tokens: float, training: bool) -> float:
        """Bytes needed for a moment in one layer: its widest outputs and, in training, their gradients."""
        spec, tp = self.spec, self.layout.tp
        attention = (2 * spec.query_size + 2 * spec.kv_size) / tp
        if spec.num_experts:
            routed = spec.experts_per_token * EXPERT_IMBALANCE / self._cut
            mlp = routed * (3 * spec.expert_ffn_size + 2 * spec.hidden_size) + 3 * spec.shared_ffn_size / tp
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
        rows = min(self.chunk, tokens) * words * (4 + 4 + self.width)
        # The weight's gradient is summed in fp32 over chunks, beside one chunk's part or the result in its own type.
        return rows + (words * self.spec.hidden_size * (4 + self.width) if training else 0)

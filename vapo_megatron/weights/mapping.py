"""The whole correspondence of a model: every rule with its layer, and the Megatron parameters that it governs here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.nn import Module, Parameter

from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.rules import Rule
from vapo_megatron.weights.spec import Head, ModelSpec

# Where Transformer Engine fuses a norm into the linear layer after it: its name, and that of the separate norm.
FUSED_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
LAYERS = "decoder.layers."


class MeshView(Protocol):
    """What is needed of a layout: its process groups (tp, pp, ...) and this rank's place in them."""

    @property
    def pg(self) -> Any: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def cp_rank(self) -> int: ...


@dataclass(frozen=True)
class Entry:
    """A rule at its place: in a layer (counted over the whole model), or outside the layers (None)."""

    rule: Rule
    layer: int | None = None

    @property
    def hf(self) -> tuple[str, ...]:
        """Full names of the Hugging Face tensors."""
        return tuple(name.format(layer=self.layer) for name in self.rule.hf)


def entries(spec: ModelSpec, head: Head) -> list[Entry]:
    """Every entry of a model from input to output: an order that no layout changes. Tied weights come once."""
    table = spec.table
    layers = [Entry(rule, layer) for layer in range(spec.num_layers) for rule in table.layer]
    return [Entry(table.embedding), *layers, Entry(table.final_norm), *map(Entry, spec.head_rules(head))]


def local_parameters(
    chunks: Sequence[Module], spec: ModelSpec, head: Head, tp_size: int
) -> list[tuple[Entry, Parameter]]:
    """The parameters of this rank's chunks, wrapped or not, each with its entry.

    A stage that keeps a copy of tied word embeddings yields it with the embedding's entry.

    Raises:
        RunFailed: a parameter that no rule knows, one of another shape than the rule's, or a layer without a parameter
            that it should have: the model was not built from this spec.
    """
    known = {(entry.rule.megatron, entry.layer): entry for entry in entries(spec, head)}
    if spec.tied and head == "lm":
        known[spec.table.lm_head.megatron, None] = Entry(spec.table.embedding)
    found = []
    for chunk in chunks:
        for name, local_name, layer, parameter in _named(chunk):
            entry = known.get((local_name, layer))
            if entry is None:
                raise RunFailed(f"Megatron parameter {name}: no rule of family {spec.family} (head {head}) knows it")
            expected = entry.rule.shard_shape(spec, tp_size)
            if tuple(parameter.shape) != expected:
                raise RunFailed(f"Megatron parameter {name}: shape {list(parameter.shape)}, expected {list(expected)}")
            found.append((entry, parameter))
    there = {entry for entry, _ in found}
    for layer in {entry.layer for entry in there} - {None}:
        for rule in spec.table.layer:
            if Entry(rule, layer) not in there:
                raise RunFailed(f"layer {layer}: Megatron parameter {rule.megatron} is not there, expected by the spec")
    return found


def _named(chunk: Any) -> Iterator[tuple[str, str, int | None, Parameter]]:
    """(full name, name under local layers and within its layer, index of the layer in the model, parameter)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for name, parameter in chunk.named_parameters():
        if not name.startswith(LAYERS):
            yield name, name, None, parameter
            continue
        index, _, rest = name.removeprefix(LAYERS).partition(".")
        layer = chunk.decoder.layers[int(index)].layer_number - 1
        yield name, FUSED_NAMES.get(rest, rest), layer, parameter

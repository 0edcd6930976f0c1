"""All rules of a model with their layers, and the Megatron parameters of this rank that they describe."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.nn import Module, Parameter

from vapo_megatron.errors import RunFailed
from vapo_megatron.weights.families import EMBEDDING, FINAL_NORM, LM_HEAD
from vapo_megatron.weights.rules import Rule
from vapo_megatron.weights.spec import Head, ModelSpec

# Where Transformer Engine fuses a norm into the linear layer after it: its name, and that of the separate norm.
FUSED_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
LAYERS = "decoder.layers."
# In the names of parameters that are no weights of the model but adapters of them (weights/adapters.py).
ADAPTER = ".adapter."
MeshView: TypeAlias = Any
"""A megatron.mesh.Mesh: its process groups `pg`, sizes and this rank's place in them."""

# An expert's parameter in its layer: under local layers a module of its own, under Transformer Engine's grouped ones a
# numbered parameter. Either way the number counts the experts of this rank.
_EXPERT_NAMES = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<index>\d+)\.(?P<name>.+)"),
    re.compile(r"mlp\.experts\.(?P<name>linear_fc[12]\.weight)(?P<index>\d+)"),
)


@dataclass(frozen=True)
class Entry:
    """A rule with its place: the layer (counted over the whole model; None outside the layers) and the expert (counted
    over the whole layer; None outside the experts)."""

    rule: Rule
    layer: int | None = None
    expert: int | None = None

    @property
    def hf(self) -> tuple[str, ...]:
        """Full names of the Hugging Face tensors."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.rule.hf)

    def owner(self, spec: ModelSpec, ep_size: int) -> int | None:
        """The expert-parallel rank that holds an expert's parameter; None where all ranks do."""
        return None if self.expert is None else self.expert // (spec.num_experts // ep_size)


def entries(spec: ModelSpec, head: Head) -> list[Entry]:
    """Every entry of a model from input to output, in an order that does not depend on the layout. Tied weights come
    once."""
    layers: list[Entry] = []
    for layer in range(spec.num_layers):
        layers += [Entry(rule, layer) for rule in spec.table.layer]
        layers += [Entry(rule, layer, expert) for expert in range(spec.num_experts) for rule in spec.table.expert]
    return [Entry(EMBEDDING), *layers, Entry(FINAL_NORM), *map(Entry, spec.head_rules(head))]


def unwrapped(chunk: Any) -> Any:
    """A chunk without its data-parallel wrapper."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def local_parameters(
    chunks: Sequence[Module], spec: ModelSpec, head: Head, tp_size: int
) -> list[tuple[Entry, Parameter]]:
    """The parameters of this rank's chunks, wrapped or not, each with its entry, without adapters. A stage that keeps a
    copy of tied word embeddings yields it with the embedding's entry. Raises RunFailed where the model was not built
    from this spec: no rule describes a parameter, or its shape differs."""
    by_place = {(entry.rule.megatron, entry.layer, entry.expert): entry for entry in entries(spec, head)}
    if spec.tied and head == "lm":
        by_place[LM_HEAD.megatron, None, None] = Entry(EMBEDDING)
    parameters = []
    for chunk in chunks:
        for name, place, parameter in _named(chunk):
            entry = by_place.get(place)
            if entry is None:
                raise RunFailed(f"Megatron parameter {name}: no rule of family {spec.family} (head {head}) knows it")
            expected = entry.rule.shard_shape(spec, tp_size)
            if tuple(parameter.shape) != expected:
                raise RunFailed(f"Megatron parameter {name}: shape {list(parameter.shape)}, expected {list(expected)}")
            parameters.append((entry, parameter))
    return parameters


def _named(chunk: Any) -> Iterator[tuple[str, tuple[str, int | None, int | None], Parameter]]:
    """(full name, place, parameter); a place is the rule's name of it, and layer and expert in the whole model."""
    chunk = unwrapped(chunk)
    for name, parameter in chunk.named_parameters():
        if ADAPTER in name:
            continue
        if not name.startswith(LAYERS):
            yield name, (name, None, None), parameter
            continue
        index, _, rest = name.removeprefix(LAYERS).partition(".")
        layer = chunk.decoder.layers[int(index)]
        expert = None
        for pattern in _EXPERT_NAMES:
            if match := pattern.fullmatch(rest):
                expert = layer.mlp.local_expert_indices[int(match["index"])]
                rest = f"mlp.experts.{match['name']}"
        yield name, (FUSED_NAMES.get(rest, rest), layer.layer_number - 1, expert), parameter

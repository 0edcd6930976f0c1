"""All rules of a model with their layers, and the Megatron parameters of this rank that they
describe."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.nn import Module, Parameter

from vapo_megatron.errors import RunFailed
from vapo_megatron.models.layers import LatentAttention, Layer
from vapo_megatron.models.rules import Rule
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.models.stacked_experts import Stacked

# Where Transformer Engine fuses a norm into the linear layer after it: its name, and the
# separate norm's.
_FUSED_ATTENTION = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight"}
_FUSED_MLP = {"mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"}
FUSED_NAMES = _FUSED_ATTENTION | _FUSED_MLP
# The same of latent attention, whose first projections Transformer Engine fuses with nothing.
_FUSED_LATENT = {
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
LAYERS = "decoder.layers."
# In the names of parameters that are no weights of the model but adapters of them
# (weights/adapters.py).
ADAPTER = ".adapter."
MeshView: TypeAlias = Any
"""A megatron.mesh.Mesh: its process groups `pg`, sizes and this rank's place in them."""

# An expert's parameter in its layer: under local layers a separate module, under Transformer
# Engine's grouped ones a numbered parameter. Either way the number counts the experts of this rank.
_EXPERT_NAMES = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<index>\d+)\.(?P<name>.+)"),
    re.compile(r"mlp\.experts\.(?P<name>linear_fc[12]\.weight)(?P<index>\d+)"),
)


def fused_names(layer: Layer) -> dict[str, str]:
    """Names of a layer's norms in saved checkpoints, which are Transformer Engine's
    layers, and of the parameters. Nothing is fused with the norm before a router."""
    is_latent = isinstance(layer.attention, LatentAttention)
    names = _FUSED_LATENT if is_latent else _FUSED_ATTENTION
    return names if layer.experts else names | _FUSED_MLP


@dataclass(frozen=True)
class Entry:
    """A rule with its place: the layer (counted over the whole model; None outside the layers) and
    the expert (counted over the whole layer; None outside the experts)."""

    rule: Rule
    layer: int | None = None
    expert: int | None = None

    @property
    def hf(self) -> tuple[str, ...]:
        """Full names of the Hugging Face tensors."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.rule.hf)

    def part(self, tensor: Any) -> Any:
        """What the parameter holds of one of its Hugging Face tensors, in memory or in a file."""
        return self.rule.of_expert(tensor, self.expert)

    def owner(self, spec: ModelSpec, ep_size: int) -> int | None:
        """The expert-parallel rank that holds an expert's parameter; None where all ranks do."""
        return None if self.expert is None else self.expert // (spec.num_experts // ep_size)


def entries(spec: ModelSpec, head: Head) -> list[Entry]:
    """Every entry of a model from input to output, in an order that does not depend on the layout.
    Tied weights come once."""
    layers: list[Entry] = []
    for number, layer in enumerate(spec.layers):
        layers += [Entry(rule, number) for rule in layer.rules]
        layers += _experts(layer, number)
    outside = map(Entry, (spec.final_norm, *spec.head_rules(head)))
    return [Entry(spec.embedding), *layers, *outside]


def _experts(layer: Layer, number: int) -> list[Entry]:
    """Entries of a layer's experts, one expert after another; of tensors that hold all experts,
    one tensor after another."""
    if any(isinstance(rule, Stacked) for rule in layer.expert_rules):
        return [
            Entry(rule, number, expert)
            for rule in layer.expert_rules
            for expert in range(layer.experts)
        ]
    return [
        Entry(rule, number, expert)
        for expert in range(layer.experts)
        for rule in layer.expert_rules
    ]


def by_tensors(model: Iterable[Entry]) -> list[list[Entry]]:
    """Entries in their order, those together that fill the same Hugging Face tensors."""
    return [list(group) for _, group in itertools.groupby(model, key=lambda entry: entry.hf)]


def unwrapped(chunk: Any) -> Any:
    """A chunk without its data-parallel wrapper."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def local_parameters(
    chunks: Sequence[Module], spec: ModelSpec, head: Head, tp_size: int
) -> list[tuple[Entry, Parameter]]:
    """The parameters of this rank's chunks, wrapped or not, each with its entry, without adapters.
    A stage that keeps a copy of tied word embeddings yields it with the embedding's entry. Raises
    RunFailed where the model was not built from this spec: no rule describes a parameter, or its
    shape differs."""
    by_place = {
        (entry.rule.megatron, entry.layer, entry.expert): entry for entry in entries(spec, head)
    }
    if spec.tied and head == "lm":
        by_place[spec.lm_head.megatron, None, None] = Entry(spec.embedding)
    parameters = []
    for chunk in chunks:
        for name, place, parameter in _named(chunk):
            entry = by_place.get(place)
            if entry is None:
                raise RunFailed(
                    f"Megatron parameter {name}: no rule of family {spec.family} (head {head}) "
                    "knows it"
                )
            expected = entry.rule.shard_shape(tp_size)
            if tuple(parameter.shape) != expected:
                raise RunFailed(
                    f"Megatron parameter {name}: shape {list(parameter.shape)}, expected "
                    f"{list(expected)}"
                )
            parameters.append((entry, parameter))
    return parameters


def _named(chunk: Any) -> Iterator[tuple[str, tuple[str, int | None, int | None], Parameter]]:
    """(full name, place, parameter); a place is the rule's name of it, and layer and expert in the
    whole model."""
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

"""Where each entry of a model is in a torch_dist checkpoint: its key, and its place in the tensor of that key.

Megatron stacks layers of one kind: the parameters of all layers are one tensor with the layer as first axis; those of
experts have the expert as second. Layers of two kinds (dense ones before those with experts) have a key each. Keys
carry the names of Transformer Engine's fused layers whatever the layers are
(TransformerLayerSubmodules.sharded_state_dict_keys_map). tests/weights/test_saved_keys.py holds this against the
sharded_state_dict of live models.
"""

from dataclasses import dataclass

from vapo_megatron.weights.mapping import FUSED_NAMES, LAYERS, Entry, entries
from vapo_megatron.weights.spec import Head, ModelSpec

_FUSED = {separate: fused for fused, separate in FUSED_NAMES.items()}
_EXPERTS = "mlp.experts."
# A router's layer keeps the norm before it apart: there is no linear layer that it could be fused with.
_NORM_BEFORE_EXPERTS = "pre_mlp_layernorm.weight"


@dataclass(frozen=True)
class Place:
    """Part of a saved tensor.

    Attributes:
        key: of the tensor.
        stacked: indices on the axes that layers and experts are stacked along; empty outside the layers.
        shape: of the part, without those axes.
        full: shape of the whole tensor.
    """

    key: str
    stacked: tuple[int, ...]
    shape: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the part begins in the tensor."""
        return (*self.stacked, *(0 for _ in self.shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the part with the stacked axes."""
        return (*(1 for _ in self.stacked), *self.shape)


def place_of(entry: Entry, spec: ModelSpec) -> Place:
    """Where an entry's parameter is, whole and unpadded."""
    shape = entry.rule.shard_shape(spec, 1)
    name = entry.rule.megatron
    if entry.layer is None:
        return Place(name, (), shape, shape)
    stacked: tuple[int, ...] = ()
    full: tuple[int, ...] = ()
    if spec.dense_layers:
        layers = f"{LAYERS}{entry.layer}."
    else:
        stacked, full, layers = (entry.layer,), (spec.num_layers,), LAYERS
    if entry.expert is not None:
        key = f"{layers}{_EXPERTS}experts.{name.removeprefix(_EXPERTS)}"
        return Place(key, (*stacked, entry.expert), shape, (*full, spec.num_experts, *shape))
    if not (spec.has_experts(entry.layer) and name == _NORM_BEFORE_EXPERTS):
        name = _FUSED.get(name, name)
    return Place(layers + name, stacked, shape, (*full, *shape))


def places(spec: ModelSpec, head: Head) -> dict[Entry, Place]:
    """Every entry of a model with its place, from input to output."""
    return {entry: place_of(entry, spec) for entry in entries(spec, head)}

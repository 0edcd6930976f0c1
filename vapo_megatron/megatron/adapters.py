"""Low-rank adapters (LoRA, arXiv 2106.09685) in Megatron's linear layers, at any layout.

An adapter is a submodule of its linear layer, and a forward hook on that layer adds its output. The
layer itself, Megatron's or Transformer Engine's, is unchanged. A column-parallel layer has all of A
on every tensor-parallel rank and its rows of B; a row-parallel layer has its columns of A and all
of B; one that every rank has whole (latent attention's down-projections) all of both. Only
[tokens, rank] goes between ranks. Experts are whole on their ranks, and so are their adapters: the
ranks that hold the same expert sum its gradients.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import Parameter

from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.megatron.mesh import Mesh
from vapo_megatron.megatron.moe import mark_experts
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.adapters import (
    adapted_entries,
    adapter_halves,
    adapters_of,
    is_row_parallel,
    linear_layer,
)
from vapo_megatron.weights.mapping import ADAPTER, Entry


class LowRank(torch.nn.Module):
    """A and B of one linear layer, as this rank holds them. B starts at 0, so that the layer's
    output is unchanged."""

    def __init__(
        self,
        weight: Entry,
        config: AdapterConfig,
        spec: ModelSpec,
        mesh: Mesh,
        like: Tensor,
        sequence_cut: bool,
    ) -> None:
        """weight: the entry of the layer's weight `like`, which gives both halves their dtype and
        device. sequence_cut: whether tensor-parallel ranks share the tokens between layers
        (sequence parallelism)."""
        super().__init__()
        self.adapts = weight
        self.rank = config.rank
        self.scale = config.alpha / config.rank
        rule = weight.rule
        # Whose tokens are dispatched to the rank, all of them
        of_expert = weight.expert is not None
        self.enabled = True
        self.row = is_row_parallel(rule)
        self.duplicated = rule.cut is None and not of_expert
        self.sequence_cut = sequence_cut and not of_expert
        self.tp_group = mesh.pg.expt_tp if of_expert else mesh.pg.tp
        halves = adapter_halves(weight, config.rank).items()
        shapes = {half: entry.rule.shard_shape(mesh.tp_size) for half, entry in halves}
        self.a = Parameter(torch.empty(shapes["a"], dtype=like.dtype, device=like.device))
        self.b = Parameter(torch.zeros(shapes["b"], dtype=like.dtype, device=like.device))
        cut, whole = (self.a, self.b) if self.row else (self.b, self.a)
        # Megatron counts a parameter in the gradient norm once for each rank that has a part of it,
        # or on the first.
        cut.tensor_model_parallel = not self.duplicated  # type: ignore[attr-defined]
        # Each rank sees the gradient of its tokens alone: Megatron sums the gradients of marked
        # parameters.
        whole.sequence_parallel = self.sequence_cut  # type: ignore[attr-defined]
        cut.sequence_parallel = self.sequence_cut and self.duplicated  # type: ignore[attr-defined]
        rows = [
            part[0] // (1 if rule.cut is None or self.row else mesh.tp_size)
            for part in rule.hf_shapes()
        ]
        self._groups = 1 if self.row else max(1, rule.groups // mesh.tp_size)
        self.rows = [size // self._groups for size in rows]  # of B, of each projection in a group

    def forward(self, x: Tensor) -> Tensor:
        """The term to be added to the layer's output: x [..., in] -> [..., out], both cut as in the
        layer."""
        low = F.linear(x, self.a) * self.scale
        if self.duplicated:
            return F.linear(low, self.b)
        if self.row and self.sequence_cut:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(
                low, group=self.tp_group
            )
        elif self.row:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        elif self.sequence_cut:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        if len(self.rows) == 1:
            return F.linear(low, self.b)
        outputs = [
            F.linear(part, b.flatten(0, 1)).unflatten(-1, (self._groups, -1))
            for part, b in zip(low.split(self.rank, -1), self._parts_of_b(self.b), strict=True)
        ]
        return torch.cat(outputs, -1).flatten(-2)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight with the adapter in it, computed in float32 and rounded once to the
        weight's dtype."""
        a = self.a.float().split(self.rank)
        b = self._parts_of_b(self.b.float())
        products = [part_b @ part_a for part_a, part_b in zip(a, b, strict=True)]
        return torch.cat(products, 1).flatten(0, 1).mul_(self.scale).add_(weight).to(weight.dtype)

    def _parts_of_b(self, b: Tensor) -> Sequence[Tensor]:
        """[groups, rows, rank] of each projection."""
        return b.unflatten(0, (self._groups, -1)).split(self.rows, 1)


# Grouped products take rows of a multiple of 16 bytes.
_ALIGNED = 8


class GroupedLowRank(torch.nn.ModuleList):
    """The adapters of the experts whose weights one grouped linear layer of Transformer Engine
    holds, in its order."""

    @property
    def enabled(self) -> bool:
        """Whether the layer adds them."""
        return bool(self[0].enabled)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Its adapters' as well: Megatron gathers updated weights before the call of the module
        that has them, and the adapters are not called."""
        return super().parameters()

    def forward(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        """The term to be added to the layer's output: x [t, in], one expert's tokens after
        another's -> [t, out].
        tokens: of each expert. As LowRank computes it, but in one grouped product for all experts.
            Zeros fill up a rank
        that cannot be multiplied so."""
        adapters: list[Any] = list(self)
        if not len(x):
            return torch.cat([adapter(x) for adapter in adapters])
        first = adapters[0]
        rank = adapters[0].rank
        missing = -rank % _ALIGNED
        a = torch.stack([adapter.a for adapter in adapters]).unflatten(1, (-1, rank))
        a = F.pad(a, (0, 0, 0, missing)).flatten(1, 2)
        b = F.pad(torch.stack([adapter.b for adapter in adapters]), (0, missing))
        ends = torch.tensor(tokens, device=x.device).cumsum(0, dtype=torch.int32)
        low = F.grouped_mm(x, a.mT, offs=ends) * first.scale
        parts = zip(low.split(rank + missing, -1), b.split(first.rows, 1), strict=True)
        return torch.cat([F.grouped_mm(part, part_b.mT, offs=ends) for part, part_b in parts], -1)


def add_adapters(
    chunks: Sequence[Any],
    spec: ModelSpec,
    config: AdapterConfig,
    mesh: Mesh,
    transformer: Any,
    seed: int,
) -> None:
    """Add adapters to the linear layers of a model's chunks. Their values depend on the seed alone,
    at any layout: A is drawn as in PEFT, uniformly within 1 / sqrt(in)."""
    by_layer = defaultdict(list)
    for entry in adapted_entries(spec, config):
        if entry.owner(spec, mesh.ep_size) in (None, mesh.ep_rank):
            by_layer[entry.layer].append(entry)
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            for entry in by_layer[layer.layer_number - 1]:
                linear, weight = _place(layer, entry)
                assert not hasattr(linear, "layer_norm_weight"), (
                    "its input is not what its weight is applied to"
                )
                adapter = LowRank(
                    entry,
                    config,
                    spec,
                    mesh,
                    getattr(linear, weight),
                    transformer.sequence_parallel,
                )
                _draw(adapter, spec, mesh, seed)
                if not hasattr(linear, "adapter"):
                    linear.adapter = adapter if weight == "weight" else GroupedLowRank()
                    linear.register_forward_hook(_add_low_rank)
                if weight != "weight":
                    linear.adapter.append(adapter)
        mark_experts(chunk)
        if chunk.pre_process and transformer.recompute_granularity is not None:
            # Layers that are computed again get gradients only where their input wants some.
            chunk.embedding.register_forward_hook(_want_gradient)


def _place(layer: Any, entry: Entry) -> tuple[Any, str]:
    """The linear layer of a transformer layer with an entry's weight, and the name that the weight
    has there."""
    path = str(linear_layer(entry.rule))
    if entry.expert is None:
        return layer.get_submodule(path), "weight"
    index = layer.mlp.local_expert_indices.index(entry.expert)
    name = path.rpartition(".")[2]
    if hasattr(layer.mlp.experts, "local_experts"):
        return getattr(layer.mlp.experts.local_experts[index], name), "weight"
    return getattr(layer.mlp.experts, name), f"weight{index}"


@torch.no_grad()
def _draw(adapter: LowRank, spec: ModelSpec, mesh: Mesh, seed: int) -> None:
    entry = adapter_halves(adapter.adapts, adapter.rank)["a"]
    wholes = []
    for name, shape in zip(entry.hf, entry.rule.hf_shapes(), strict=True):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        wholes.append((2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5)
    adapter.a.copy_(entry.rule.to_shard(wholes, mesh.tp_rank, mesh.tp_size))


def _add_low_rank(
    linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    if not linear.adapter.enabled:
        return output
    return output[0] + linear.adapter(*inputs), output[1]


def _want_gradient(embedding: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output


def freeze_base(chunks: Sequence[Any], head: Head) -> None:
    """Freeze everything but the adapters and a critic's head."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            of_critic = head == "value" and name.startswith("output_layer.")
            parameter.requires_grad_(ADAPTER in name or of_critic)


@contextmanager
def without_adapters(chunks: Sequence[Any]) -> Iterator[None]:
    """Disable a model's adapters, so that it computes the output of its frozen weights."""
    adapters = [adapter for chunk in chunks for _, adapter in adapters_of(chunk)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True

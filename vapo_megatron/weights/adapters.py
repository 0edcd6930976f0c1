"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the rules of the weights that they adapt.

An adapted weight is W + (alpha / rank) B A. Every Hugging Face projection has a pair of its own, A [rank, in] and
B [out, rank], as PEFT has it: where Megatron fuses projections (query, key and value; gate and up), a rank holds their
As above each other, and their Bs in the rows that the projections have in the fused weight.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter

from vapo_megatron.config.model import AdapterConfig
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.mapping import LAYERS, Entry, entries
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.rules import GateUp, Replicated, Row, Rule
from vapo_megatron.weights.spec import Head, ModelSpec

# Of a weight's Hugging Face name, and what stands there in the names of its adapter's halves.
_WEIGHT = ".weight"
NAMES_IN_HF = {"a": ".lora_A.weight", "b": ".lora_B.weight"}


class Adapter(Protocol):
    """The adapter of a linear layer, a module named `adapter` within it."""

    rule: Rule
    a: Parameter
    b: Parameter

    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight with the adapter in it."""


def linear_layer(rule: Rule) -> str | None:
    """The path, within a transformer layer, of the linear layer whose weight this is; None of experts and all else."""
    path = rule.megatron.removesuffix(_WEIGHT)
    folder, _, name = path.partition(".")
    return (
        path if folder in ("self_attention", "mlp") and name.startswith("linear_") and path != rule.megatron else None
    )


def is_row_parallel(rule: Rule) -> bool:
    """Whether tensor-parallel ranks share out the input features, hence A; else the output features, hence B."""
    return rule.cut == 1


def adapter_rules(rule: Rule, rank: int) -> dict[str, Rule]:
    """Rules of both halves, `a` and `b`, of the adapter of a linear layer's weight."""
    path = rule.megatron.removesuffix(_WEIGHT)

    def names(half: str) -> tuple[str, ...]:
        return tuple(name.removesuffix(_WEIGHT) + NAMES_IN_HF[half] for name in rule.hf)

    a = (Row if is_row_parallel(rule) else Replicated)(f"{path}.adapter.a", names("a"), (rank, rule.shape[-1]))
    if is_row_parallel(rule):
        return {"a": a, "b": Replicated(f"{path}.adapter.b", names("b"), (rule.shape[0], rank))}
    return {"a": a, "b": replace(rule, megatron=f"{path}.adapter.b", hf=names("b"), shape=(*rule.shape[:-1], rank))}


def adapted_entries(spec: ModelSpec, config: AdapterConfig) -> list[Entry]:
    """The weights that have an adapter, from input to output."""
    every = ((entry, linear_layer(entry.rule)) for entry in entries(spec, "lm") if entry.expert is None)
    return [entry for entry, path in every if path is not None and path.rpartition(".")[2] in config.layers]


def adapter_entries(spec: ModelSpec, config: AdapterConfig) -> list[Entry]:
    """Both halves of every adapter, from input to output."""
    return [
        Entry(rule, entry.layer)
        for entry in adapted_entries(spec, config)
        for rule in adapter_rules(entry.rule, config.rank).values()
    ]


def adapter_parameter_count(spec: ModelSpec, config: AdapterConfig, head: Head) -> int:
    """Parameters of all adapters of a model, and of a critic's head, which is trained beside them."""
    rules = [entry.rule for entry in adapter_entries(spec, config)]
    return sum(rule.count(spec) for rule in (*rules, *(spec.head_rules(head) if head == "value" else ())))


def adapted_layers(chunk: Any) -> Iterator[tuple[str, int, Any]]:
    """(name in the chunk, layer in the whole model, linear layer) of everything that has an adapter in a chunk."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for name, module in chunk.named_modules():
        if isinstance(getattr(module, "adapter", None), Module):
            index = int(name.removeprefix(LAYERS).partition(".")[0])
            yield name, chunk.decoder.layers[index].layer_number - 1, module


def adapters_by_weight(chunks: Sequence[Module]) -> dict[Parameter, Adapter]:
    """The adapters of some chunks, by the weights they belong to."""
    return {module.weight: module.adapter for chunk in chunks for _, _, module in adapted_layers(chunk)}


def local_adapters(chunks: Sequence[Module], rank: int) -> dict[Entry, Parameter]:
    """Both halves of every adapter of this rank's chunks, each with its entry."""
    return {
        Entry(rule, layer): getattr(module.adapter, half)
        for chunk in chunks
        for _, layer, module in adapted_layers(chunk)
        for half, rule in adapter_rules(module.adapter.rule, rank).items()
    }


def has_adapters(chunk: Any) -> bool:
    """Whether a chunk has any."""
    return any(True for _ in adapted_layers(chunk))


def sharded_adapters(chunk: Any) -> dict[str, Any]:
    """What megatron.core.dist_checkpointing saves of a chunk's adapters, by parameter; no layout shows in the keys."""
    groups = chunk.pg_collection
    state: dict[str, Any] = {}
    for name, layer, module in adapted_layers(chunk):
        rule = module.adapter.rule
        path = f"{LAYERS}{layer}.{rule.megatron.removesuffix(_WEIGHT)}.adapter"
        for half, cut in (("a", 1 if is_row_parallel(rule) else None), ("b", None if is_row_parallel(rule) else 0)):
            parameter = getattr(module.adapter, half)
            shared: dict[str, Any] = {"tp_group": groups.tp, "dp_cp_group": groups.dp_cp}
            if cut is None:
                part = make_sharded_tensor_for_checkpoint(parameter, f"{path}.{half}", **shared)
            else:
                part = make_tp_sharded_tensor_for_checkpoint(parameter, f"{path}.{half}", tp_axis=cut, **shared)
            if half == "b" and isinstance(rule, GateUp):
                part = apply_swiglu_sharded_factory(part, ())
            state[f"{name}.adapter.{half}"] = part
    return state


@cache
def base_identity(hf_dir: Path) -> str:
    """A digest of a model's type and of each tensor's name, shape and first row, which tells weights apart."""
    tensors = HFTensors(hf_dir)
    digest = hashlib.sha256(str(read_config(hf_dir).get("model_type")).encode())
    for name in sorted(tensors.names):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor[:1].float().contiguous().numpy().tobytes() if tensor.shape else b"")
    return digest.hexdigest()[:32]


def peft_config(config: AdapterConfig, spec: ModelSpec, base: str) -> dict[str, Any]:
    """adapter_config.json of PEFT for a language model's adapters."""
    projections = {
        name.removesuffix(_WEIGHT).rpartition(".")[2] for entry in adapted_entries(spec, config) for name in entry.hf
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(projections),
        "inference_mode": True,
    }

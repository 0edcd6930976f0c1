"""Low-rank adapters (LoRA, arXiv 2106.09685) and the rules of the weights that they adapt.

An adapted weight is W + (alpha / rank) B A. As in PEFT, every Hugging Face projection has its own pair, A [rank, in]
and B [out, rank]; every expert has pairs of its own. Where Megatron fuses projections (query, key and value; gate and
up), a rank stacks their As, and holds their Bs in the rows that the projections have in the fused weight.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module, Parameter

from vapo_megatron.config.model import AdapterConfig, TrainableConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.hf_writer import save_tensors, write_json
from vapo_megatron.weights.mapping import LAYERS, Entry, entries, unwrapped
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.rules import GateUp, Replicated, Row, Rule
from vapo_megatron.weights.spec import Head, ModelSpec

# The end of a weight's Hugging Face name, and its replacements in the names of the adapter's halves.
_WEIGHT = ".weight"
NAMES_IN_HF = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
# A PEFT directory: its files, and what its classes put before the names.
PEFT_CONFIG, PEFT_WEIGHTS, PEFT_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


def linear_layer(rule: Rule) -> str | None:
    """The path, within a transformer layer, of the linear layer with this weight; None for other weights. An expert's
    is the same for all experts."""
    path = rule.megatron.removesuffix(_WEIGHT)
    return path if ".linear_" in path and path != rule.megatron else None


def is_row_parallel(rule: Rule) -> bool:
    """Whether tensor-parallel ranks shard the input features, and so A; otherwise the output features, and so B."""
    return rule.cut == 1


def adapter_halves(weight: Entry, rank: int) -> dict[str, Entry]:
    """Both halves, `a` and `b`, of the adapter of a linear layer's weight."""
    rule = weight.rule
    path = rule.megatron.removesuffix(_WEIGHT)

    def names(half: str) -> tuple[str, ...]:
        return tuple(name.removesuffix(_WEIGHT) + NAMES_IN_HF[half] for name in rule.hf)

    a = (Row if is_row_parallel(rule) else Replicated)(f"{path}.adapter.a", names("a"), (rank, rule.shape[-1]))
    if is_row_parallel(rule):
        b: Rule = Replicated(f"{path}.adapter.b", names("b"), (rule.shape[0], rank))
    else:
        b = replace(rule, megatron=f"{path}.adapter.b", hf=names("b"), shape=(*rule.shape[:-1], rank))
    return {"a": replace(weight, rule=a), "b": replace(weight, rule=b)}


def adapted_entries(spec: ModelSpec, config: AdapterConfig) -> list[Entry]:
    """The weights that have an adapter, from input to output."""
    every = ((entry, linear_layer(entry.rule)) for entry in entries(spec, "lm"))
    return [entry for entry, path in every if path is not None and path.rpartition(".")[2] in config.layers]


def adapter_entries(spec: ModelSpec, config: AdapterConfig) -> list[Entry]:
    """Both halves of every adapter, from input to output."""
    return [half for entry in adapted_entries(spec, config) for half in adapter_halves(entry, config.rank).values()]


def adapter_parameter_count(spec: ModelSpec, config: AdapterConfig, head: Head) -> int:
    """Parameters of a model's adapters and, for a critic, of its head, which is trained with them."""
    rules = [entry.rule for entry in adapter_entries(spec, config)]
    return sum(rule.count(spec) for rule in (*rules, *(spec.head_rules(head) if head == "value" else ())))


def adapters_of(chunk: Any) -> Iterator[tuple[str, Any]]:
    """(name in the chunk, adapter) of each adapted weight of a chunk; `adapts` is that weight's entry."""
    for name, module in unwrapped(chunk).named_modules():
        if isinstance(getattr(module, "adapts", None), Entry):
            yield name, module


def local_adapters(chunks: Sequence[Module]) -> dict[Entry, Parameter]:
    """Both halves of every adapter of this rank's chunks, each with its entry."""
    return {
        entry: getattr(adapter, half)
        for chunk in chunks
        for _, adapter in adapters_of(chunk)
        for half, entry in adapter_halves(adapter.adapts, adapter.rank).items()
    }


def sharded_adapters(chunk: Any) -> dict[str, Any]:
    """A chunk's adapters by parameter, for megatron.core.dist_checkpointing; the keys do not depend on the layout."""
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

    groups = chunk.pg_collection
    state: dict[str, Any] = {}
    for name, adapter in adapters_of(chunk):
        for half, entry in adapter_halves(adapter.adapts, adapter.rank).items():
            parameter, key, cut = getattr(adapter, half), f"{LAYERS}{entry.layer}.{entry.rule.megatron}", entry.rule.cut
            shared: dict[str, Any] = {"tp_group": groups.tp, "dp_cp_group": groups.dp_cp}
            if entry.expert is not None:  # one tensor of all experts, of which each rank saves its own
                shared["prepend_offsets"] = ((0, entry.expert, chunk.config.num_moe_experts),)
                shared["replica_id"] = (0, 0, groups.expt_dp.rank())
            if cut is None:
                part = make_sharded_tensor_for_checkpoint(parameter, key, **shared)
            else:
                part = make_tp_sharded_tensor_for_checkpoint(parameter, key, tp_axis=cut, **shared)
            if cut is not None and isinstance(entry.rule, GateUp):
                part = apply_swiglu_sharded_factory(part, ())
            state[f"{name}.{half}"] = part
    return state


def read_peft(folder: Path, spec: ModelSpec) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """The adapters of a PEFT directory for a language model, each half by its Hugging Face name. Raises BadInput where
    it holds anything else, or adapters for only some of the projections that Megatron fuses."""
    path = folder / PEFT_CONFIG
    settings = read_config(folder, PEFT_CONFIG)
    for key, expected in (("peft_type", "LORA"), ("use_rslora", False), ("alpha_pattern", {})):
        if settings.get(key, expected) not in (expected, None):
            raise BadInput(f"{path}: {key} is {settings[key]!r}, expected {expected!r}: merge them into their model")
    try:
        held = load_file(folder / PEFT_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{folder / PEFT_WEIGHTS}: cannot be read ({error}); save the adapters again") from None
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in held.items()}
    try:
        whole = AdapterConfig.model_validate({"rank": settings.get("r"), "alpha": settings.get("lora_alpha")})
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"{path}: r or lora_alpha is {first['input']!r}: {first['msg']}") from None
    by_layer = {
        name: {
            half: shape
            for entry in adapter_entries(spec, whole.model_copy(update={"layers": (name,)}))
            for half, shape in zip(entry.hf, entry.rule.hf_shapes(spec), strict=True)
        }
        for name in whole.layers
    }
    layers = tuple(name for name, shapes in by_layer.items() if shapes.keys() & tensors.keys())
    shapes = {half: shape for name in layers for half, shape in by_layer[name].items()}
    if wrong := sorted(shapes.keys() ^ tensors.keys()) or ([] if layers else [PEFT_WEIGHTS]):
        problem = "is missing" if wrong[0] in shapes else "cannot be held"
        raise BadInput(
            f"{folder}: tensor {wrong[0]} {problem}; expected A and B of all projections of {' or '.join(by_layer)} in "
            f"every layer of a {spec.family} model: merge the adapters into their model"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise BadInput(f"{folder}: tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}")
    return whole.model_copy(update={"layers": layers}), tensors


def write_peft(
    folder: Path, tensors: Mapping[str, Tensor], config: AdapterConfig, spec: ModelSpec, head: Head, base: str
) -> None:
    """Write adapters, and a critic's head, in the form that PEFT's PeftModel.from_pretrained reads. tensors: by Hugging
    Face names. base: the model that they adapt. Raises OSError."""
    save_tensors({PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}, folder / PEFT_WEIGHTS)
    projections = {
        name.removesuffix(_WEIGHT).rpartition(".")[2] for entry in adapted_entries(spec, config) for name in entry.hf
    }
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "TOKEN_CLS",
        "modules_to_save": None if head == "lm" else ["score"],
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(projections),
        "inference_mode": True,
    }
    write_json(folder / PEFT_CONFIG, settings)


def merged_weight(name: str, weight: Tensor, halves: Mapping[str, Tensor], scale: float) -> Tensor:
    """A Hugging Face weight with its adapter, if it has one, merged in float32 and not yet rounded."""
    a, b = (halves.get(name.removesuffix(_WEIGHT) + NAMES_IN_HF[half]) for half in "ab")
    return weight if a is None or b is None else (b.float() @ a.float()).mul_(scale).add_(weight)


@cache
def base_identity(hf_dir: Path) -> str:
    """A digest of a model's type and of each tensor's name, shape and first row, to recognise its weights."""
    tensors = HFTensors(hf_dir)
    digest = hashlib.sha256(str(read_config(hf_dir).get("model_type")).encode())
    for name in sorted(tensors.names):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor[:1].float().contiguous().numpy().tobytes() if tensor.shape else b"")
    return digest.hexdigest()[:32]


def check_adapter(spec: ModelSpec, config: AdapterConfig, section: TrainableConfig, name: str) -> None:
    """Raises BadInput where a model cannot have the adapters of the config; name is the config section."""
    if section.kind == "model":
        return
    for entry in adapted_entries(spec, config):
        narrowest = min(min(part) for part in entry.rule.hf_shapes(spec))
        if config.rank > narrowest:
            raise BadInput(
                f"model.adapter.rank={config.rank} is above {narrowest}, the least dimension of {entry.hf[0]} and its "
                "like: lower it, or leave that layer out of model.adapter.layers"
            )

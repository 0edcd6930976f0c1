"""Low-rank adapters (LoRA, arXiv 2106.09685) and the rules of the weights that they adapt.

An adapted weight is W + (alpha / rank) B A. As in PEFT, every Hugging Face projection has its own
pair, A [rank, in] and B [out, rank]; every expert has its own pairs. Where Megatron fuses
projections (query, key and value; gate and up), a rank stacks their As, and holds their Bs in the
rows that the projections have in the fused weight.
"""

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module, Parameter

from vapo_megatron.config.model import AdapterConfig, TrainableConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.rules import GateUp, Replicated, Row, Rule
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.models.stacked_experts import Stacked
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.hf_writer import save_tensors, write_json
from vapo_megatron.weights.mapping import LAYERS, Entry, entries, unwrapped

# The end of a weight's Hugging Face name, and its replacements in the names of the adapter's
# halves.
_WEIGHT = ".weight"
NAMES_IN_HF = {"a": ".lora_A.weight", "b": ".lora_B.weight"}
# A PEFT directory: its files, and what its classes put before the names.
PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
# Ways of beginning (init_lora_weights) that leave the adapted weights as they are.
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
_BLOCK = 1 << 20  # elements that is_finite looks at in one go
_logger = logging.getLogger(__name__)


# Projections that models with latent attention have in the place of linear_qkv.
_QUERY_KEY_VALUE = {
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
}


def linear_layer(rule: Rule) -> str | None:
    """The path, within a transformer layer, of the linear layer with this weight; None for other
    weights. An expert's is the same for all experts."""
    path = rule.megatron.removesuffix(_WEIGHT)
    return path if rule.is_linear else None


def is_row_parallel(rule: Rule) -> bool:
    """Whether tensor-parallel ranks shard the input features, and so A; otherwise the output
    features, and so B."""
    return rule.cut == 1


def adapter_halves(weight: Entry, rank: int) -> dict[str, Entry]:
    """Both halves, `a` and `b`, of the adapter of a linear layer's weight."""
    rule = weight.rule
    path = rule.megatron.removesuffix(_WEIGHT)

    def names(half: str) -> tuple[str, ...]:
        return tuple(name.removesuffix(_WEIGHT) + NAMES_IN_HF[half] for name in rule.hf)

    a = (Row if is_row_parallel(rule) else Replicated)(
        f"{path}.adapter.a", names("a"), (rank, rule.shape[-1])
    )
    if is_row_parallel(rule):
        b: Rule = Replicated(f"{path}.adapter.b", names("b"), (rule.shape[0], rank))
    else:
        b = replace(
            rule, megatron=f"{path}.adapter.b", hf=names("b"), shape=(*rule.shape[:-1], rank)
        )
    return {"a": replace(weight, rule=a), "b": replace(weight, rule=b)}


def adapted_entries(spec: ModelSpec, config: AdapterConfig) -> list[Entry]:
    """The weights that have an adapter, from input to output."""
    every = ((entry, linear_layer(entry.rule)) for entry in entries(spec, "lm"))
    return [
        entry for entry, path in every if path is not None and _adapted_layer(path) in config.layers
    ]


def _adapted_layer(path: str) -> str:
    """The name in AdapterConfig.layers of a linear layer."""
    name = path.rpartition(".")[2]
    return "linear_qkv" if name in _QUERY_KEY_VALUE else name


def adapter_entries(spec: ModelSpec, config: AdapterConfig) -> list[Entry]:
    """Both halves of every adapter, from input to output."""
    return [
        half
        for entry in adapted_entries(spec, config)
        for half in adapter_halves(entry, config.rank).values()
    ]


def adapter_parameter_count(spec: ModelSpec, config: AdapterConfig, head: Head) -> int:
    """Parameters of a model's adapters and, for a critic, of its head, which is trained with
    them."""
    rules = [entry.rule for entry in adapter_entries(spec, config)]
    head_rules = spec.head_rules(head) if head == "value" else ()
    return sum(rule.count() for rule in (*rules, *head_rules))


def adapters_of(chunk: Any) -> Iterator[tuple[str, Any]]:
    """(name in the chunk, adapter) of each adapted weight of a chunk; `adapts` is that weight's
    entry."""
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
    """A chunk's adapters by parameter, for megatron.core.dist_checkpointing; the keys do not depend
    on the layout."""
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.utils import (
        make_sharded_tensor_for_checkpoint,
        make_tp_sharded_tensor_for_checkpoint,
    )

    groups = chunk.pg_collection
    state: dict[str, Any] = {}
    for name, adapter in adapters_of(chunk):
        for half, entry in adapter_halves(adapter.adapts, adapter.rank).items():
            parameter = getattr(adapter, half)
            key = f"{LAYERS}{entry.layer}.{entry.rule.megatron}"
            cut = entry.rule.cut
            shared: dict[str, Any] = {"tp_group": groups.tp, "dp_cp_group": groups.dp_cp}
            # One tensor of all experts, of which each rank saves its own
            if entry.expert is not None:
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


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor of any float dtype holds neither NaN nor infinity."""
    # By blocks: an embedding in float32 may be as large as all that a converter holds otherwise
    blocks = tensor.flatten().split(_BLOCK)
    return all(bool(block.float().abs().amax().isfinite()) for block in blocks if len(block))


def not_finite(folder: Path, name: str) -> BadInput:
    """The error for weights that are not finite."""
    return BadInput(
        f"{folder}: tensor {name} holds NaN or infinity: of a run that diverged, or a damaged "
        "copy; take another checkpoint"
    )


def _with_zeros(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, Tensor]:
    """The halves, with zeros for projections that have no adapter though Megatron fuses them with
    some that do: q and v alone. Both halves are zero, so training does not change them."""
    lacking = []
    filled = dict(tensors)
    for name, shape in shapes.items():
        a = name.replace(NAMES_IN_HF["b"], NAMES_IN_HF["a"])
        b = name.replace(NAMES_IN_HF["a"], NAMES_IN_HF["b"])
        if a not in tensors and b not in tensors:
            filled[name] = torch.zeros(shape, dtype=next(iter(tensors.values())).dtype)
            lacking.append(name.split(".")[-3])
    if lacking:
        _logger.warning(
            "%s: has no adapters of %s in some or all layers: zeros stand for them, which "
            "training does not change",
            folder,
            " and ".join(sorted(set(lacking))),
        )
    return filled


def read_peft(folder: Path, spec: ModelSpec) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """The adapters of a PEFT directory for a language model, each half by its Hugging Face name.
    Projections without one get zeros where Megatron fuses them with some that have one. Raises
    BadInput where it holds anything else."""
    settings = _peft_settings(folder)
    try:
        held = load_file(folder / PEFT_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{folder / PEFT_WEIGHTS}: cannot be read ({error}); save the adapters again"
        ) from None
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in held.items()}
    fused = sorted(name for name in tensors if re.search(r"\.experts\.\D", name))
    if named := settings.get("target_parameters") or fused[:1]:
        raise BadInput(
            f"{folder}: adapts fused experts ({named[0]}), one tensor of all of them, and adapters "
            "here are of each expert: merge them into their model (PEFT's merge_and_unload)"
        )
    try:
        whole = AdapterConfig.model_validate(
            {"rank": settings.get("r"), "alpha": settings.get("lora_alpha")}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(
            f"{folder / PEFT_CONFIG}: r or lora_alpha is {first['input']!r}: {first['msg']}"
        ) from None
    by_layer = {
        name: {
            half: shape
            for entry in adapter_entries(spec, whole.model_copy(update={"layers": (name,)}))
            for half, shape in zip(entry.hf, entry.rule.hf_shapes(), strict=True)
        }
        for name in whole.layers
    }
    layers = tuple(name for name, shapes in by_layer.items() if shapes.keys() & tensors.keys())
    shapes = {half: shape for name in layers for half, shape in by_layer[name].items()}
    if layers:
        tensors = _with_zeros(tensors, shapes, folder)
    if wrong := sorted(shapes.keys() ^ tensors.keys()) or ([] if layers else [PEFT_WEIGHTS]):
        problem = "is missing" if wrong[0] in shapes else "cannot be held"
        raise BadInput(
            f"{folder}: tensor {wrong[0]} {problem}; expected A and B of all projections of "
            f"{' or '.join(by_layer)} in every layer of a {spec.family} model: merge the adapters "
            "into their model"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise BadInput(
                f"{folder}: tensor {name} has shape {list(tensors[name].shape)}, expected "
                f"{list(shape)}"
            )
        if not is_finite(tensors[name]):
            raise not_finite(folder, name)
    return whole.model_copy(update={"layers": layers}), tensors


def _peft_settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json of plain LoRA beside weights that it does not change."""
    path = folder / PEFT_CONFIG
    settings = read_config(folder, PEFT_CONFIG)
    for key, expected in (("peft_type", "LORA"), ("use_rslora", False), ("alpha_pattern", {})):
        if settings.get(key, expected) not in (expected, None):
            raise BadInput(
                f"{path}: {key} is {settings[key]!r}, expected {expected!r}: merge them into their "
                "model"
            )
    # PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base, which these adapters do not hold.
    if (begun := settings.get("init_lora_weights", True)) not in _KEEPS_BASE:
        raise BadInput(
            f"{path}: init_lora_weights is {begun!r}, which changes the weights that are adapted: "
            "save them with PEFT's path_initial_model_for_weight_conversion, or merge them into "
            "their model"
        )
    return settings


def write_peft(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: AdapterConfig,
    spec: ModelSpec,
    head: Head,
    base: str,
) -> None:
    """Write adapters, and a critic's head, in the form that PEFT's PeftModel.from_pretrained reads.
    tensors: by Hugging Face names. base: the model that they adapt. Raises OSError."""
    save_tensors(
        {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}, folder / PEFT_WEIGHTS
    )
    projections = {
        name.removesuffix(_WEIGHT).rpartition(".")[2]
        for entry in adapted_entries(spec, config)
        for name in entry.hf
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
    """A Hugging Face weight with its adapter, if it has one, merged in float32 and not yet
    rounded."""
    a, b = (halves.get(name.removesuffix(_WEIGHT) + NAMES_IN_HF[half]) for half in "ab")
    return weight if a is None or b is None else (b.float() @ a.float()).mul_(scale).add_(weight)


@cache
def base_identity(hf_dir: Path) -> str:
    """A digest of a model's type and of each tensor's name, shape and first row, to recognise its
    weights."""
    tensors = HFTensors(hf_dir)
    digest = hashlib.sha256(str(read_config(hf_dir).get("model_type")).encode())
    for name in sorted(tensors.names):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor[:1].float().contiguous().numpy().tobytes() if tensor.shape else b"")
    return digest.hexdigest()[:32]


def check_adapter(
    spec: ModelSpec, config: AdapterConfig, section: TrainableConfig, name: str
) -> None:
    """Raises BadInput where a model cannot have the adapters of the config; name is the config
    section."""
    if section.kind == "model":
        return
    for rule in spec.layer_rules:
        layer = rule.megatron.removesuffix(_WEIGHT).rpartition(".")[2]
        if isinstance(rule, Stacked) and layer in config.layers:
            raise BadInput(
                f"model.adapter.layers has {layer}: {rule.hf[0]} of {spec.family} is one tensor of "
                "all experts, which has no adapters here: leave linear_fc1 and linear_fc2 out"
            )
    for entry in adapted_entries(spec, config):
        narrowest = min(min(part) for part in entry.rule.hf_shapes())
        if config.rank > narrowest:
            raise BadInput(
                f"model.adapter.rank={config.rank} is above {narrowest}, the least dimension of "
                f"{entry.hf[0]} and its like: lower it, or leave that layer out of "
                "model.adapter.layers"
            )

"""FP8 through Transformer Engine: checks of the machine, and Megatron's settings."""

from collections.abc import Iterable
from typing import Any

import torch

from vapo_megatron.config.model import ModelConfig, PrecisionConfig, TrainableConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.layer_spec import uses_transformer_engine
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.weights.adapters import check_adapter
from vapo_megatron.weights.spec import ModelSpec

# Least compute capability of a GPU whose matrix units take a recipe's operands.
CAPABILITY = {"tensorwise": (8, 9), "blockwise": (9, 0)}
# cuBLAS multiplies FP8 matrices whose rows begin at multiples of so many bytes; the backward pass transposes weights.
FP8_SIDE = 16
# CUDA from which cuBLAS multiplies matrices of blocks with scales of their own.
BLOCKWISE_CUDA = (12, 9)


def check_trainable(
    spec: ModelSpec, model: ModelConfig, section: TrainableConfig, name: str, platform: Platform
) -> None:
    """Raises BadInput where the kernels, recomputation or precision of a section are not possible on this machine."""
    fused = uses_transformer_engine(model.attention, platform)
    check_adapter(spec, model.adapter, section, name)
    if section.recompute.granularity == "full":
        layers = spec.num_layers // (section.layout.pp * (section.layout.vpp or 1))
        key, block = f"{name}.recompute.layers={section.recompute.layers}", section.recompute.layers
        if block > layers:
            raise BadInput(f"{key} is above the {layers} layers that a rank has in one piece: lower it")
        if layers % block:
            raise BadInput(f"{key} does not divide the {layers} layers that a rank has in one piece: choose a divisor")
    check_precision(spec, model, section, name, platform)
    if fused and model.dtype == "float32":
        raise BadInput(
            f"{name}: dtype float32 with Transformer Engine's layers, whose attention of packed sequences takes 16 "
            "bits: set model.attention=sdpa, or bfloat16"
        )


def check_precision(
    spec: ModelSpec, model: ModelConfig, section: TrainableConfig, name: str, platform: Platform
) -> None:
    """Raises BadInput where a section's precision is not possible; name is the config section."""
    precision, switch = section.precision, f"{'actor' if name == 'reference' else name}.precision.fp8"
    key = f"{switch}={precision.fp8}"
    if precision.fp8 == "none":
        return
    if not platform.is_cuda:
        raise BadInput(f"{key}: FP8 needs a CUDA GPU, this machine has none: set {switch}=none")
    if not platform.has_transformer_engine:
        raise BadInput(
            f"{key}: FP8 needs Transformer Engine, which is not usable here: install it (requirements/h100.txt), or "
            f"set {switch}=none"
        )
    if not uses_transformer_engine(model.attention, platform):
        raise BadInput(f"{key} with model.attention={model.attention}: FP8 needs Transformer Engine's layers, set auto")
    least, actual = CAPABILITY[precision.fp8], platform.compute_capability
    if actual < least:
        possible = [recipe for recipe, needed in CAPABILITY.items() if needed <= actual] or ["none"]
        raise BadInput(
            f"{key} needs a GPU of compute capability {least[0]}.{least[1]}, this one has {actual[0]}.{actual[1]}: "
            f"choose {' or '.join(possible)}"
        )
    if precision.fp8 == "blockwise" and platform.cuda_version < BLOCKWISE_CUDA:
        raise BadInput(
            f"{key} needs a torch built for CUDA {BLOCKWISE_CUDA[0]}.{BLOCKWISE_CUDA[1]} or later, this one is for "
            f"{platform.cuda_version[0]}.{platform.cuda_version[1]}: install one, or choose tensorwise"
        )
    if model.dtype != "bfloat16":
        raise BadInput(f"{key} with dtype {model.dtype}: FP8 wants bfloat16 beside it, set model.dtype=bfloat16")
    # Adapters are computed in model.dtype, so that their rank is free; the weights that they adapt have to suit.
    for rule in (*spec.table.layer, *spec.table.expert):
        shape = rule.shard_shape(spec, section.layout.tp)
        if ".linear_" in rule.megatron and len(shape) == 2 and any(side % FP8_SIDE for side in shape):
            raise BadInput(
                f"{key}: a rank's part of {rule.hf[0]} has shape {list(shape)} with {name}.layout.tp="
                f"{section.layout.tp}, FP8 wants multiples of {FP8_SIDE}: lower tp, or set {switch}=none"
            )


def fp8_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; hybrid numbers have gradients in e5m2."""
    if precision.fp8 == "none":
        return {}
    return {"fp8": "e4m3" if precision.fp8 == "blockwise" else "hybrid", "fp8_recipe": precision.fp8}


def drop_fp8_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Free the FP8 copies of a step's weights, which Transformer Engine's layers make in the first micro-batch and
    keep; the next forward pass makes them again."""
    for chunk in chunks:
        for module in chunk.modules():
            copies = getattr(module, "_fp8_workspaces", None)
            if isinstance(copies, dict):
                copies.clear()

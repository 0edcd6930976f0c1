"""FP8 through Transformer Engine: checks of the machine, and Megatron's settings."""

from collections.abc import Iterable
from typing import Any

import torch

from vapo_megatron.config.model import ModelConfig, PrecisionConfig, TrainableConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.layer_spec import uses_transformer_engine
from vapo_megatron.megatron.mesh import stage_pieces
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.models.layers import LatentAttention
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.adapters import check_adapter

# Least compute capability of a GPU whose matrix units take a recipe's operands.
CAPABILITY = {"tensorwise": (8, 9), "blockwise": (9, 0)}
# cuBLAS multiplies FP8 matrices whose rows begin at multiples of so many bytes; the backward pass
# transposes weights.
FP8_SIDE = 16
# CUDA from which cuBLAS multiplies matrices of blocks that each have a scale.
BLOCKWISE_CUDA = (12, 9)


def has_latent_attention(spec: ModelSpec) -> bool:
    """Whether a layer has latent attention, which is not Transformer Engine's here."""
    return any(isinstance(layer.attention, LatentAttention) for layer in spec.kinds)


def check_fused_layers(spec: ModelSpec) -> None:
    """Raises BadInput where Transformer Engine's layers would silently leave out parts of a layer:
    they take one rotary table alone, which stretches no part of a head, no window, norms of single
    heads, no sinks, no biases but the biases of queries, keys and values, and no delta nets."""
    kinds = spec.softmax_attentions
    if has_latent_attention(spec):
        raise BadInput(
            "model.attention: Transformer Engine's layers were not run with latent attention "
            "(Megatron-Core 0.16.1 pads no narrow values in packed sequences), which "
            f"{spec.family} has: set model.attention=sdpa"
        )
    rotaries = {attention.rotary for attention in kinds}
    is_plain = (
        not spec.delta_nets
        and len(rotaries) == 1
        and all(
            rotary is not None and not rotary.interleaved and rotary.query_scale is None
            for rotary in rotaries
        )
        and all(attention.window is None for attention in kinds)
        and all(attention.turned_factor == 1.0 for attention in kinds)
        and all(attention.qk_norm != "all" for attention in kinds)
        and not any(attention.sinks or attention.output_bias for attention in kinds)
    )
    if not is_plain:
        raise BadInput(
            "model.attention: Transformer Engine's layers here know no window, layers without a "
            "rotary embedding, pairs of neighbours, a stretch of a part of each head, norms over "
            "all heads, attention sinks, queries that grow with their position or delta nets, "
            f"which {spec.family} has: set model.attention=sdpa"
        )


class NeedsGpu(BadInput):
    """What a config asks for is possible, but not on this machine."""


def check_trainable(
    spec: ModelSpec, model: ModelConfig, section: TrainableConfig, name: str, platform: Platform
) -> None:
    """Raises BadInput where the kernels, recomputation or precision of a section are not possible
    on this machine."""
    fused = uses_transformer_engine(model.attention, platform)
    if model.logprob_kernel == "triton" and not platform.is_cuda:
        raise NeedsGpu(
            "model.logprob_kernel=triton: its kernels need a CUDA GPU, this machine has none: set "
            "model.logprob_kernel=torch"
        )
    check_adapter(spec, model.adapter, section, name)
    if section.recompute.granularity == "full":
        pieces = sorted({len(piece) for piece in stage_pieces(spec, section.layout)})
        key = f"{name}.recompute.layers={section.recompute.layers}"
        told = f"the {' and '.join(map(str, pieces))} layers that ranks have in one piece"
        block = section.recompute.layers
        if block > pieces[0]:
            raise BadInput(f"{key} is above {told}: lower it")
        if any(piece % block for piece in pieces):
            raise BadInput(f"{key} does not divide {told}: choose a divisor")
    if section.share_prompts:
        check_shared_prompts(spec, name, fused=fused)
    check_precision(spec, model, section, name, platform)
    if fused:
        check_fused_layers(spec)
    if fused and model.dtype == "float32":
        raise BadInput(
            f"{name}: dtype float32 with Transformer Engine's layers, whose attention of packed "
            "sequences takes 16 bits: set model.attention=sdpa, or bfloat16"
        )


def check_shared_prompts(spec: ModelSpec, name: str, *, fused: bool) -> None:
    """Raises BadInput where layers cannot continue another sequence's prompt."""
    switch = f"{_section(name)}.share_prompts"
    if spec.delta_nets:
        raise BadInput(
            f"{switch}=true: the delta nets of {spec.family} have a state after each token and "
            f"continue none of another sequence, set {switch}=false"
        )
    if fused:
        raise BadInput(
            f"{switch}=true: Transformer Engine's attention knows no prompt that sequences share, "
            f"set model.attention=sdpa or {switch}=false"
        )


def _section(name: str) -> str:
    """The config section with a model's settings: the reference has the actor's."""
    return "actor" if name == "reference" else name


def check_precision(
    spec: ModelSpec, model: ModelConfig, section: TrainableConfig, name: str, platform: Platform
) -> None:
    """Raises BadInput where a section's precision is not possible; name is the config section."""
    precision = section.precision
    switch = f"{_section(name)}.precision.fp8"
    key = f"{switch}={precision.fp8}"
    if precision.fp8 == "none":
        return
    if has_latent_attention(spec):
        raise BadInput(
            f"{key}: FP8 needs Transformer Engine's layers, with which the latent attention of "
            f"{spec.family} was not run: set {switch}=none"
        )
    if not platform.is_cuda:
        raise NeedsGpu(f"{key}: FP8 needs a CUDA GPU, this machine has none: set {switch}=none")
    if not platform.has_transformer_engine:
        raise BadInput(
            f"{key}: FP8 needs Transformer Engine, which is not usable here: install it "
            f"(requirements/h100.txt), or set {switch}=none"
        )
    if not uses_transformer_engine(model.attention, platform):
        raise BadInput(
            f"{key} with model.attention={model.attention}: FP8 needs Transformer Engine's layers, "
            "set auto"
        )
    least = CAPABILITY[precision.fp8]
    actual = platform.compute_capability
    if actual < least:
        possible = [recipe for recipe, needed in CAPABILITY.items() if needed <= actual] or ["none"]
        raise BadInput(
            f"{key} needs a GPU of compute capability {least[0]}.{least[1]}, this one has "
            f"{actual[0]}.{actual[1]}: choose {' or '.join(possible)}"
        )
    if precision.fp8 == "blockwise" and platform.cuda_version < BLOCKWISE_CUDA:
        raise BadInput(
            f"{key} needs a torch built for CUDA {BLOCKWISE_CUDA[0]}.{BLOCKWISE_CUDA[1]} or later, "
            f"this one is for {platform.cuda_version[0]}.{platform.cuda_version[1]}: install one, "
            "or choose tensorwise"
        )
    if model.dtype != "bfloat16":
        raise BadInput(
            f"{key} with dtype {model.dtype}: FP8 wants bfloat16 beside it, set "
            "model.dtype=bfloat16"
        )
    # Adapters are computed in model.dtype, so that their rank is free; the weights that they adapt
    # have to suit.
    for rule in spec.layer_rules:
        shape = rule.shard_shape(section.layout.tp)
        if rule.is_linear and any(side % FP8_SIDE for side in shape):
            raise BadInput(
                f"{key}: a rank's part of {rule.hf[0]} has shape {list(shape)} with "
                f"{name}.layout.tp={section.layout.tp}, FP8 wants multiples of {FP8_SIDE}: lower "
                f"tp, or set {switch}=none"
            )


def fp8_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; hybrid numbers have gradients in e5m2."""
    if precision.fp8 == "none":
        return {}
    return {
        "fp8": "e4m3" if precision.fp8 == "blockwise" else "hybrid",
        "fp8_recipe": precision.fp8,
    }


def drop_fp8_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Free the FP8 copies of a step's weights, which Transformer Engine's layers make in the first
    micro-batch and keep; the next forward pass makes them again."""
    for chunk in chunks:
        for module in chunk.modules():
            copies = getattr(module, "_fp8_workspaces", None)
            if isinstance(copies, dict):
                copies.clear()

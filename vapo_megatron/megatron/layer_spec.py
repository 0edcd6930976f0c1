"""Megatron's layer specs, by the kinds of a layer's attention and MLP (models/layers.py)."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from vapo_megatron.megatron.attention import SDPACoreAttention
from vapo_megatron.megatron.delta_net import GatedDeltaNet
from vapo_megatron.megatron.latent_attention import LatentSelfAttention
from vapo_megatron.megatron.norms import AddToResidual, RMSNorm, ZeroCentredRMSNorm
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.models.layers import DeltaNet, LatentAttention, Layer
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.mapping import fused_names


def uses_transformer_engine(attention: str, platform: Platform) -> bool:
    """Whether layers are Transformer Engine's; attention: ModelConfig.attention."""
    return attention != "sdpa" and platform.has_transformer_engine


def norm_class(spec: ModelSpec, fused: bool) -> type:
    """The class of a model's norms."""
    if fused:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return ZeroCentredRMSNorm if spec.zero_centred_norms else RMSNorm


def layer_spec(
    layer: Layer,
    spec: ModelSpec,
    config: Any,
    *,
    fused: bool,
    adapters: bool = False,
) -> Any:
    """Megatron's own layer spec for a layer.

    Args:
        layer, spec: the layer and its model.
        config: Megatron's config of the model.
        fused: whether it is Transformer Engine's; otherwise it is the local one with norms and core
            attention replaced.
        adapters: whether linear layers may have adapters, whose input is the norm's output: norms
            are then not fused into them.
    """
    built = _fused_spec(layer, adapters) if fused else _local_spec(layer, norm_class(spec, fused))
    submodules = built.submodules
    if isinstance(layer.attention, DeltaNet):
        submodules.self_attention = ModuleSpec(
            module=GatedDeltaNet, params={"net": layer.attention}
        )
    if not layer.norm_before:
        submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp
    if layer.norm_after or layer.residual_factor != 1.0:
        params = {
            "config": config,
            "norm": norm_class(spec, fused) if layer.norm_after else None,
            "factor": layer.residual_factor,
        }
        submodules.self_attn_bda = ModuleSpec(module=AddToResidual, params=params)
        submodules.mlp_bda = ModuleSpec(module=AddToResidual, params=params)
    return built


def _fused_spec(layer: Layer, adapters: bool) -> Any:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    experts: dict[str, Any] = {}
    if layer.experts:
        experts = {"num_experts": layer.experts, "moe_grouped_gemm": True}
    assert not isinstance(layer.attention, DeltaNet)  # precision.check_fused_layers
    spec = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=layer.attention.qk_norm is not None, **experts
    )
    if adapters:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TENorm
        spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not layer.experts:
            _submodules(spec.submodules.mlp).linear_fc1 = TEColumnParallelLinear
    return spec


def _local_spec(layer: Layer, norm: type) -> Any:
    has_norms = not isinstance(layer.attention, DeltaNet) and layer.attention.qk_norm == "head"
    spec = get_gpt_layer_local_spec(
        num_experts=layer.experts or None, qk_layernorm=has_norms, normalization="RMSNorm"
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if isinstance(layer.attention, LatentAttention):
        params = {"attention": layer.attention, "norm": norm}
        spec.submodules.self_attention = ModuleSpec(module=LatentSelfAttention, params=params)
        spec.submodules.sharded_state_dict_keys_map = {
            separate: fused for fused, separate in fused_names(layer).items()
        }
        return spec
    if layer.experts:
        # As under Transformer Engine, which has nothing to fuse this norm with: saved keys are
        # the keys of either kind of layer.
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if has_norms:
        attention.q_layernorm = attention.k_layernorm = norm
    return spec


def _submodules(mlp: Any) -> Any:
    """Submodules in a spec of an MLP, which from Megatron-Core 0.17 on is a partial function."""
    return getattr(mlp, "keywords", vars(mlp))["submodules"]


def freeze_attention(model: torch.nn.Module) -> None:
    """Freeze the attention modules, but not the norms that Transformer Engine's linear layers
    hold."""
    for name, parameter in model.named_parameters():
        if ".self_attention." in name and not name.endswith(".layer_norm_weight"):
            parameter.requires_grad_(False)

"""The one place that decides which modules a transformer layer is made of."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from torch.nn import Module, Parameter

from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.attention import RMSNorm, SDPACoreAttention
from vapo_megatron.megatron.platform import Platform


def uses_transformer_engine(attention: str, platform: Platform) -> bool:
    """Whether layers come from Transformer Engine: by default wherever it is there.

    Raises:
        BadInput: it was asked for and is not there.
    """
    if attention == "transformer_engine" and not platform.has_transformer_engine:
        raise BadInput(
            "model.attention=transformer_engine: Transformer Engine is not usable here; install it on a CUDA machine "
            "(requirements/h100.txt) or set model.attention=sdpa"
        )
    return attention != "sdpa" and platform.has_transformer_engine


def layer_spec(
    qk_norm: bool, transformer_engine: bool, num_experts: int = 0, adapters: bool = False
) -> tuple[Any, Any]:
    """Megatron's own layer spec, and the class of the final norm. num_experts: of a layer, 0 for a dense model.

    adapters: linear layers may have some, whose input is the norm's output: no norm is then fused with them.

    Without Transformer Engine it is the local spec with norms and core attention exchanged; specs built by hand do not
    survive Megatron's releases, these exchanges did from 0.16 to 0.19.
    """
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        experts = {"num_experts": num_experts, "moe_grouped_gemm": True} if num_experts else {}
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm, **experts)
        if adapters:
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TENorm
            spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            if not num_experts:
                spec.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        return spec, TENorm
    spec = get_gpt_layer_local_spec(num_experts=num_experts or None, qk_layernorm=qk_norm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    if num_experts:
        # As under Transformer Engine, which has nothing to fuse this norm with: saved keys are those of either layers.
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec, RMSNorm


def parameters_of(model: Module, parts: Sequence[str]) -> Iterator[Parameter]:
    """The parameters of some parts of a model, given as parts of their names, whichever layers it has.

    Transformer Engine's linear layers hold the norm before them, which without it is a module beside: that norm is no
    part of the attention, or MLP, whose linear layer it is in.
    """
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts) and not name.endswith(".layer_norm_weight"):
            yield parameter

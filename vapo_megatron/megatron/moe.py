"""A mixture of experts as Megatron is to build and train it."""

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module, Parameter

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.weights.spec import ModelSpec


def moe_settings(spec: ModelSpec, layout: LayoutConfig, grouped: bool) -> dict[str, Any]:
    """Fields of TransformerConfig for a model with experts.

    No auxiliary loss, no change of expert biases and no dropped tokens: what is trained is what the engines sample
    from. Logits and
    weights of the router are float32, as small differences choose other experts. Weights that are not normalised
    (norm_topk_prob false) are the softmax over all experts, normalised ones that over the chosen: Megatron's
    moe_router_pre_softmax.

    grouped: one grouped matrix product for all experts of a rank (Transformer Engine) rather than one each.
    """
    sigmoid: dict[str, Any] = {
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": spec.routed_scaling,
        "moe_shared_expert_intermediate_size": spec.shared_ffn_size,
    }
    # A list has Megatron save each layer under a key of its own.
    mixed = [int(spec.has_experts(layer)) for layer in range(spec.num_layers)]
    return {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.expert_ffn_size,
        "moe_router_topk": spec.experts_per_token,
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        **(sigmoid if spec.table.sigmoid_router else {}),
        **({"moe_layer_freq": mixed} if spec.dense_layers else {}),
    }


def add_expert_biases(model: Module) -> None:
    """Give each router the bias that its experts are chosen by, float32 and not trained.

    Megatron has a buffer for it, which comes with counts of tokens by which it moves the bias after every step. Here it
    stays what the checkpoint has, and a parameter is loaded, synced, offloaded and saved as every other.
    """
    for module in model.modules():
        if isinstance(module, TopKRouter):
            bias = torch.zeros(module.num_experts, dtype=torch.float32, device=module.weight.device)
            module.expert_bias = Parameter(bias, requires_grad=False)


def mark_experts(model: Module) -> None:
    """Tell Megatron which parameters are an expert's, hence reduced over the ranks that hold the same expert.

    It marks them itself where ep > 1 alone. At ep 1 under sequence parallelism every tensor-parallel rank sends tokens
    of its own through its own copy, whose gradients have to be summed just so. Nor is such a parameter a duplicate of
    one on tensor-parallel rank 0, which alone would count in the gradient norm.
    """
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def complete_megatron() -> None:
    """What Megatron-Core 0.16.1 lacks for experts: without Transformer Engine a name that its router asks for, without
    CUDA plain numbers of tokens to send to each rank, which it makes of tensors on their way from the device alone."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not current_platform().is_cuda:
        token_dispatcher.maybe_move_tensor_to_cpu = _on_cpu_already


def _on_cpu_already(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """maybe_move_tensor_to_cpu of what is there."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

"""FP8 layers of SGLang where there is no kernel for them: the same numbers, computed in the activations' dtype.

Checkpoints and weight syncs in FP8 then load on a machine without a GPU as they do on one, into the same parameters by
the same loaders. Activations are rounded as the kernels round them: in groups of 128 with a scale each (block FP8), or
by the static scale of the checkpoint (ModelOpt); inside an expert, between its two products, they are not. It is slow:
every product spreads the weights out.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.weights.fp8 import BLOCK, FP8, LARGEST, dequantize


def install_cpu_fp8() -> None:
    """Give SGLang's layers in block FP8 (experts as well) and ModelOpt FP8 a form that runs on a CPU."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp8LinearMethod

    for method in (Fp8LinearMethod, Fp8MoEMethod, ModelOptFp8LinearMethod):
        method.process_weights_after_loading = _leave_as_loaded
    Fp8MoEMethod.create_moe_runner = _no_runner
    Fp8MoEMethod.apply = _apply_experts
    Fp8LinearMethod.apply = _apply_block
    ModelOptFp8LinearMethod.apply = _apply_modelopt


def _leave_as_loaded(self: Any, layer: torch.nn.Module) -> None:
    """Kernels want other layouts; without them the parameters stay what the checkpoint has, and can be loaded again."""


def _apply_block(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = dequantize(layer.weight, layer.weight_scale_inv).to(x.dtype)
    return F.linear(_rounded_in_groups(x), weight, bias)


def _no_runner(self: Any, layer: torch.nn.Module, moe_runner_config: Any) -> None:
    """Runners choose among kernels."""


def _apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states

    def spread(values: Tensor, scales: Tensor) -> Tensor:
        return torch.stack([dequantize(*expert) for expert in zip(values, scales, strict=True)]).to(x.dtype)

    experts = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=spread(layer.w13_weight, layer.w13_weight_scale_inv),
        w2_weight=spread(layer.w2_weight, layer.w2_weight_scale_inv),
    )
    output = moe_forward_native(experts, _rounded_in_groups(x), dispatch_output.topk_output, layer.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


def _rounded_in_groups(x: Tensor) -> Tensor:
    groups = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return ((groups / scales).to(FP8).float() * scales).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _apply_modelopt(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight_scale has one number for each of the layers that are stacked in the weight, input_scale likewise."""
    widths = torch.tensor(layer.logical_widths)
    weight = layer.weight.float() * layer.weight_scale.repeat_interleave(widths)[:, None]
    scale = layer.input_scale.max()
    rounded = (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8).float() * scale
    return F.linear(rounded.to(x.dtype), weight.to(x.dtype), bias)

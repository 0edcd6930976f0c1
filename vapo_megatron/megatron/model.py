"""Builds actor and critic as Megatron models from a model spec and a mesh."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vapo_megatron.config.model import ModelConfig, TrainableConfig, logits_rows
from vapo_megatron.megatron import cpu_torch
from vapo_megatron.megatron.heads import LogProbHead, ValueHead
from vapo_megatron.megatron.layer_spec import RotaryTables, SDPACoreAttention, layer_spec, uses_transformer_engine
from vapo_megatron.megatron.mesh import Mesh
from vapo_megatron.megatron.moe import complete_megatron, install_router_replay, mark_experts, moe_settings
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import fp8_settings
from vapo_megatron.weights.spec import Head, ModelSpec


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x, activated), (grad,) = ctx.saved_tensors, grads
        gate, up = x.chunk(2, -1)
        gradient = torch.empty_like(x)
        of_gate, of_up = gradient.chunk(2, -1)
        torch.mul(grad, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return gradient


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x [..., 2 * n], gate first -> [..., n] (Shazeer 2020, eq. 6)."""
    activated: Tensor = _SwiGLU.apply(x)
    return activated


def transformer_config(spec: ModelSpec, model: ModelConfig, trainable: TrainableConfig) -> TransformerConfig:
    """Megatron's config of a model. Fusions that need GPU kernels are off without a GPU."""
    layout, recompute = trainable.layout, trainable.recompute
    dtype = getattr(torch, model.dtype)
    fused = uses_transformer_engine(model.attention, current_platform())
    settings: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        softmax_scale=spec.softmax_scale,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss weights carry the global denominators; Megatron only has to sum.
        calculate_per_token_loss=True,
        persist_layer_norm=fused,
        bias_activation_fusion=fused,
        use_te_activation_func=not fused,  # an MLP's activation then takes gate and up in one tensor: swiglu
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=fused,  # Transformer Engine's layers do so themselves
        **fp8_settings(trainable.precision),
        use_cpu_initialization=False,
    )
    if spec.num_experts:
        settings.update(moe_settings(spec, layout, fused))
    if layout.vpp:
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if recompute.granularity == "full":
        settings.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=recompute.layers)
    elif recompute.granularity == "selective":
        settings.update(recompute_granularity="selective", recompute_modules=["core_attn"])
    return TransformerConfig(**settings)


def build_model(
    spec: ModelSpec,
    config: TransformerConfig,
    mesh: Mesh,
    head: Head,
    *,
    attention: str = "auto",
    adapters: bool = False,
) -> list[GPTModel]:
    """This rank's chunks of a model, one a virtual pipeline stage, their weights not yet loaded.

    Args:
        spec, config, mesh: the model's shape, transformer_config of it, and its layout.
        head: "lm" yields [1, t, 2] log-probs and entropies once labels are set (logits before), "value" [1, t, n] with
            n = spec.value_outputs.
        attention: which layers to use, see ModelConfig.attention.
        adapters: whether its linear layers will be given adapters.
    """
    cpu_torch.install()
    complete_megatron()
    fused = uses_transformer_engine(attention, current_platform())
    layer, norm = layer_spec(spec.qk_norm, fused, spec.num_experts, adapters)
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    for index in range(vpp or 1):
        stage = index if vpp else None
        first = is_vp_first_stage(stage, vpp) and is_pp_first_stage(mesh.pg.pp)
        last = is_vp_last_stage(stage, vpp) and is_pp_last_stage(mesh.pg.pp)
        count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=mesh.pp_rank)
        model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm),
            vocab_size=spec.padded_vocab_size(mesh.tp_size),
            max_sequence_length=spec.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            position_embedding_type="rope" if fused else "none",
            rotary_base=spec.rope_theta,
            share_embeddings_and_output_weights=spec.tied and head == "lm",
            vp_stage=stage,
            pg_collection=mesh.pg,
        )
        # The frequencies of every rope scaling come from the one formula of transformers.
        if fused:
            model.rotary_pos_emb.inv_freq = spec.rope_inv_freq().to(model.rotary_pos_emb.inv_freq.device)
        else:
            tables = RotaryTables(spec.rope_inv_freq(), mesh.cp_size, mesh.cp_rank)
            for module in model.modules():
                if isinstance(module, SDPACoreAttention):
                    module.rotary = tables
                elif isinstance(module, MLP):  # experts too
                    module.activation_func = swiglu
        if last and head == "value":
            model.output_layer = ValueHead(config, spec.value_outputs, mesh.pg.tp).to(current_platform().device)
        elif last:
            LogProbHead.adopt(model.output_layer, spec.vocab_size, logits_rows(spec.vocab_shard_size(mesh.tp_size)))
        mark_experts(model)
        install_router_replay(model)
        chunks.append(model.to(current_platform().device))
    return chunks

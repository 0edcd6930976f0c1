"""Builds actor and critic as Megatron models from a model spec and a mesh."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vapo_megatron.config.model import LogProbKernel, ModelConfig, TrainableConfig, logits_rows
from vapo_megatron.megatron import cpu_torch
from vapo_megatron.megatron.activations import gated, plain
from vapo_megatron.megatron.heads import LogProbHead, ValueHead
from vapo_megatron.megatron.layer_spec import layer_spec, norm_class, uses_transformer_engine
from vapo_megatron.megatron.mesh import Mesh, stage_pieces
from vapo_megatron.megatron.moe import (
    add_expert_biases,
    add_expert_outputs_apart,
    complete_megatron,
    install_router_replay,
    mark_experts,
    moe_settings,
)
from vapo_megatron.megatron.norms import AllHeadsRMSNorm
from vapo_megatron.megatron.pipeline import PipelinePieces
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import fp8_settings
from vapo_megatron.megatron.rotary import RotaryTables
from vapo_megatron.models.layers import DeltaNet, Experts, LatentAttention, Layer, SelfAttention
from vapo_megatron.models.rotary import DEFAULT_THETA, Rotary
from vapo_megatron.models.spec import Head, ModelSpec


def transformer_config(
    spec: ModelSpec, model: ModelConfig, trainable: TrainableConfig
) -> TransformerConfig:
    """Megatron's config of a model. Fusions that need GPU kernels are off without a GPU."""
    layout = trainable.layout
    recompute = trainable.recompute
    attention = spec.attention
    dtype = getattr(torch, model.dtype)
    fused = uses_transformer_engine(model.attention, current_platform())
    settings: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=attention.num_heads,
        num_query_groups=attention.num_kv_heads,
        kv_channels=attention.head_dim,
        ffn_hidden_size=spec.dense_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=plain(spec.activation),
        # Biases of projections, router and experts; one switch for all of them.
        add_bias_linear=attention.output_bias,
        add_qkv_bias=attention.qkv_bias,
        # Megatron then sums their gradients over tensor-parallel ranks: not those that are
        # cut over these ranks.
        qk_layernorm=attention.qk_norm == "head",
        attention_output_gate=attention.gated,
        layernorm_zero_centered_gamma=spec.zero_centred_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        softmax_scale=attention.softmax_scale,
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
        use_te_activation_func=not fused,  # the activation then takes gate and up at once
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=fused,  # Transformer Engine's layers do so themselves
        **fp8_settings(trainable.precision),
        use_cpu_initialization=False,
    )
    if spec.experts is not None:
        settings.update(moe_settings(spec.experts, layout, fused))
    if layout.pp > 1:
        pieces = PipelinePieces(stage_pieces(spec, layout), layout.pp)
        settings.update(pipeline_model_parallel_layout=pieces)
    if layout.vpp:
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if recompute.granularity == "full":
        settings.update(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=recompute.layers,
        )
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
    logprob_kernel: LogProbKernel = "torch",
) -> list[GPTModel]:
    """This rank's chunks of a model, one a virtual pipeline stage, their weights not yet loaded.

    Args:
        spec, config, mesh: the model's shape, transformer_config of it, and its layout.
        head: "lm" yields [1, t, 2] log-probs and entropies once labels are set (logits before),
            "value" [1, t, n] with n = spec.value_outputs.
        attention: which layers to use, see ModelConfig.attention.
        adapters: whether its linear layers will be given adapters.
        logprob_kernel: see ModelConfig.logprob_kernel.
    """
    cpu_torch.install()
    complete_megatron()
    fused = uses_transformer_engine(attention, current_platform())
    tables = {
        kind: RotaryTables(
            kind.inv_freq(), mesh.cp_size, mesh.cp_rank, kind.interleaved, kind.query_scale
        )
        for kind in spec.rotary_kinds
    }
    vpp = config.virtual_pipeline_model_parallel_size
    pipeline = config.pipeline_model_parallel_layout
    if pipeline is not None:
        pipeline.stage = mesh.pp_rank
    rotary = spec.attention.rotary or Rotary(DEFAULT_THETA, spec.attention.head_dim)
    chunks = []
    for index in range(vpp or 1):
        stage = index if vpp else None
        layers = spec.layers
        if pipeline is not None:
            piece = pipeline.piece(stage)
            layers = layers[piece.start : piece.stop]
        layer_specs = [
            layer_spec(layer, spec, config, fused=fused, adapters=adapters) for layer in layers
        ]
        model = _gpt_model(spec, config, mesh, head, layer_specs, rotary, stage, fused=fused)
        model.layers_are_uniform = spec.is_uniform
        # The frequencies of every rope scaling come from the one formula of transformers.
        if fused:
            model.rotary_pos_emb.inv_freq = rotary.inv_freq().to(
                model.rotary_pos_emb.inv_freq.device
            )
        else:
            for module, layer in zip(model.decoder.layers, layers, strict=True):
                _configure(module, layer, tables, mesh.pg.tp)
        _add_factors(model, spec)
        if model.post_process and head == "value":
            model.output_layer = ValueHead(config, spec.value_outputs, mesh.pg.tp).to(
                current_platform().device
            )
        elif model.post_process:
            LogProbHead.adopt(
                model.output_layer,
                spec.vocab_size,
                logits_rows(spec.vocab_shard_size(mesh.tp_size)),
                spec.logits_factor,
                logprob_kernel,
            )
        mark_experts(model)
        if spec.experts is not None and spec.experts.bias:
            add_expert_biases(model)
        install_router_replay(model)
        chunks.append(model.to(current_platform().device))
    return chunks


def _gpt_model(
    spec: ModelSpec,
    config: TransformerConfig,
    mesh: Mesh,
    head: Head,
    layer_specs: list[Any],
    rotary: Rotary,
    stage: int | None,
    *,
    fused: bool,
) -> GPTModel:
    """Megatron's own model of a virtual pipeline stage (None: there are none).

    rotary: of Transformer Engine's attention; other layers compute their own tables.
    """
    vpp = config.virtual_pipeline_model_parallel_size
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=layer_specs, layer_norm=norm_class(spec, fused)
        ),
        vocab_size=spec.padded_vocab_size(mesh.tp_size),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=is_vp_first_stage(stage, vpp) and is_pp_first_stage(mesh.pg.pp),
        post_process=is_vp_last_stage(stage, vpp) and is_pp_last_stage(mesh.pg.pp),
        parallel_output=True,
        position_embedding_type="rope" if fused else "none",
        rotary_base=rotary.theta,
        rotary_percent=rotary.channels / spec.attention.head_dim,
        share_embeddings_and_output_weights=spec.tied and head == "lm",
        vp_stage=stage,
        pg_collection=mesh.pg,
    )


def _configure(
    module: Any, layer: Layer, tables: Mapping[Rotary, RotaryTables], tp_group: Any
) -> None:
    """Give the modules of a local layer the numbers that Megatron's config has once for all
    layers."""
    attention = layer.attention
    if isinstance(attention, SelfAttention) and attention.qk_norm == "all":
        _add_wide_norms(module.self_attention, attention, tp_group)
    if not isinstance(attention, DeltaNet):
        own_tables = None if attention.rotary is None else tables[attention.rotary]
        if isinstance(attention, LatentAttention):
            module.self_attention.configure(own_tables)
        else:
            module.self_attention.core_attention.configure(attention, own_tables)
    for part in module.mlp.modules():
        if isinstance(part, MLP):  # experts too
            part.activation_func = gated(layer.mlp.activation)
    if isinstance(layer.mlp, Experts) and layer.mlp.linear_biases:
        add_expert_outputs_apart(module.mlp.experts)


def _add_wide_norms(module: Any, attention: SelfAttention, tp_group: Any) -> None:
    """Norms over all heads of queries and of keys. Megatron-Core 0.19 takes none of its config's
    qk_layernorm, which would sum their gradients over tensor-parallel ranks."""
    config = module.config
    sizes = (attention.head_dim, config, config.layernorm_epsilon)
    module.q_layernorm = AllHeadsRMSNorm(*sizes, attention.num_heads, tp_group)
    module.k_layernorm = AllHeadsRMSNorm(*sizes, attention.num_kv_heads, tp_group)


def _add_factors(model: Any, spec: ModelSpec) -> None:
    """Multiply the word embeddings where they enter the first layer, as transformers does: a factor
    in their dtype."""
    if spec.embedding_factor == 1.0 or not model.pre_process:
        return

    def multiply(embedding: Any, inputs: Any, output: Tensor) -> Tensor:
        factor = torch.tensor(spec.embedding_factor, dtype=output.dtype, device=output.device)
        return output * factor

    model.embedding.register_forward_hook(multiply)

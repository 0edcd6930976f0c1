"""GLM-4.5, 4.6 and 4.7: experts chosen by a sigmoid and a bias, one that all tokens share, dense layers before them."""

from vapo_megatron.weights.families.family import (
    GATED_EXPERT,
    GATED_MLP,
    INPUT_NORM,
    KEY_NORM,
    LAYER,
    MLP_NORM,
    OUTPUT_PROJECTION,
    QKV_BIAS,
    QKV_WEIGHT,
    QUERY_NORM,
    ROUTER,
    Family,
)
from vapo_megatron.weights.rules import ExactVector, GateUp, Row

_ATTENTION = (INPUT_NORM, QKV_WEIGHT, QKV_BIAS, QUERY_NORM, KEY_NORM, OUTPUT_PROJECTION, MLP_NORM)
_SHARED = LAYER + "mlp.shared_experts."

GLM4_MOE = Family(
    model_type="glm4_moe",
    classes="Glm4Moe",
    layer=(
        *_ATTENTION,
        ROUTER,
        ExactVector("mlp.router.expert_bias", (LAYER + "mlp.gate.e_score_correction_bias",), ("num_experts",)),
        GateUp(
            "mlp.shared_experts.linear_fc1.weight",
            (_SHARED + "gate_proj.weight", _SHARED + "up_proj.weight"),
            ("shared_ffn_size", "hidden_size"),
        ),
        Row(
            "mlp.shared_experts.linear_fc2.weight", (_SHARED + "down_proj.weight",), ("hidden_size", "shared_ffn_size")
        ),
    ),
    dense_layer=(*_ATTENTION, *GATED_MLP),
    expert=GATED_EXPERT,
    qkv_bias=None,
    qk_norm=None,
    sigmoid_router=True,
    partial_rotary=True,
    predicts_ahead=True,
    defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
)

"""DeepSeek-V3, V3.1 and R1, Kimi K2 and Moonlight: latent attention, experts chosen by a sigmoid
and a bias among groups, experts that all tokens share, dense layers first."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.family import DecoderConfig, Family, check_experts, refuse_unless
from vapo_megatron.models.layers import Experts, GatedMlp, LatentAttention, Layer
from vapo_megatron.models.parts import MLP, decoder_layer, gated_mlp
from vapo_megatron.models.rotary import (
    BadConfig,
    Rotary,
    read_rope,
    rope_parameters,
    turned_channels,
)

# Numbers of YaRN that latent attention reads by its own rules.
_MSCALES = ("mscale", "mscale_all_dim", "attention_factor")


class LatentConfig(DecoderConfig):
    """Keys of families with latent attention and experts. Neither head_dim, for which config.json
    has the width of turned channels or nothing, nor num_key_value_heads says anything here."""

    # Whether transformers reads rope_interleave; it always takes neighbours as pairs otherwise.
    reads_interleave: ClassVar[bool] = False

    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt
    rope_interleave: bool = True
    n_routed_experts: PositiveInt
    num_local_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    n_shared_experts: NonNegativeInt | None = None
    routed_scaling_factor: PositiveFloat = 1.0
    norm_topk_prob: bool = True
    n_group: PositiveInt | None = 1
    topk_group: PositiveInt | None = 1
    num_nextn_predict_layers: NonNegativeInt = 0

    def latent_attention(self) -> LatentAttention:
        """Attention with these ranks, widths and rotary embedding. Raises BadConfig."""
        turned = self.qk_rope_head_dim
        refuse_unless(turned % 2 == 0, "qk_rope_head_dim", turned, "an even number")
        refuse_unless(
            self.rope_interleave or self.reads_interleave,
            "rope_interleave",
            self.rope_interleave,
            "true: transformers does not read it in this family, engines do",
        )
        refuse_unless(
            turned_channels(self.raw, turned) == turned,
            "partial_rotary_factor",
            rope_parameters(self.raw).get("partial_rotary_factor", "below 1"),
            "1 with kv_lora_rank: qk_rope_head_dim says how many channels are turned",
        )
        rotary, score_factor, turned_factor = self._yarn()
        return LatentAttention(
            num_heads=self.num_attention_heads,
            plain_dim=self.qk_nope_head_dim,
            value_dim=self.v_head_dim,
            query_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            rotary=rotary,
            softmax_scale=score_factor * (self.qk_nope_head_dim + turned) ** -0.5,
            turned_factor=turned_factor,
        )

    def _yarn(self) -> tuple[Rotary, float, float]:
        """The rotary embedding, the factors of scores and of turned channels: YaRN's factor
        for mscale_all_dim is one of all channels, and the ratio of the two one of the turned ones.
        Files without either stretch the turned channels alone."""
        parameters = rope_parameters(self.raw)
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        refuse_unless(
            kind in ("yarn", "default"),
            "rope_type",
            repr(kind),
            "'yarn' or 'default' with kv_lora_rank: engines know no other there",
        )
        kept = {key: value for key, value in parameters.items() if key not in _MSCALES}
        # Under the older spelling rope_theta is beside rope_scaling.
        config = {**self.raw, "rope_parameters": kept, "rope_scaling": None}
        theta, scaling = read_rope(config, "", self.default_theta)
        rotary = Rotary(theta, self.qk_rope_head_dim, scaling, interleaved=self.rope_interleave)
        if scaling is None:
            return rotary, 1.0, 1.0
        refuse_unless(
            parameters.get("attention_factor") is None,
            "attention_factor",
            parameters.get("attention_factor"),
            "none with kv_lora_rank: engines take the factor from mscale and mscale_all_dim",
        )
        scales: list[Any] = [parameters.get(key) for key in ("mscale", "mscale_all_dim")]
        if scales == [None, None]:
            return rotary, 1.0, scaling.attention_factor
        if not all(isinstance(scale, int | float) and scale > 0 for scale in scales):
            raise BadConfig(
                f"mscale and mscale_all_dim are {scales[0]!r} and {scales[1]!r}, expected two "
                "numbers above 0, or neither"
            )
        of_turned, of_all = (_yarn_factor(scaling.factor, scale) for scale in scales)
        return rotary, of_all**2, of_turned / of_all

    def experts(self) -> Experts:
        """The mixture of experts. Raises BadConfig."""
        refuse_unless(
            self.norm_topk_prob,
            "norm_topk_prob",
            self.norm_topk_prob,
            "true: Megatron always normalises the weights of experts that a sigmoid gives",
        )
        experts = Experts(
            count=self.n_routed_experts,
            per_token=self.num_experts_per_tok,
            size=self.moe_intermediate_size,
            scores="sigmoid",
            normalised=True,
            factor=self.routed_scaling_factor,
            bias=True,
            groups=self.n_group or 1,
            groups_per_token=self.topk_group or 1,
            shared_size=(self.n_shared_experts or 0) * self.moe_intermediate_size,
        )
        check_experts(experts)
        return experts

    def dense_then_sparse(self, dense_layers: int) -> tuple[Layer, ...]:
        """Dense layers, then layers with experts. Raises BadConfig."""
        refuse_unless(
            dense_layers < self.num_hidden_layers,
            "first_k_dense_replace",
            dense_layers,
            f"less than the {self.num_hidden_layers} layers",
        )
        attention = self.latent_attention()
        dense = decoder_layer(self.hidden_size, attention, GatedMlp(self.intermediate_size))
        sparse = decoder_layer(self.hidden_size, attention, self.experts())
        if self.n_shared_experts == 0:
            empty = gated_mlp(self.hidden_size, 0, MLP + "shared_experts.")
            sparse = replace(sparse, empty_rules=empty)
        return dense_layers * (dense,) + (self.num_hidden_layers - dense_layers) * (sparse,)


def _yarn_factor(factor: float, scale: float) -> float:
    """YaRN's stretch of attention (arXiv 2309.00071, section 3.4), as DeepSeek scales it."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


class Config(LatentConfig):
    """DeepSeek-V3's."""

    default_theta: ClassVar[float] = 10_000.0
    reads_interleave: ClassVar[bool] = True

    q_lora_rank: PositiveInt | None = 1536
    qk_nope_head_dim: PositiveInt = 128
    v_head_dim: PositiveInt = 128
    n_group: PositiveInt | None = 8
    topk_group: PositiveInt | None = 4
    num_experts_per_tok: PositiveInt = 8
    n_shared_experts: NonNegativeInt | None = 1
    routed_scaling_factor: PositiveFloat = 2.5
    first_k_dense_replace: NonNegativeInt = 3
    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"


def count_dense_layers(config: LatentConfig, kinds: list[str] | None, otherwise: int) -> int:
    """How many first layers are dense.

    kinds: "dense" or "sparse" of each layer (mlp_layer_types); None: config.json does not list
        them.
    otherwise: their number where it does not.

    Raises BadConfig where a dense layer follows one with experts.
    """
    if kinds is None:
        return otherwise
    dense_layers = kinds.count("dense")
    sparse_layers = config.num_hidden_layers - dense_layers
    refuse_unless(
        kinds == ["dense"] * dense_layers + ["sparse"] * sparse_layers,
        "mlp_layer_types",
        kinds,
        f"{config.num_hidden_layers} of 'dense' and then 'sparse': dense layers come first",
    )
    return dense_layers


def layers(config: Config) -> tuple[Layer, ...]:
    """Dense layers, then layers with experts."""
    for key, expected in (
        ("moe_layer_freq", 1),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
    ):
        value = getattr(config, key)
        refuse_unless(value == expected, key, value, f"{expected}: choose another checkpoint")
    return config.dense_then_sparse(config.first_k_dense_replace)


def features(config: LatentConfig) -> Mapping[str, Any]:
    """Files may have layers for multi-token prediction after the last."""
    return {"predicts_ahead": True}


def tiny_latent(shape: TinyModel) -> dict[str, Any]:
    """Latent attention and experts of a small model. Half of a head's channels are turned, by YaRN
    as DeepSeek's are: SGLang has no other form of it on CPUs."""
    half = shape.head_dim // 2
    turned = half + half % 2
    return {
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.hidden_size // 2,
        "kv_lora_rank": shape.hidden_size // 4,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": turned,
        "v_head_dim": shape.head_dim,
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": shape.rope_theta,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": max(1, shape.max_positions // 4),
        },
    }


def tiny(shape: TinyModel) -> dict[str, Any]:
    """With the keys of the published config.json that SGLang reads. One group of experts: a
    token's are twice as many as its groups."""
    return tiny_latent(shape) | {
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": min(1, shape.layers - 1),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3",
    Config,
    layers,
    features,
    tiny,
    # On GPUs SGLang would count the shared expert among those that a token chose.
    engine={"disable_shared_experts_fusion": True},
)

"""The form of a family module: which keys of config.json it reads, and the layers that follow from
them.

A module defines

    class Config(DecoderConfig)     the keys it reads beyond DecoderConfig's, with transformers'
    defaults def layers(config) -> tuple     the layers, by models/parts.py where names are as usual
    FAMILY = Family(...)            which models/registry.py lists

A feature that a module does not read has to be off: FEATURES names the values that say so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.models.layers import Experts, Layer, SelfAttention
from vapo_megatron.models.rotary import (
    DEFAULT_THETA,
    BadConfig,
    LongRope,
    Rotary,
    fixed_context,
    read_rope,
    turned_channels,
)
from vapo_megatron.models.spec import ModelSpec

# Rows and columns of a block of FP8 weights that share a scale (weights/fp8.py).
FP8_BLOCK = 128

# Keys of config.json that change what a model computes, and their values where they change nothing.
# A family that reads a key has a field of this name; all others refuse other values.
FEATURES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_multiplier": (None,),
    "attention_out_bias": (False, None),
    "attn_output_gate": (False, None),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "decoder_sparse_step": (1, None),
    "embedding_multiplier": (1, None),
    "final_logit_softcapping": (None,),
    "first_k_dense_replace": (0, None),
    "index_topk": (None,),
    "kv_lora_rank": (None,),
    "logits_scaling": (1, None),
    "mlp_bias": (False, None),
    "mlp_only_layers": ([], None),
    "mtp_num_hidden_layers": (0, None),
    "n_group": (1, None),
    "n_routed_experts": (0, None),
    "n_shared_experts": (0, None),
    "no_rope_layers": ([], None),
    "num_experts": (0, 1, None),
    "num_local_experts": (0, 1, None),
    "num_nextn_predict_layers": (0, None),
    "output_gate_type": ("silu", "swish", None),
    "q_lora_rank": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (1, None),
    "routed_scaling_factor": (1, None),
    "shared_expert_intermediate_size": (0, None),
    "use_qk_norm": (False, None),
}


class DecoderConfig(BaseModel):
    """Keys of config.json that every family reads."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    # Base of the rotary embedding where config.json has none.
    default_theta: ClassVar[float] = DEFAULT_THETA
    # Whether the file's window, which is not computed, bounds the length of inputs; None: where
    # use_sliding_window is on.
    bounded_by_window: ClassVar[bool | None] = False

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    # The rotary embedding's keys, in the spellings of all versions (models/rotary.py).
    raw: dict[str, Any] = {}

    @property
    def context(self) -> int:
        """Longest input for which full attention with fixed frequencies is what the model
        computes: at most its window, and longrope's original context."""
        bounds = (self.max_position_embeddings, self.bound, fixed_context(self.raw))
        return min(bound for bound in bounds if bound is not None)

    @property
    def bound(self) -> int | None:
        """The window that bounds the length of inputs; None: none does."""
        switch = self.bounded_by_window
        bounded = self.use_sliding_window if switch is None else switch
        return self.sliding_window if bounded else None

    def self_attention(
        self, partial_rotary: float | None = None, interleaved: bool = False, **features: Any
    ) -> SelfAttention:
        """Softmax attention with these heads and rotary embedding.

        Args:
            partial_rotary: the share of a head's channels that are turned where config.json does
                not say; None: the family turns all of them.
            interleaved: whether a pair of turned channels are neighbours.
            features: further fields of SelfAttention.

        Raises:
            BadConfig: the heads do not fit.
        """
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        head_dim = self.head_dim or self.hidden_size // heads
        if heads % kv_heads or head_dim % 2:
            raise BadConfig(
                f"num_attention_heads {heads}, num_key_value_heads {kv_heads}, head_dim "
                f"{head_dim}: the second must divide the first and head_dim must be even"
            )
        rotary = replace(self.rotary(head_dim, partial_rotary), interleaved=interleaved)
        return SelfAttention(heads, kv_heads, head_dim, rotary, **features)

    def rotary(self, head_dim: int, partial_rotary: float | None = None) -> Rotary:
        """The rotary embedding. Raises BadConfig where it turns part of a head and the family does
        not."""
        theta, scaling = read_rope(self.raw, default_theta=self.default_theta)
        channels = turned_channels(self.raw, head_dim, partial_rotary or 1.0)
        if channels != head_dim and partial_rotary is None:
            share = channels / head_dim
            raise BadConfig(
                f"partial_rotary_factor is {share:g}, expected 1.0: choose another checkpoint"
            )
        if isinstance(scaling, LongRope) and len(scaling.short_factor) != channels // 2:
            raise BadConfig(
                f"short_factor of longrope has {len(scaling.short_factor)} numbers, expected "
                f"{channels // 2}, one for each pair of the {channels} turned channels"
            )
        return Rotary(theta, channels, scaling)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model_type: as config.json names it.
        classes: what transformers' class names of the family begin with.
        config: the keys that it reads.
        layers: from the validated config to the layers. Raises BadConfig.
        features: further fields of ModelSpec, from the same.
        tiny: keys of a small model's config.json beyond the usual sizes (make-tiny-model), those
            included that engines read and transformers leaves out when it saves.
        engine: arguments of SGLang's server that the family needs.
        quantised: quant_method of published files that a conversion dequantises.
        engine_config: from the language model's config.json to the one that SGLang reads rightly.
        without_indexers: of a family whose attention reads tokens that indexers choose: from its
            config.json to that of the model without them; None: it has none.
        nested: the model_type of vision-language directories whose text_config is this family's
            config.json; empty: there are none.
    """

    model_type: str
    classes: str
    config: type[DecoderConfig]
    layers: Callable[[Any], tuple[Layer, ...]]
    features: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    tiny: Callable[[TinyModel], dict[str, Any]] = lambda shape: {"head_dim": shape.head_dim}
    engine: Mapping[str, Any] = field(default_factory=dict)
    quantised: str | None = field(default=None, kw_only=True)
    engine_config: Callable[[dict[str, Any]], dict[str, Any]] = field(default=dict, kw_only=True)
    without_indexers: Callable[[Mapping[str, Any]], dict[str, Any]] | None = field(
        default=None, kw_only=True
    )
    nested: str = field(default="", kw_only=True)

    @property
    def causal_lm(self) -> str:
        """transformers' class of the policy."""
        return self.classes + "ForCausalLM"

    @property
    def token_classification(self) -> str:
        """transformers' class in whose form a value model is saved: a label for each output of its
        head."""
        return self.classes + "ForTokenClassification"

    def spec(
        self, config: Mapping[str, Any], converting: bool = False, **outside: Any
    ) -> ModelSpec:
        """The spec of a config.json.

        Args:
            config: its content.
            converting: whether quantised weights are dequantised as they are read.
            outside: fields of ModelSpec that config.json does not have.

        Raises:
            BadConfig, or pydantic's ValidationError.
        """
        hf = self.config.model_validate({**config, "raw": dict(config)})
        self._check_features(config)
        self._check_windows(hf, config)
        if hf.hidden_act != "silu":
            raise BadConfig(
                f"hidden_act is {hf.hidden_act!r}, expected 'silu' for {self.model_type} models "
                "here: choose another checkpoint"
            )
        self._check_quantisation(hf, converting)
        layers = self.layers(hf)
        return ModelSpec(
            family=self.model_type,
            classes=self.classes,
            hidden_size=hf.hidden_size,
            vocab_size=hf.vocab_size,
            tied=hf.tie_word_embeddings,
            rms_norm_eps=hf.rms_norm_eps,
            max_position_embeddings=hf.context,
            dtype=_dtype(hf),
            layers=layers,
            nested=self.nested,
            **self.features(hf),
            **outside,
        )

    def _check_quantisation(self, hf: DecoderConfig, converting: bool) -> None:
        if hf.quantization_config is None:
            return
        if self.quantised is None or hf.quantization_config.get("quant_method") != self.quantised:
            _check_quantisation(hf.quantization_config)
            return
        if not converting:
            raise BadConfig(
                f"quantization_config is set to {self.quantised}, which cannot be trained: convert "
                "the directory by convert-hf-to-megatron and back by convert-megatron-to-hf, which "
                "writes bfloat16"
            )

    def _check_features(self, config: Mapping[str, Any]) -> None:
        for key, neutral in FEATURES.items():
            value = config.get(key)
            if key in self.config.model_fields or value is None or value in neutral:
                continue
            raise BadConfig(
                f"{key} is {value!r}, expected {neutral[0]!r} for {self.model_type} models here: "
                "choose another checkpoint"
            )

    def _check_windows(self, hf: DecoderConfig, config: Mapping[str, Any]) -> None:
        """Raises BadConfig where layer_types gives layers a window, or anything but full attention,
        in a family that does not read it, and the window does not bound the context."""
        types = config.get("layer_types")
        if "layer_types" in self.config.model_fields or hf.bound or types is None:
            return
        refuse_unless(
            isinstance(types, list) and all(kind == "full_attention" for kind in types),
            "layer_types",
            types,
            f"'full_attention' alone for {self.model_type} models without use_sliding_window here: "
            "choose another checkpoint",
        )


def _check_quantisation(quantisation: Mapping[str, Any]) -> None:
    """Raises BadConfig unless weights are FP8 with scales of blocks, which are read as bfloat16."""
    # Only the format may be left out.
    wanted: dict[str, tuple[Any, ...]] = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
    }
    for key, expected in wanted.items():
        value = quantisation.get(key)
        if value not in expected:
            raise BadConfig(
                f"quantization_config has {key} {value!r}, expected {expected[0]!r}: of quantised "
                "weights only DeepSeek's FP8 blocks are read; give the bf16 or fp32 original"
            )


def _dtype(hf: DecoderConfig) -> str:
    name = (hf.dtype or hf.torch_dtype or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise BadConfig(f"dtype is {name!r}, expected float32, bfloat16 or float16")
    return name


def refuse_unless(holds: bool, key: str, value: Any, expected: str) -> None:
    """Raises BadConfig where a value of config.json is not what the layers here can do."""
    if not holds:
        raise BadConfig(f"{key} is {value}, expected {expected}")


def check_experts(experts: Experts) -> None:
    """Raises BadConfig where Megatron cannot route so."""
    chosen = experts.per_token
    refuse_unless(
        chosen <= experts.count,
        "num_experts_per_tok",
        chosen,
        f"at most the {experts.count} experts",
    )
    if chosen == 1 and experts.normalised:
        raise BadConfig(
            "norm_topk_prob is true with num_experts_per_tok 1: every chosen expert has weight 1 "
            "then and the router no gradient, expected 2 or more experts per token"
        )
    if experts.groups > 1:
        groups = experts.groups
        wanted = experts.groups_per_token
        # Megatron scores a group by its best per_token / groups_per_token experts, transformers by
        # its best two.
        fits = wanted <= groups and experts.count % groups == 0 and chosen == 2 * wanted
        refuse_unless(
            fits,
            "n_group",
            groups,
            f"1, or groups that divide the {experts.count} experts with num_experts_per_tok "
            f"{chosen} twice topk_group {wanted}: Megatron and transformers choose groups "
            "differently otherwise",
        )

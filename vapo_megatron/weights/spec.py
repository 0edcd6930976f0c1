"""The numbers that define a model, whatever its family, read from a Hugging Face config.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor

from vapo_megatron.config.base import nearest
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.families import (
    EMBEDDING,
    FAMILIES,
    FINAL_NORM,
    LM_HEAD,
    VALUE_HEAD_BIAS,
    VALUE_HEAD_WEIGHT,
    Family,
)
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.rules import Rule

Head = Literal["lm", "value"]

DEFAULT_THETA = 10_000.0
# longrope and dynamic change with the length of the input: Megatron's packed rotary embedding knows one fixed set of
# frequencies.
SUPPORTED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """Frequencies stretched for longer contexts: "linear" divides all by factor; "llama3" divides the low ones and
    blends up to the high ones (Llama 3.1); "yarn" blends between the channels that turn beta_fast and beta_slow times
    within the original context (arXiv 2309.00071, section 3.2), and stretches queries and keys (attention_factor)."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and rotated keys (YaRN, section 3.4)."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, dense or with a mixture of experts in every layer.

    Attributes:
        family: config.json's model_type, a key of FAMILIES.
        ffn_size: width of a dense model's gated MLP.
        vocab_size: words, padding rows aside.
        tied: whether the language-model head is the word embedding.
        max_position_embeddings: longest input for which full attention is what the model computes: at most its window.
        dtype: of the checkpoint, a torch dtype's name.
        vocab_divisible_by: Megatron's tables are padded to a multiple of this times the tensor-parallel size.
        value_outputs: of a value model's head: 1, or the bins of a histogram over values.
        num_experts, experts_per_token: experts of a layer (0: dense), and how many of them a token goes through.
        norm_topk_prob: whether the weights of a token's experts are scaled to sum up to 1.
        expert_ffn_size: width of an expert's gated MLP.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    dtype: str
    vocab_divisible_by: int = 1
    value_outputs: int = 1
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = False

    @property
    def table(self) -> Family:
        """The family's table of rules."""
        return FAMILIES[self.family]

    @property
    def query_size(self) -> int:
        """Width of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys, or values, of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype as torch's object."""
        return getattr(torch, self.dtype)

    def padded_vocab_size(self, tp_size: int) -> int:
        """Rows of the word embeddings over all tensor-parallel ranks."""
        multiple = self.vocab_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple

    def vocab_shard_size(self, tp_size: int) -> int:
        """Rows of the word embeddings, and columns of logits, on a tensor-parallel rank."""
        return self.padded_vocab_size(tp_size) // tp_size

    def rope_inv_freq(self) -> Tensor:
        """Inverse frequencies of the rotary embedding, scaling included, float32, one for two channels."""
        return inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    @property
    def softmax_scale(self) -> float:
        """Scale of attention scores: 1 / sqrt(head_dim), times YaRN's factor once for queries and once for keys."""
        stretch = 1.0 if self.rope_scaling is None else self.rope_scaling.attention_factor
        return stretch**2 * self.head_dim**-0.5

    def head_rules(self, head: Head) -> tuple[Rule, ...]:
        """Rules of the output layer's own parameters; none if a language model's is tied."""
        if head == "value":
            return (VALUE_HEAD_WEIGHT, VALUE_HEAD_BIAS)
        return () if self.tied else (LM_HEAD,)

    def parameter_count(self, head: Head = "lm") -> int:
        """Parameters of the whole model, without padding rows and tied copies."""
        return self._parameter_count(head, self.num_experts)

    def active_parameter_count(self, head: Head = "lm") -> int:
        """Parameters that a token uses: of the experts, those it is routed to."""
        return self._parameter_count(head, self.experts_per_token)

    def _parameter_count(self, head: Head, experts: int) -> int:
        once = sum(rule.count(self) for rule in (EMBEDDING, FINAL_NORM, *self.head_rules(head)))
        expert = sum(rule.count(self) for rule in self.table.expert)
        layer = sum(rule.count(self) for rule in self.table.layer)
        return self.num_layers * (layer + experts * expert) + once


class _HFConfig(BaseModel):
    """The keys of config.json that are read."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

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
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    num_experts: PositiveInt | None = None
    num_local_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt = 1
    moe_intermediate_size: PositiveInt | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def read_spec(hf_dir: Path, *, vocab_divisible_by: int = 1, value_outputs: int = 1) -> ModelSpec:
    """The spec of a Hugging Face model directory (causal LM, sequence or token classification). Raises BadInput where
    the directory or its config.json is missing, a value is missing or of the wrong kind, the family is unknown, or the
    layers here do not support a feature of the model."""
    config, path = read_config(hf_dir), hf_dir / "config.json"
    family = _family(config.get("model_type"), path)
    try:
        hf = _HFConfig.model_validate({**family.defaults, **config})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        value = "missing" if first["type"] == "missing" else repr(first["input"])
        raise BadInput(f"{path}: {key} is {value}, expected {first['msg'].removeprefix('Input should be ')}") from None
    _check_representable(hf, family, path)
    kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    head_dim = hf.head_dim or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % kv_heads or head_dim % 2:
        raise BadInput(
            f"{path}: num_attention_heads {hf.num_attention_heads}, num_key_value_heads {kv_heads}, head_dim "
            f"{head_dim}: the second must divide the first and head_dim must be even"
        )
    theta, scaling = read_rope(config, str(path))
    longest = hf.max_position_embeddings
    if hf.use_sliding_window and hf.sliding_window:
        longest = min(longest, hf.sliding_window)
    return ModelSpec(
        family=family.model_type,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        tied=hf.tie_word_embeddings,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=longest,
        dtype=_dtype(hf, path),
        vocab_divisible_by=vocab_divisible_by,
        value_outputs=value_outputs,
        **(_experts(hf, path) if family.expert else {}),
    )


def _family(model_type: Any, path: Path) -> Family:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    near = nearest(str(model_type), FAMILIES) if model_type else None
    hint = f", the nearest being {near}" if near else ""
    raise BadInput(f"{path}: model_type is {model_type!r}, expected one of {', '.join(sorted(FAMILIES))}{hint}")


def _check_representable(hf: _HFConfig, family: Family, path: Path) -> None:
    for key, value, expected in (
        ("hidden_act", hf.hidden_act, "silu"),
        ("attention_bias", hf.attention_bias and not family.qkv_bias, False),
        ("mlp_bias", hf.mlp_bias, False),
    ):
        if value != expected:
            raise BadInput(
                f"{path}: {key} is {value!r}, expected {expected!r} for {family.model_type} models here: "
                "choose another checkpoint"
            )
    if hf.quantization_config is not None:
        raise BadInput(
            f"{path}: quantization_config is set: quantised weights cannot be trained; give the bf16 or fp32 original"
        )


def _experts(hf: _HFConfig, path: Path) -> dict[str, Any]:
    """The spec's fields of a mixture of experts. transformers 5 calls their number num_local_experts."""
    count, chosen = hf.num_experts or hf.num_local_experts, hf.num_experts_per_tok
    if count is None or hf.moe_intermediate_size is None:
        key = "num_experts" if count is None else "moe_intermediate_size"
        raise BadInput(f"{path}: {key} is missing, expected a positive number for a model with experts")
    for key, value, expected in (
        ("decoder_sparse_step", hf.decoder_sparse_step, 1),
        ("mlp_only_layers", hf.mlp_only_layers or [], []),
    ):
        if value != expected:
            expectation = f"expected {expected}: every layer must have experts; choose another checkpoint"
            raise BadInput(f"{path}: {key} is {value}, {expectation}")
    if chosen > count:
        raise BadInput(f"{path}: num_experts_per_tok is {chosen}, expected at most the {count} experts")
    if chosen == 1 and hf.norm_topk_prob:
        raise BadInput(
            f"{path}: norm_topk_prob is true with num_experts_per_tok 1: every chosen expert has weight 1 then and the "
            "router no gradient, expected 2 or more experts per token"
        )
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_ffn_size": hf.moe_intermediate_size,
        "norm_topk_prob": hf.norm_topk_prob,
    }


def _dtype(hf: _HFConfig, path: Path) -> str:
    name = (hf.dtype or hf.torch_dtype or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise BadInput(f"{path}: dtype is {name!r}, expected float32, bfloat16 or float16")
    return name


def read_rope(config: Mapping[str, Any], path: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of a config.json: rope_theta and rope_scaling (transformers 4) or rope_parameters (5). Raises
    BadInput where a number is missing, or Megatron cannot represent the scaling."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise BadInput(f"{path}: rope_parameters is {parameters!r}, expected an object such as {{'rope_theta': 1e6}}")
    if isinstance(parameters.get("full_attention"), Mapping):
        parameters = parameters["full_attention"]
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1:
        raise BadInput(f"{path}: partial_rotary_factor is {share!r}, expected 1.0: choose another checkpoint")
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SUPPORTED:
        raise BadInput(
            f"{path}: rope scaling {kind!r} cannot be represented in Megatron, which takes {', '.join(SUPPORTED)}; "
            "choose a checkpoint without it or remove it from the file"
        )

    def number(key: str, default: Any = None) -> float:
        value = parameters.get(key, config.get(key, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise BadInput(f"{path}: {key} of the rotary embedding is {value!r}, expected a number above 0")
        return value

    theta = float(number("rope_theta", DEFAULT_THETA))
    if kind == "default":
        return theta, None
    values: dict[str, Any] = {"factor": number("factor")}
    if kind != "linear":
        context = number("original_max_position_embeddings", config.get("max_position_embeddings"))
        values["original_max_position_embeddings"] = int(context)
    if kind == "llama3":
        values |= {key: number(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        values |= {"beta_fast": number("beta_fast", 32.0), "beta_slow": number("beta_slow", 1.0)}
        values["truncate"] = bool(parameters.get("truncate", True))
    scaling = RopeScaling(kind, **values)
    for key in ("attention_factor", "mscale", "mscale_all_dim") if kind == "yarn" else ():
        value = parameters.get(key)
        if value is not None and not (key == "attention_factor" and math.isclose(value, scaling.attention_factor)):
            raise BadInput(
                f"{path}: {key} of YaRN is {value!r}, and queries and keys are always scaled by 0.1 ln(factor) + 1: "
                "choose a checkpoint without it"
            )
    return theta, scaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each pair of channels, float32 [head_dim / 2], on the CPU; scaled as transformers does."""
    if scaling is None:
        return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters={"rope_theta": theta, **asdict(scaling)},
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    frequencies: Tensor = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")[0]
    return frequencies

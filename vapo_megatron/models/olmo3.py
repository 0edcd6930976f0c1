"""OLMo 3: norms after attention and MLP alone, norms over all heads of queries and keys,
windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from vapo_megatron.models.family import DecoderConfig, Family, refuse_unless
from vapo_megatron.models.layers import GatedMlp, Layer, SelfAttention
from vapo_megatron.models.parts import LAYER, gated_mlp, norm, self_attention
from vapo_megatron.models.rotary import (
    BadConfig,
    RopeScaling,
    Rotary,
    check_rope_by_layer_type,
    read_rope,
    rope_parameters,
)

LayerType = Literal["sliding_attention", "full_attention"]
_WINDOWED = 4  # the last of so many layers has no window, where the file does not say


class Config(DecoderConfig):
    """layer_types names the layers with a window; these never scale their rotary embedding."""

    default_theta: ClassVar[float] = 500_000.0

    rms_norm_eps: PositiveFloat = 1e-5
    sliding_window: PositiveInt | None = 4096
    layer_types: list[LayerType] | None = None


def layers(config: Config) -> tuple[Layer, ...]:
    """With a window and without."""
    count = config.num_hidden_layers
    types: list[LayerType] = config.layer_types or [
        "full_attention" if (layer + 1) % _WINDOWED == 0 else "sliding_attention"
        for layer in range(count)
    ]
    refuse_unless(len(types) == count, "layer_types", types, f"one for each of {count} layers")
    check_rope_by_layer_type(config.raw)
    full = config.self_attention(qk_norm="all")
    local = replace(full, window=config.sliding_window, rotary=_local_rotary(config, full))
    kinds = {"full_attention": _layer(config, full), "sliding_attention": _layer(config, local)}
    return tuple(kinds[kind] for kind in types)


def _local_rotary(config: Config, full: SelfAttention) -> Rotary:
    base = config.default_theta
    if "sliding_attention" in rope_parameters(config.raw):
        theta, scaling = _read_local_rope(config.raw)
        return Rotary(theta, full.head_dim, scaling)
    assert full.rotary is not None
    refuse_unless(
        full.rotary.theta == base,
        "rope_theta",
        full.rotary.theta,
        f"{base:g} or rope_parameters with an entry sliding_attention: without one transformers "
        f"gives layers with a window {base:g}",
    )
    return Rotary(base, full.head_dim)


def _read_local_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of layers with a window, which never have the base beside them."""
    return read_rope({**config, "rope_theta": Config.default_theta}, "sliding_attention")


def _layer(config: Config, attention: SelfAttention) -> Layer:
    hidden = config.hidden_size
    rules = (
        *self_attention(hidden, attention),
        norm("self_attn_bda.norm", LAYER + "post_attention_layernorm", hidden),
        *gated_mlp(hidden, config.intermediate_size),
        norm("mlp_bda.norm", LAYER + "post_feedforward_layernorm", hidden),
    )
    mlp = GatedMlp(config.intermediate_size)
    return Layer(attention, mlp, rules, norm_before=False, norm_after=True)


def engine_config(config: dict[str, Any]) -> dict[str, Any]:
    """With flat rotary settings, of the layers without a window. SGLang reads no others, and
    scales layers with a window never."""
    parameters = rope_parameters(config)
    full, local = (parameters.get(kind) for kind in ("full_attention", "sliding_attention"))
    if not isinstance(full, Mapping):
        return config
    theta, _ = read_rope(config, default_theta=Config.default_theta)
    local_theta, local_scaling = _read_local_rope(config)
    if local_theta != theta or local_scaling is not None:
        raise BadConfig(
            f"rope_parameters of sliding_attention are {local}, expected rope_theta "
            f"{theta:g} without scaling, as SGLang has one base: choose another checkpoint"
        )
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    flat = {"rope_theta": theta, "rope_scaling": scaling}
    if scaling.get("rope_type", "default") == "default":
        flat["rope_scaling"] = None
    return {key: value for key, value in config.items() if key != "rope_parameters"} | flat


def tiny(shape: Any) -> dict[str, Any]:
    """With a window that a short text leaves."""
    return {"sliding_window": 16}


FAMILY = Family("olmo3", "Olmo3", Config, layers, tiny=tiny, engine_config=engine_config)

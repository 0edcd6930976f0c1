"""Rotary position embeddings as config.json describes them, in every spelling that transformers has used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vapo_megatron.errors import BadInput

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
        """By which rotated queries, and rotated keys, are multiplied (YaRN, section 3.4)."""
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0


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
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
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
    if kind == "linear":
        return theta, RopeScaling("linear", number("factor"))
    factor = number("factor")
    original = int(number("original_max_position_embeddings", config.get("max_position_embeddings")))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        return theta, RopeScaling("llama3", factor, low, high, original)
    return theta, RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
    )


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each pair of channels, float32 [head_dim / 2], on the CPU. Source: transformers'
    modeling_rope_utils, operation by operation, so that both round alike."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = 1 - _yarn_ramp(head_dim, theta, scaling)
        return 1.0 / (scaling.factor * theta**exponents) * (1 - kept) + frequencies * kept
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    share = (length / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(wavelengths > length / low, frequencies / scaling.factor, frequencies)
    medium = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(medium, blended, stretched)


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Share by which each pair of channels is stretched: 0 for those that turn fast, 1 for those that turn slowly."""

    def channel(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return (head_dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    return torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)

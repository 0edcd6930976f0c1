"""Rotary embeddings: which channels of a head are turned, and by how much at each position."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

DEFAULT_THETA = 10_000.0
# dynamic changes with the length of every input; longrope has one set of frequencies up to the
# original context, and longer inputs are refused.
SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"


class BadConfig(ValueError):
    """What is wrong with a config.json, in one line without its path: key, value, what was
    expected."""


@dataclass(frozen=True)
class RopeScaling:
    """Frequencies stretched for longer contexts: "linear" divides all by factor; "llama3" divides
    the low ones and blends up to the high ones (Llama 3.1); "yarn" blends between the channels that
    turn beta_fast and beta_slow times within the original context (arXiv 2309.00071, section 3.2),
    and stretches queries and keys (attention_factor), unless the file undoes that."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    stretches: bool = True

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and rotated keys (YaRN, section 3.4)."""
        if not self.stretches:
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0


@dataclass(frozen=True)
class LongRope(RopeScaling):
    """Each pair of channels has its own divisor (arXiv 2402.13753): a short one for inputs up to
    the original context. Queries and keys are stretched as for the extended one.

    Attributes:
        short_factor: a divisor for each pair.
    """

    short_factor: tuple[float, ...] = ()

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and rotated keys (section 4.2)."""
        context = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(context)) if self.factor > 1 else 1.0


@dataclass(frozen=True)
class PositionScale:
    """Queries grow with their position: times 1 + beta ln(1 + floor(position / context))."""

    beta: float
    context: int

    def of(self, positions: Tensor) -> Tensor:
        """Factors of queries at these positions, float32 of the same shape."""
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.context))


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a layer.

    Attributes:
        theta: base of the frequencies.
        channels: how many of a head's channels are turned, the first ones; an even number.
        scaling: for longer contexts, or None.
        interleaved: whether a pair of turned channels are neighbours; otherwise they are half of
            `channels` apart.
        query_scale: of rotated queries, or None.
    """

    theta: float
    channels: int
    scaling: RopeScaling | None = None
    interleaved: bool = False
    query_scale: PositionScale | None = None

    def inv_freq(self) -> Tensor:
        """Radians a position for each pair of turned channels, scaling included, float32 [channels
        / 2]."""
        return inverse_frequencies(self.channels, self.theta, self.scaling)

    @property
    def stretch(self) -> float:
        """Factor of turned queries, and of turned keys."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's rope_parameters (transformers 5) or rope_scaling (4), possibly by layer type;
    empty where it has neither. Raises BadConfig where they are not an object, or differ."""
    newer, older = (_rope_object(config, key) for key in ("rope_parameters", "rope_scaling"))
    # transformers then reads rope_scaling, and the base beside it.
    if newer and older and newer != {"rope_theta": config.get("rope_theta")} | older:
        raise BadConfig(
            f"rope_scaling is {older} beside rope_parameters {newer}, expected one of them: put "
            "what is meant into rope_parameters and remove rope_scaling"
        )
    return newer or older


def _rope_object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadConfig(f"{key} is {value!r}, expected an object such as {{'rope_theta': 1e6}}")
    return dict(value)


def check_rope_by_layer_type(config: Mapping[str, Any]) -> None:
    """Raises BadConfig where transformers would not read what a config.json says of the rotary
    embedding, in a family with a table for each type of layer."""
    newer, older = (_rope_object(config, key) for key in ("rope_parameters", "rope_scaling"))
    if newer and not {"full_attention", "sliding_attention"} & newer.keys():
        raise BadConfig(
            f"rope_parameters is {newer}, expected entries full_attention and sliding_attention: "
            "transformers reads no others"
        )
    if older and "rope_type" not in older:
        raise BadConfig(
            f"rope_scaling is {older}, expected a rope_type in it: transformers reads no other name"
        )


def read_rope(
    config: Mapping[str, Any],
    layer_type: str = "full_attention",
    default_theta: float = DEFAULT_THETA,
) -> tuple[float, RopeScaling | None]:
    """Base and scaling of a config.json: rope_theta and rope_scaling (transformers 4) or
    rope_parameters (5), layer_type's where the file has several. default_theta: base where
    it has none. Raises BadConfig where a number is missing, or Megatron cannot represent the
    scaling."""
    parameters = rope_parameters(config)
    beside = config
    if isinstance(parameters.get(layer_type), Mapping):
        parameters = parameters[layer_type]
        beside = {key: value for key, value in config.items() if key != _ORIGINAL}
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in SUPPORTED or (kind == "longrope" and beside is not config):
        raise BadConfig(
            f"rope scaling {kind!r} cannot be represented in Megatron, which takes "
            f"{', '.join(SUPPORTED)}; choose a checkpoint without it or remove it from the file"
        )

    def number(key: str, default: Any = None) -> float:
        value = parameters.get(key, beside.get(key, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise BadConfig(
                f"{key} of the rotary embedding is {value!r}, expected a number above 0"
            )
        return value

    theta = float(number("rope_theta", default_theta))
    if kind == "default":
        return theta, None
    values: dict[str, Any] = {} if kind == "longrope" else {"factor": number("factor")}
    if kind != "linear":
        context = number(_ORIGINAL, config.get("max_position_embeddings"))
        if beside.get(_ORIGINAL, context) != context:
            raise BadConfig(
                f"{_ORIGINAL} is {beside[_ORIGINAL]} beside the rotary embedding's own {context}, "
                "expected the same: transformers reads the former, most engines the latter"
            )
        values[_ORIGINAL] = int(context)
    if kind == "longrope":
        return theta, _long_rope(parameters, config["max_position_embeddings"], values[_ORIGINAL])
    if kind == "llama3":
        values |= {key: number(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        values |= {"beta_fast": number("beta_fast", 32.0), "beta_slow": number("beta_slow", 1.0)}
        values["truncate"] = bool(parameters.get("truncate", True))
        mscales = (parameters.get("mscale"), parameters.get("mscale_all_dim"))
        # transformers then divides the factor by itself.
        values["stretches"] = not (mscales[0] and mscales[0] == mscales[1])
    scaling = RopeScaling(kind, **values)
    if kind == "yarn":
        _check_yarn_factor(parameters, scaling)
    return theta, scaling


def _long_rope(parameters: Mapping[str, Any], longest: float, context: int) -> LongRope:
    """Raises BadConfig where a number is missing, or SGLang would not read it."""
    divisors = parameters.get("short_factor")
    numbers = divisors if isinstance(divisors, list) else []
    if not numbers or not all(isinstance(x, int | float) and x > 0 for x in numbers):
        raise BadConfig(f"short_factor of longrope is {divisors!r}, expected numbers above 0")
    factor = longest / context
    scaling = LongRope(
        "longrope", factor, original_max_position_embeddings=context, short_factor=tuple(numbers)
    )
    stretch = scaling.attention_factor
    expected = {"factor": factor, "attention_factor": stretch}
    expected |= dict.fromkeys(("short_mscale", "long_mscale"), stretch)
    for key, known in expected.items():
        value = parameters.get(key)
        if value is not None and not math.isclose(value, known):
            raise BadConfig(
                f"{key} of longrope is {value!r}, expected {known:g} or none: transformers and "
                "SGLang do not both read it"
            )
    return scaling


def fixed_context(config: Mapping[str, Any]) -> int | None:
    """The longest input for which a config.json's frequencies are those that read_rope gives; None:
    any."""
    parameters = rope_parameters(config)
    if "longrope" not in (parameters.get("rope_type"), parameters.get("type")):
        return None
    _, scaling = read_rope(config)
    return None if scaling is None else scaling.original_max_position_embeddings


def _check_yarn_factor(parameters: Mapping[str, Any], scaling: RopeScaling) -> None:
    keys = ("attention_factor", "mscale", "mscale_all_dim")
    for key in keys if scaling.stretches else keys[:1]:
        value = parameters.get(key)
        is_default = key == "attention_factor" and value is not None
        if value is None or (is_default and math.isclose(value, scaling.attention_factor)):
            continue
        raise BadConfig(
            f"{key} of YaRN is {value!r}, and queries and keys are always scaled by 0.1 ln(factor) "
            "+ 1: choose a checkpoint without it"
        )


def turned_channels(config: Mapping[str, Any], head_dim: int, default: float = 1.0) -> int:
    """How many of a head's channels a config.json turns: partial_rotary_factor in either spelling,
    or default. Raises BadConfig where it is no share, or gives no even number of channels."""
    parameters = rope_parameters(config)
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", default))
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise BadConfig(
            f"partial_rotary_factor is {share!r}, expected a number above 0 and up to 1"
        )
    channels = int(head_dim * share)
    if channels == 0 or channels % 2:
        raise BadConfig(
            f"partial_rotary_factor {share} of head_dim {head_dim} is {channels} channels, "
            "expected an even number"
        )
    return channels


def inverse_frequencies(channels: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position for each pair of channels, float32 [channels / 2], on the CPU; scaled as
    transformers does."""
    if scaling is None:
        exponents = torch.arange(0, channels, 2, dtype=torch.int64, device="cpu").float()
        return 1.0 / (theta ** (exponents / channels))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters={"rope_theta": theta, "long_factor": (), **asdict(scaling)},
        head_dim=channels,
        hidden_size=channels,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    frequencies: Tensor = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")[0]
    return frequencies

"""FP8 weights with a scale for each block of 128 x 128, as in DeepSeek-V3's checkpoints (arXiv
2412.19437, 3.3).

A quantised tensor W [rows, columns] becomes two: e4m3 values Q under W's name, and float32 scales
S [ceil(rows / 128), ceil(columns / 128)] under that name with "_scale_inv": W is Q * S, block by
block.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.errors import BadInput
from vapo_megatron.models.family import FP8_BLOCK
from vapo_megatron.models.layers import LatentAttention
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.models.stacked_experts import Stacked
from vapo_megatron.weights.bucket import NamedTensors

BLOCK = FP8_BLOCK
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class BlockFp8:
    """How weights are quantised.

    Attributes:
        weights: Hugging Face names of the linear layers' weights, with "{layer}" and "{expert}" for
            indices. Embeddings, output layer, router, norms and biases stay as they are.
        power_of_two: rounds scales up to powers of two, as Transformer Engine's blockwise recipe
            does by default: a block then has the values that the trainer's own matrix products use,
            provided it is a block there too (docs/weight_sync.md).
    """

    weights: tuple[str, ...]
    power_of_two: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, power_of_two: bool = False) -> "BlockFp8":
        """The linear layers of a model."""
        linear = (name for rule in spec.layer_rules if rule.is_linear for name in rule.hf)
        return cls(tuple(dict.fromkeys(linear)), power_of_two)

    def covers(self, name: str) -> bool:
        """Whether a Hugging Face tensor is quantised."""
        return self._pattern.fullmatch(name) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        names = (
            re.escape(name).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+")
            for name in self.weights
        )
        return re.compile("|".join(names))

    def convert(self, buckets: Iterable[NamedTensors]) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets in which values and scales replace the quantised tensors; the results are new
        tensors."""
        for bucket in buckets:
            converted: list[tuple[str, Tensor]] = []
            for name, tensor in bucket:
                if self.covers(name):
                    values, scales = quantize(tensor, self.power_of_two)
                    converted += [(name, values), (name + SCALE_SUFFIX, scales)]
                else:
                    converted.append((name, tensor))
            yield converted

    def config(self) -> dict[str, Any]:
        """quantization_config of config.json."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }


def quantize(weight: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """A weight [rows, columns] of floating point as values [rows, columns] and scales (see above),
    on its device. The scale of a block is its largest magnitude / 448; of a block of zeros 1."""
    rows, columns = weight.shape
    padding = (0, -columns % BLOCK, 0, -rows % BLOCK)
    # The only copy in float32: a weight sync has little memory beside the model.
    whole = F.pad(weight.float(), padding) if any(padding) else weight.to(torch.float32, copy=True)
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [R, 128, C, 128]
    largest = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    scales = largest / LARGEST
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(
            torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype)
        )
    scales = torch.where(largest > 0, scales, torch.ones_like(scales))
    values = blocks.div_(scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(FP8)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scales


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """The weight [rows, columns] that values and scales stand for, in float32."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * spread


def check_blocks(
    spec: ModelSpec, engine_tp: int, expert_tp: int | None = None, attention_tp: int | None = None
) -> None:
    """Raises BadInput where a tensor-parallel rank of an engine would hold part of a block, or
    files have experts in one tensor, or attention is latent.
    expert_tp, attention_tp: ranks that an expert, or attention, is cut over; None: all of them."""
    if any(isinstance(rule, Stacked) for rule in spec.layer_rules):
        raise BadInput(
            f"rollout.quantization=fp8: the experts of {spec.family} are one tensor a layer, which "
            "is not quantised here: set rollout.quantization=none"
        )
    if spec.delta_nets:
        raise BadInput(
            f"rollout.quantization=fp8: the delta nets of {spec.family} were not tried in FP8, set "
            "rollout.quantization=none"
        )
    attention_tp = attention_tp or engine_tp
    attention = spec.attention
    if isinstance(attention, LatentAttention):
        raise BadInput(
            "rollout.quantization=fp8: engines in FP8 with latent attention, which "
            f"{spec.family} has, do not agree with the trainer on CPUs and were not run on GPUs: "
            "set rollout.quantization=none"
        )
    # Fewer heads than ranks are copied.
    keys = max(attention.kv_size, attention.head_dim * attention_tp)
    parts = [("queries", attention.query_size, attention_tp), ("keys", keys, attention_tp)]
    parts += [("feed-forward", size, engine_tp) for size in spec.mlp_sizes]
    if spec.experts is not None:
        parts.append(("feed-forward", spec.experts.size, expert_tp or engine_tp))
    for part, size, ranks in parts:
        if size % (BLOCK * ranks):
            raise BadInput(
                f"rollout.quantization=fp8: the model's {part} have {size} features, expected a "
                f"multiple of {BLOCK} x {ranks}, the GPUs of rollout.tp={engine_tp} that they are "
                "cut over: lower rollout.tp, or set rollout.quantization=none"
            )

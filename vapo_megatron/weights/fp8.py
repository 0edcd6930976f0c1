"""FP8 weights with a scale for each block of 128 x 128, as in DeepSeek-V3's checkpoints (arXiv 2412.19437, 3.3).

A quantised tensor W [rows, columns] becomes two: e4m3 values Q under W's name, and float32 scales
S [ceil(rows / 128), ceil(columns / 128)] under that name with "_scale_inv": W is Q * S, block by block.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vapo_megatron.errors import BadInput
from vapo_megatron.weights.bucket import NamedTensors
from vapo_megatron.weights.spec import ModelSpec

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SCALE_SUFFIX = "_scale_inv"

# Linear layers of the transformer. Embeddings, output layer, router, norms and biases stay as they are.
_QUANTIZED = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(experts\.\d+\.)?(gate|up|down)_proj)\.weight"
)


@dataclass(frozen=True)
class BlockFp8:
    """How weights are quantised. power_of_two rounds scales up to powers of two, as Transformer Engine's blockwise
    recipe does by default: a block then has the values that the trainer's own matrix products use, provided it is a
    block there too (docs/weight_sync.md)."""

    power_of_two: bool = False

    def covers(self, name: str) -> bool:
        """Whether a Hugging Face tensor is quantised."""
        return _QUANTIZED.fullmatch(name) is not None

    def convert(self, buckets: Iterable[NamedTensors]) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets in which values and scales replace the quantised tensors; the results are new tensors."""
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
    """A weight [rows, columns] of floating point as values [rows, columns] and scales (see above), on its device.
    The scale of a block is its largest magnitude / 448; of a block of zeros 1."""
    rows, columns = weight.shape
    padding = (0, -columns % BLOCK, 0, -rows % BLOCK)
    # The only copy in float32: a weight sync has little memory beside the model.
    whole = F.pad(weight.float(), padding) if any(padding) else weight.to(torch.float32, copy=True)
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [R, 128, C, 128]
    largest = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    scales = largest / LARGEST
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))
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
    """Raises BadInput where a tensor-parallel rank of an engine would hold part of a block. expert_tp, attention_tp:
    ranks that an expert, or attention, is cut over; None: all of them."""
    attention_tp = attention_tp or engine_tp
    for part, size, ranks in (
        ("queries", spec.query_size, attention_tp),
        # Fewer heads than ranks are copied.
        ("keys", max(spec.kv_size, spec.head_dim * attention_tp), attention_tp),
        ("feed-forward", spec.expert_ffn_size, expert_tp or engine_tp)
        if spec.num_experts
        else ("feed-forward", spec.ffn_size, engine_tp),
    ):
        if size % (BLOCK * ranks):
            raise BadInput(
                f"rollout.quantization=fp8: the model's {part} have {size} features, expected a multiple of {BLOCK} x "
                f"{ranks}, the GPUs of rollout.tp={engine_tp} that they are cut over: lower rollout.tp, or set "
                "rollout.quantization=none"
            )

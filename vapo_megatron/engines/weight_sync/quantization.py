"""How the weights of a run are quantised for its engines."""

from vapo_megatron.config.model import PrecisionConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.weights.fp8 import BlockFp8, check_blocks
from vapo_megatron.weights.spec import ModelSpec


def engine_fp8(config: RolloutConfig, precision: PrecisionConfig, spec: ModelSpec) -> BlockFp8 | None:
    """How weights are quantised for the engines: kind of scales and kept layers as the trainer's own FP8 has them.

    Transformer Engine's blockwise recipe rounds scales to powers of two.

    Raises:
        BadInput: the engine's ranks would hold parts of blocks.
    """
    if config.quantization == "none":
        return None
    check_blocks(spec, config.tp, config.tp // config.experts_on, config.tp // config.attention_parts)
    first, last = precision.bf16_layers
    kept = frozenset((*range(first), *range(spec.num_layers - last, spec.num_layers)))
    return BlockFp8(precision.fp8 == "blockwise", kept)

"""Limits of engines on a machine, checked before a server starts: GPUs, blocks and context (SGLang 0.5.23)."""

from vapo_megatron.config.model import PrecisionConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.weights.fp8 import BlockFp8, check_blocks
from vapo_megatron.weights.spec import ModelSpec

# SGLang ends a response when prompt and response are this many tokens short of its context or of its KV cache, and
# refuses a prompt that leaves fewer than this for the response (scheduler.py, tp_worker.py: max_req_len).
_KEPT_FREE = 2
_LEAST_RESPONSE = 5


def engine_devices(config: RolloutConfig, platform: Platform) -> list[range | None]:
    """The GPUs of each engine outside a run: with GPUs as many engines as rollout.tp lets share them, else
    rollout.num_engines without any (None).

    Raises:
        BadInput: tp does not divide this machine's GPUs.
    """
    count, tp = platform.device_count(), config.tp
    if count == 0:
        return [None] * config.num_engines
    check_engine_size(tp, count)
    return [range(first, first + tp) for first in range(0, count, tp)]


def engine_fp8(config: RolloutConfig, precision: PrecisionConfig, spec: ModelSpec) -> BlockFp8 | None:
    """How weights are quantised for the engines: with scales as the trainer's own FP8 has them.

    Transformer Engine's blockwise recipe rounds scales to powers of two.

    Raises:
        BadInput: the engine's ranks would hold parts of blocks.
    """
    if config.quantization == "none":
        return None
    check_blocks(spec, config.tp, config.tp // config.experts_on, config.tp // config.attention_parts)
    return BlockFp8(precision.fp8 == "blockwise")


def check_engine_size(tp: int, node_gpus: int) -> None:
    """Raises BadInput if the GPUs of a node cannot be divided into engines of this many GPUs."""
    if node_gpus % tp:
        raise BadInput(f"rollout.tp={tp} does not divide the {node_gpus} GPUs of a node: choose a divisor")


def check_context(
    max_prompt_tokens: int, key: str, max_new_tokens: int, config: RolloutConfig, model_context: int
) -> None:
    """Raises BadInput where an engine would cut the longest response short, or refuse the longest prompt.

    Args:
        max_prompt_tokens: data.max_prompt_tokens.
        key: of the config, that gives max_new_tokens.
        max_new_tokens: longest response.
        config: the rollout section.
        model_context: tokens that the model can attend to.
    """
    if config.context_length is not None and config.context_length > model_context:
        raise BadInput(
            f"rollout.context_length={config.context_length} is above the model's context of {model_context} tokens: "
            "lower it, or leave it out"
        )
    needed = max_prompt_tokens + max(max_new_tokens, _LEAST_RESPONSE) + _KEPT_FREE
    limits = {
        "the model's context": None if config.context_length is not None else model_context,
        "rollout.context_length": config.context_length,
        "rollout.max_total_tokens": config.max_total_tokens,
    }
    for name, limit in limits.items():
        if limit is not None and needed > limit:
            raise BadInput(
                f"data.max_prompt_tokens={max_prompt_tokens} and {key}={max_new_tokens} need {needed} "
                f"tokens with the {_KEPT_FREE} that an engine keeps free, {name} is {limit}: lower one of them"
                + (f", or raise {name}" if name.startswith("rollout.") else "")
            )

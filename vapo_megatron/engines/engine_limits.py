"""What an engine needs of its machine and config (SGLang 0.5.23), checked before a server
starts."""

from pathlib import Path

from vapo_megatron.config.model import PrecisionConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.models.model_files import has_quantised_files
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.fp8 import BlockFp8, check_blocks

# SGLang ends a response when prompt and response are this many tokens short of its context or of
# its KV cache (scheduler.py, tp_worker.py: max_req_len).
_KEPT_FREE = 2
# It refuses a prompt that leaves fewer tokens than this for the response.
_LEAST_RESPONSE = 5


def engine_devices(
    config: RolloutConfig, platform: Platform, of_parts: bool = False
) -> list[range | None]:
    """This machine's GPUs of each engine outside a run; of_parts: or of its part of one on several
    nodes.

    With GPUs there are as many as fit, otherwise rollout.num_engines without GPUs (None).

    Raises:
        BadInput: their GPUs do not divide this machine's, or an engine is not on it alone.
    """
    if config.nodes > 1 and not of_parts:
        raise BadInput(
            f"rollout.nodes={config.nodes}: this command starts engines on its own machine alone, "
            "set rollout.nodes=1 and rollout.tp to a divisor of its GPUs"
        )
    count = platform.device_count()
    here = config.tp // config.nodes
    if count == 0:
        return [None] * config.num_engines
    check_engine_size(config, count)
    return [range(first, first + here) for first in range(0, count, here)]


def engine_fp8(
    config: RolloutConfig, precision: PrecisionConfig, spec: ModelSpec
) -> BlockFp8 | None:
    """How weights are quantised for the engines: with the same scales as the trainer's own FP8.

    Transformer Engine's blockwise recipe rounds scales to powers of two.

    Raises:
        BadInput: the engine's ranks would hold parts of blocks.
    """
    if config.quantization == "none":
        return None
    check_blocks(
        spec, config.tp, config.tp // config.experts_on, config.tp // config.attention_parts
    )
    return BlockFp8.of(spec, precision.fp8 == "blockwise")


def check_load_format(hf_dir: Path, config: RolloutConfig) -> None:
    """Raises BadInput where engines would keep quantised weights, of which the weight sync sends
    none."""
    if config.load_format == "auto" and has_quantised_files(hf_dir):
        raise BadInput(
            f"rollout.load_format=auto: {hf_dir} has FP8 weights, which engines would read as they "
            "are, and the trainer sends others: set rollout.load_format=dummy"
        )


def check_engine_size(config: RolloutConfig, node_gpus: int, world: int | None = None) -> None:
    """Raises BadInput if a node's GPUs, or the `world` GPUs of a run, cannot be divided into the
    engines of a config."""
    tp = config.tp
    nodes = config.nodes
    if nodes == 1 and node_gpus % tp:
        several = ""
        if tp % node_gpus == 0:
            several = f", or set rollout.nodes={tp // node_gpus}"
        raise BadInput(
            f"rollout.tp={tp} does not divide the {node_gpus} GPUs of a node: choose a divisor"
            f"{several}"
        )
    if nodes > 1 and tp != nodes * node_gpus:
        raise BadInput(
            f"rollout.tp={tp} with rollout.nodes={nodes}: an engine on several nodes has all of "
            f"their GPUs, {nodes} x {node_gpus}: set rollout.tp={nodes * node_gpus}"
        )
    if world is not None and world % tp:
        raise BadInput(
            f"rollout.tp={tp} does not divide the {world} GPUs of the run: change rollout.nodes or "
            "cluster.ranks"
        )


def check_context(
    max_prompt_tokens: int,
    key: str,
    max_new_tokens: int,
    config: RolloutConfig,
    model_context: int,
    fewest: int | None = None,
) -> None:
    """Checks that no engine would cut the longest response short, or refuse the longest prompt.

    Args:
        max_prompt_tokens: data.max_prompt_tokens.
        key: the config key of max_new_tokens.
        max_new_tokens: length of the longest response, in tokens.
        config: the rollout section.
        model_context: tokens that the model can attend to.
        fewest: smallest number of tokens that a request asks for, after a prompt and the other
            tokens of the longest response; None: max_new_tokens.

    Raises:
        BadInput: it would.
    """
    if config.context_length is not None and config.context_length > model_context:
        raise BadInput(
            f"rollout.context_length={config.context_length} is above the model's context of "
            f"{model_context} tokens: lower it, or leave it out"
        )
    if fewest is None:
        fewest = max_new_tokens
    free = _KEPT_FREE + max(0, _LEAST_RESPONSE - fewest)
    needed = max_prompt_tokens + max_new_tokens + free
    limits = {
        "the model's context": None if config.context_length is not None else model_context,
        "rollout.context_length": config.context_length,
        "rollout.max_total_tokens": config.max_total_tokens,
    }
    for name, limit in limits.items():
        if limit is None or needed <= limit:
            continue
        if name.startswith("rollout."):
            alternative = f", or raise {name}"
        else:
            alternative = ""
        raise BadInput(
            f"data.max_prompt_tokens={max_prompt_tokens} and {key}={max_new_tokens} need {needed} "
            f"tokens with the {free} that an engine keeps free, {name} is {limit}: lower one "
            f"of them{alternative}"
        )

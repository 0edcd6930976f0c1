"""Whether prompts and responses fit what an engine takes."""

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput

# SGLang ends a response when prompt and response are this many tokens short of its context or of its KV cache, and
# refuses a prompt that leaves fewer than this for the response (scheduler.py, tp_worker.py: max_req_len).
_KEPT_FREE = 2
_LEAST_RESPONSE = 5


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

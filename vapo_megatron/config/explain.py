"""One line for what is wrong with a config."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vapo_megatron.config.base import known_keys, nearest

OURS = {
    # verl
    "train_batch_size": "batch.prompts_per_step",
    "n": "batch.samples_per_prompt",
    "val_kwargs.n": "data.eval.samples",
    "ppo_mini_batch_size": "algorithm.update.minibatch_size (responses; prompts with minibatch_unit=groups)",
    "ppo_epochs": "algorithm.update.epochs",
    "ppo_max_token_len_per_gpu": "actor.max_tokens_per_microbatch, or critic.max_tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "actor.max_tokens_per_microbatch, or critic.max_tokens_per_microbatch (tokens)",
    "adv_estimator": "preset, or algorithm.advantage.estimator",
    "lam": "algorithm.advantage.lambda_policy and algorithm.advantage.lambda_critic",
    "clip_ratio": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "clip_ratio_low": "algorithm.policy_loss.clip_low",
    "clip_ratio_high": "algorithm.policy_loss.clip_high",
    "clip_ratio_c": "algorithm.policy_loss.dual_clip",
    "loss_agg_mode": "algorithm.policy_loss.aggregation",
    "entropy_coeff": "algorithm.policy_loss.entropy_coef",
    "use_kl_loss": "algorithm.kl.placement",
    "use_kl_in_reward": "algorithm.kl.placement",
    "kl_loss_coef": "algorithm.kl.coef",
    "filter_groups": "algorithm.dynamic_sampling.max_rounds",
    "overlong_buffer": "algorithm.shaping.soft_overlong",
    "overlong_buffer.len": "algorithm.shaping.soft_overlong.cache_length",
    "rollout_is": "algorithm.importance_sampling.kind",
    "critic_warmup": "value_pretraining.iterations",
    "val_files": "data.eval",
    "prompt_key": "data.fields.problem",
    "max_response_length": "sampling.max_new_tokens",
    "rollout.temperature": "sampling.temperature",
    "rollout.top_p": "sampling.top_p",
    "rollout.tensor_model_parallel_size": "rollout.tp",
    "custom_reward_function": "reward.function",
    "gpu_memory_utilization": "rollout.mem_fraction_static",
    "max_model_len": "rollout.context_length",
    "param_offload": "actor.offload, or critic.offload",
    "optimizer_offload": "actor.offload, or critic.offload",
    "total_epochs": "run.steps (rollouts)",
    "total_training_steps": "run.steps",
    "nnodes": "cluster.ranks (GPUs of all nodes)",
    "n_gpus_per_node": "cluster.ranks (GPUs of all nodes)",
    "experiment_name": "run.name",
    "project_name": "monitoring.wandb (with WANDB_PROJECT in the environment)",
    "default_local_dir": "run.root",
    "logger": "monitoring.wandb",
    "resume_mode": "run.resume",
    "save_freq": "checkpoint.every",
    "test_freq": "evaluation.every",
    "val_before_train": "evaluation.before_training",
    # slime, whose arguments are typed with low lines
    "hf_checkpoint": "model.path",
    "prompt_data": "data.train",
    "input_key": "data.fields.problem",
    "label_key": "data.fields.answer",
    "custom_rm_path": "reward.function",
    "num_rollout": "run.steps",
    "rollout_batch_size": "batch.prompts_per_step",
    "n_samples_per_prompt": "batch.samples_per_prompt",
    "global_batch_size": "algorithm.update.minibatch_size",
    "rollout_max_response_len": "sampling.max_new_tokens",
    "rollout_temperature": "sampling.temperature",
    "max_tokens_per_gpu": "actor.max_tokens_per_microbatch, or critic.max_tokens_per_microbatch",
    "advantage_estimator": "preset, or algorithm.advantage.estimator",
    "lambd": "algorithm.advantage.lambda_policy and algorithm.advantage.lambda_critic",
    "eps_clip": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "eps_clip_high": "algorithm.policy_loss.clip_high",
    "eps_clip_c": "algorithm.policy_loss.dual_clip",
    "value_clip": "algorithm.value_loss.clip",
    "use_tis": "algorithm.importance_sampling.kind",
    "num_critic_only_steps": "value_pretraining.iterations",
    "critic_lr": "critic.optimizer.lr",
    "save_interval": "checkpoint.every",
    "eval_interval": "evaluation.every",
    "n_samples_per_eval_prompt": "data.eval.samples",
    # NeMo RL
    "num_prompts_per_step": "batch.prompts_per_step",
    "num_generations_per_prompt": "batch.samples_per_prompt",
    "train_global_batch_size": "algorithm.update.minibatch_size",
    "generation.max_new_tokens": "sampling.max_new_tokens",
    "ratio_clip_min": "algorithm.policy_loss.clip_low",
    "ratio_clip_max": "algorithm.policy_loss.clip_high",
    "ratio_clip_c": "algorithm.policy_loss.dual_clip",
    "reference_policy_kl_penalty": "algorithm.kl.coef",
}


def named_here(key: str) -> str | None:
    """What is said of a key that another trainer has: its name here, or why there is none; None for other keys."""
    name, last_two = key.rpartition(".")[2], ".".join(key.split(".")[-2:])
    if "lora" in key.split(".") or name.startswith("lora_"):
        return "here adapters are model.adapter, trained with actor.kind=adapter or critic.kind=adapter: docs/lora.md"
    if name == "val_only":
        return "evaluation alone is a command: vapo-megatron evaluate CONFIG --checkpoint final"
    if (ours := OURS.get(last_two) or OURS.get(name)) is not None:
        return f"here it is {ours}"
    if key.partition(".")[0] in ("actor_rollout_ref", "trainer"):
        return "it looks like one of verl's: docs/glossary.md has the names here"
    return None


LONGEST_VALUE = 60
# Keys too many or too few that one who wrote a config for this command may have misspelt.
_MISSPELT = 3


def explain(
    error: ValidationError, model: type[BaseModel], values: Any, source: str, overridden: Sequence[str] = ()
) -> str:
    """The first of the errors that validating `values` as `model` gave, and how many more there are.

    source names the file the values come from; keys in overridden (dotted) came from the command line instead.
    """
    # A union reports one error for each of its members: together they are one mistake of the user.
    mistakes: dict[str, list[ErrorDetails]] = {}
    for details in error.errors():
        mistakes.setdefault(_dotted(details, values), []).append(details)
    key, first = next(iter(mistakes.items()))
    by_hand = any(_covers(key, override) if key else f"{override}=" in first[0]["msg"] for override in overridden)
    origin = "override" if by_hand else source
    strange = sum(errors[0]["type"] in ("extra_forbidden", "missing") for errors in mistakes.values())
    doubt = ": is it the config of another command?" if strange > _MISSPELT and not by_hand else ""
    more = f" (and {len(mistakes) - 1} more{doubt})" if len(mistakes) > 1 else ""
    return f"{origin}: {' '.join(_sentence(key, first, model).split())}{more}"


def _sentence(key: str, errors: Sequence[ErrorDetails], model: type[BaseModel]) -> str:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}; {_hint(key, known_keys(model))}"
    if first["type"] == "missing":
        return f"missing key {key}: give it a value"
    if first["type"] in ("value_error", "assertion_error"):
        sentence = first["msg"].partition(", ")[2]
        return f"{key}: {sentence}" if key else sentence
    expected = dict.fromkeys(_expectation(details) for details in errors)
    key, value = _with_entry(key), repr(first["input"])
    value = value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "..."
    return f"{key} is {value}; expected {' or '.join(expected)}"


def _expectation(details: ErrorDetails) -> str:
    if details["type"] in ("path_type", "string_type"):
        return f"a {'path' if details['type'] == 'path_type' else 'text'} (quote it: key='\"...\"' on a command line)"
    if details["type"] == "int_parsing_size":
        return "a smaller integer"
    if details["type"] == "model_type":
        return "a section of keys"
    return details["msg"].removeprefix("Value error, ").removeprefix("Input should be ").partition(", unable to ")[0]


def _with_entry(key: str) -> str:
    """The key, and in words which entry of a list it means: data.eval.7.limit (entry 8 of data.eval)."""
    parts = key.split(".")
    counted = [depth for depth, part in enumerate(parts) if part.isdigit()]
    return f"{key} (entry {int(parts[counted[-1]]) + 1} of {'.'.join(parts[: counted[-1]])})" if counted else key


def _hint(key: str, known: Sequence[str]) -> str:
    if (elsewhere := named_here(key)) is not None:
        return elsewhere
    guess = nearest(key, known)
    if guess is not None:
        return f"did you mean {guess}?"
    section = key.rpartition(".")[0]
    while section and section not in known:
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    names = [name.removeprefix(prefix) for name in known if name.startswith(prefix) and "." not in name[len(prefix) :]]
    return f"known keys {'of ' + section if section else 'at the top'}: {', '.join(names)}"


def _dotted(details: ErrorDetails, values: Any) -> str:
    """The user's key for pydantic's location, which also names the members of unions it tried on the way."""
    parts: list[str] = []
    last = len(details["loc"]) - 1
    for depth, part in enumerate(details["loc"]):
        is_entry = isinstance(values, list) and isinstance(part, int)
        if is_entry or (isinstance(values, Mapping) and part in values):
            values = values[part]
        elif not (depth == last and details["type"] == "missing"):
            continue
        parts.append(str(part))
    if details["type"] == "extra_forbidden":
        # A mistyped section is reported as a whole: follow it down to the key, where there is just one.
        while isinstance(values, Mapping) and len(values) == 1:
            name, values = next(iter(values.items()))
            parts.append(str(name))
    return ".".join(parts)


def _covers(key: str, given: str) -> bool:
    return key == given or key.startswith(given + ".") or given.startswith(key + ".")

"""What can be known to fail before anything is started is found here."""

import os
import shutil
from pathlib import Path

from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.experience.prompts import eval_prompts, train_prompts
from vapo_megatron.experience.tokenizer import TextTokenizer
from vapo_megatron.mcore.layer_spec import uses_transformer_engine
from vapo_megatron.mcore.mesh import check_layout
from vapo_megatron.mcore.model import check_model_layout
from vapo_megatron.mcore.platform import current_platform
from vapo_megatron.training.sft import load_demonstrations
from vapo_megatron.weights.spec import ModelSpec, read_spec

# Metrics, samples, logs and a report; checkpoints come on top.
_ROOM_BYTES = 64 << 20


def check_train(config: TrainConfig, world_size: int) -> None:
    """Raises BadInput for anything in a training config that cannot work with these files on this many ranks."""
    spec = read_spec(Path(config.model.path))
    for name, section in (("actor", config.actor), ("critic", config.critic)):
        if name == "actor" or config.algorithm.uses_critic:
            check_layout(section.layout, world_size, name)
            check_model_layout(spec, section.layout, name)
    uses_transformer_engine(config.model.attention, current_platform())
    check_rollout_groups(config, world_size)
    check_lengths(config, spec)
    if config.algorithm.uses_critic and config.critic.init_path:
        read_spec(Path(config.critic.init_path))
    tokenizer = TextTokenizer(Path(config.model.path), config.data.prompt)
    train_prompts(config.data, tokenizer)
    for evaluation in config.data.eval:
        eval_prompts(evaluation, config.data, tokenizer)
    check_room(Path(config.run.directory), checkpoint_bytes(config, spec))


def check_sft(config: SftConfig, world_size: int) -> None:
    """Raises BadInput for anything in a fine-tuning config that cannot work."""
    spec = read_spec(Path(config.model.path))
    check_layout(config.actor.layout, world_size, "actor")
    check_model_layout(spec, config.actor.layout, "actor")
    uses_transformer_engine(config.model.attention, current_platform())
    load_demonstrations(config)
    check_room(Path(config.run.directory), spec.parameter_count() * bytes_per_weight(config.model.dtype))


def check_lengths(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises BadInput where prompt and response cannot fit the model's context or a micro-batch."""
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if longest > spec.max_position_embeddings:
        raise BadInput(
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + sampling.max_new_tokens "
            f"{config.sampling.max_new_tokens} = {longest} is above the model's context of "
            f"{spec.max_position_embeddings} tokens: lower one of them"
        )
    for name, section in (("actor", config.actor), ("critic", config.critic)):
        room = section.max_tokens_per_microbatch * section.layout.cp
        if longest > room:
            raise BadInput(
                f"{name}.max_tokens_per_microbatch {section.max_tokens_per_microbatch} x cp {section.layout.cp} = "
                f"{room} is below the longest sample, data.max_prompt_tokens + sampling.max_new_tokens = {longest}: "
                f"raise it, or {name}.layout.cp"
            )


def check_rollout_groups(config: TrainConfig, world_size: int) -> None:
    """Raises BadInput where engines cannot share the accelerators of the ranks."""
    if current_platform().is_cuda and world_size % config.rollout.tp:
        raise BadInput(
            f"rollout.tp={config.rollout.tp} does not divide the {world_size} ranks of the run: choose a divisor"
        )


def bytes_per_weight(dtype: str) -> int:
    """Bytes of one weight in a checkpoint."""
    return 2 if dtype == "bfloat16" else 4


def checkpoint_bytes(config: TrainConfig, spec: ModelSpec) -> int:
    """Bytes that the last export takes at least."""
    models = 2 if config.algorithm.uses_critic and config.export.critic else 1
    return models * spec.parameter_count() * bytes_per_weight(config.model.dtype)


def check_room(run_dir: Path, wanted: int) -> None:
    """Raises BadInput where the run directory cannot be written or its disk has too little room for the results."""
    parent = run_dir
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise BadInput(f"run.root: {parent} cannot be written: choose a folder that this user may write")
    free = shutil.disk_usage(parent).free
    if free < wanted + _ROOM_BYTES:
        raise BadInput(
            f"run.root: {parent} has {free / 2**30:.2f} GiB free, the run needs at least "
            f"{(wanted + _ROOM_BYTES) / 2**30:.2f} GiB: make room, or set run.root to another disk"
        )

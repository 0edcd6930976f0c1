"""How large what a run leaves on the disk will be, before there is any of it."""

from vapo_megatron.config.train import TrainConfig

# Of a parameter, saved: the main weight and both moments in fp32; float32 models save their weights twice so.
OPTIMIZER_BYTES = 12


def bytes_per_weight(dtype: str) -> int:
    """Bytes of one weight in a checkpoint."""
    return 2 if dtype == "bfloat16" else 4


def checkpoint_bytes(config: TrainConfig, parameters: int) -> int:
    """Bytes of one checkpoint: weights and optimizer of actor and critic, which have so many parameters each."""
    trained = [config.actor, *([config.critic] if config.algorithm.uses_critic else [])]
    return parameters * sum(bytes_per_weight(model.dtype(config.model)) + OPTIMIZER_BYTES for model in trained)


def run_bytes(config: TrainConfig, parameters: int) -> int:
    """Bytes that the last export and the checkpoint take at least: those that stay, and the one being written."""
    saves = config.checkpoint
    exported = 2 if config.algorithm.uses_critic and config.export.critic else 1
    checkpoints = (
        saves.keep.last + 1 if saves.every is not None or saves.every_minutes is not None else int(saves.at_end)
    )
    return exported * parameters * bytes_per_weight(config.model.dtype) + checkpoints * checkpoint_bytes(
        config, parameters
    )

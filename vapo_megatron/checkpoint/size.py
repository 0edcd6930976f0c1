"""How large what a run leaves on the disk will be, before there is any of it."""

from collections.abc import Mapping

from vapo_megatron.config.train import TrainConfig

# Of a parameter, saved: the main weight and both moments in fp32; float32 models save their weights twice so.
OPTIMIZER_BYTES = 12


def bytes_per_weight(dtype: str) -> int:
    """Bytes of one weight in a checkpoint."""
    return 2 if dtype == "bfloat16" else 4


def checkpoint_bytes(config: TrainConfig, parameters: Mapping[str, int]) -> int:
    """Bytes of one checkpoint: weights and optimizer of actor and critic, whose parameters are counted by name, and
    weights of a reference that is replaced."""
    widths = {name: bytes_per_weight(config.trainable(name).dtype(config.model)) for name in parameters}
    reference = parameters["actor"] * widths["actor"] if config.algorithm.saves_reference else 0
    return sum(count * (widths[name] + OPTIMIZER_BYTES) for name, count in parameters.items()) + reference


def run_bytes(config: TrainConfig, parameters: Mapping[str, int]) -> int:
    """Bytes that the last export and the checkpoint take at least: those that stay, and the one being written.

    parameters: of each model that is trained, by name.
    """
    saves = config.checkpoint
    exported = sum(count for name, count in parameters.items() if name == "actor" or config.export.critic)
    checkpoints = (
        saves.keep.last + 1 if saves.every is not None or saves.every_minutes is not None else int(saves.at_end)
    )
    return exported * bytes_per_weight(config.model.dtype) + checkpoints * checkpoint_bytes(config, parameters)

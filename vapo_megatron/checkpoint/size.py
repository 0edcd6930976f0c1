"""How large what a run leaves on the disk will be, before there is any of it."""

from collections.abc import Mapping

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.weights.adapters import adapter_parameter_count
from vapo_megatron.weights.spec import ModelSpec

# Of a parameter, saved: the main weight and both moments in fp32; float32 models save their weights twice so.
OPTIMIZER_BYTES = 12


def bytes_per_weight(dtype: str) -> int:
    """Bytes of one weight in a checkpoint."""
    return 2 if dtype == "bfloat16" else 4


def checkpoint_bytes(config: TrainConfig, parameters: Mapping[str, int]) -> int:
    """Bytes of one checkpoint: weights and optimizer of what is trained of actor and critic, counted by name
    (trained_parameters), and weights of a reference that is replaced."""
    widths = {name: bytes_per_weight(config.trainable(name).dtype(config.model)) for name in parameters}
    reference = parameters["actor"] * widths["actor"] if config.algorithm.saves_reference else 0
    return sum(count * (widths[name] + OPTIMIZER_BYTES) for name, count in parameters.items()) + reference


def trained_parameters(config: TrainConfig, specs: Mapping[str, ModelSpec]) -> dict[str, int]:
    """Parameters of actor and critic, by name, that are trained: all, or adapters and a critic's head."""
    return {
        name: adapter_parameter_count(spec, config.model.adapter, "value" if name == "critic" else "lm")
        if config.trainable(name).kind == "adapter"
        else spec.parameter_count()
        for name, spec in specs.items()
    }


def run_bytes(config: TrainConfig, specs: Mapping[str, ModelSpec]) -> int:
    """Bytes that the last export and the checkpoint take at least: those that stay, and the one being written.

    specs: of actor and critic, by name.
    """
    saves, trained = config.checkpoint, trained_parameters(config, specs)
    exported = sum(spec.parameter_count() for name, spec in specs.items() if name == "actor" or config.export.critic)
    checkpoints = (
        saves.keep.last + 1 if saves.every is not None or saves.every_minutes is not None else int(saves.at_end)
    )
    return exported * bytes_per_weight(config.model.dtype) + checkpoints * checkpoint_bytes(config, trained)

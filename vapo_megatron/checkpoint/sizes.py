"""What a run's checkpoints and exports take on disk."""

from collections.abc import Mapping

from vapo_megatron.checkpoint.manifest import OPTIMIZER_BYTES
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.adapters import adapter_parameter_count

FILES_PER_RANK = 2  # of a model's checkpoint, which a rank writes at the same time


def bytes_per_weight(dtype: str) -> int:
    """Bytes of one weight in a checkpoint."""
    if dtype == "bfloat16":
        return 2
    return 4


def checkpoint_bytes(config: TrainConfig, parameters: Mapping[str, int]) -> int:
    """Bytes of one checkpoint: weights and optimizer states of the trained parameters of actor and
    critic, counted by name, and weights of a reference that is replaced."""
    width = bytes_per_weight(config.model.dtype)
    if config.algorithm.saves_reference:
        reference = parameters["actor"] * width
    else:
        reference = 0
    return sum(parameters.values()) * (width + OPTIMIZER_BYTES) + reference


def largest_file_bytes(trained: int, dtype: str, ranks: int) -> int:
    """Bytes of the largest file of a model's checkpoint at least, where these ranks share the
    writing of its trained parameters evenly."""
    return trained * (bytes_per_weight(dtype) + OPTIMIZER_BYTES) // (FILES_PER_RANK * ranks)


def trained_parameters(config: TrainConfig, name: str, spec: ModelSpec) -> int:
    """All parameters of a model, or its adapters and a critic's head."""
    if config.trainable(name).kind != "adapter":
        return spec.parameter_count()
    head: Head = "value" if name == "critic" else "lm"
    return adapter_parameter_count(spec, config.model.adapter, head)


def run_bytes(config: TrainConfig, specs: Mapping[str, ModelSpec]) -> int:
    """Bytes that the last export and the checkpoints take at least, the one being written too;
    specs: by model's name."""
    saves = config.checkpoint
    trained = {
        name: trained_parameters(config, name, spec)
        for name, spec in specs.items()
        if name != "reference"
    }
    if config.export.critic:
        names = {"actor", "critic"}
    else:
        names = {"actor"}
    exported = sum(spec.parameter_count() for name, spec in specs.items() if name in names)
    if saves.saves:
        checkpoints = saves.keep.last + 1
    else:
        checkpoints = 0
    return exported * bytes_per_weight(config.model.dtype) + checkpoints * checkpoint_bytes(
        config, trained
    )

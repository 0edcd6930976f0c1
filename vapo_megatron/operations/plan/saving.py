"""What a checkpoint takes: bytes, seconds for which training waits, and until it is on the disk or is read again."""

from collections.abc import Mapping
from dataclasses import dataclass

from vapo_megatron.operations.hardware import Hardware
from vapo_megatron.operations.plan.models import PlannedModel


@dataclass(frozen=True)
class Saving:
    """Of one checkpoint of a run.

    Attributes:
        bytes: of all its tensors.
        waits: seconds for which training stands still: the state is put together and copied to host memory.
        writes: seconds until it is on the disk, while training goes on.
        resumes: seconds until models have it again; each byte is read and compared once. What starts a run anew
            (processes, engines) is not counted.
    """

    bytes: float
    waits: float
    writes: float
    resumes: float


def plan_saving(models: Mapping[str, PlannedModel], hardware: Hardware) -> Saving:
    """Of the models that are saved, at their layouts; what is slower counts, a rank or the file system."""
    saved = list(models.values())
    world = saved[0].world
    whole = sum(m.bytes_saved(stage) * world / m.layout.pp for m in saved for stage in range(m.layout.pp))
    # Of each model the fullest stage, whether or not these are of one rank.
    share = sum(max(map(model.bytes_saved, range(model.layout.pp))) for model in saved)
    held = sum(max(map(model.bytes_held, range(model.layout.pp))) for model in saved)
    copied = share / (hardware.pcie * hardware.efficiency.pcie)
    return Saving(
        bytes=whole,
        # Optimizers that sleep come to the device first; replicas hand each other what each of them saves.
        waits=2 * copied + share / hardware.link(world),
        writes=max(share / hardware.rank_save, whole / hardware.storage),
        # What one of several replicas has read goes to the others.
        resumes=max(share / hardware.rank_load, whole / hardware.storage) + (held - share) / hardware.link(world),
    )

"""What `offload: auto` keeps on the GPUs of a run that is about to start, by the figures of its
plan."""

import math

from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.megatron.offload import ONLOADED, Residency
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.operations.plan.inputs import GIB
from vapo_megatron.operations.plan.plan import make_plan


def planned_residency(config: TrainConfig, world: int, device_bytes: int) -> Residency:
    """The parts of models that stay on the devices in each phase, as the plan of this run on
    `world` devices of this memory has them. Without devices (0 bytes), what a phase needs."""
    if not device_bytes:
        return ONLOADED
    # Those of this machine; where others have another number, a divisor that engines fit as well.
    node = math.gcd(world, min(world, current_platform().device_count() or world))
    hardware = {"device_memory_gib": device_bytes / GIB, "gpus_per_node": node}
    planned = PlanConfig.model_validate(config.model_dump() | {"hardware": hardware})
    return make_plan(planned, world).memory.stays

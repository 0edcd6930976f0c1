"""Which devices of this machine engines get that share it with no trainer."""

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.platform import Platform


def engine_devices(config: RolloutConfig, platform: Platform) -> list[range | None]:
    """The GPUs of each engine that an evaluation starts: with GPUs as many engines as rollout.tp lets share them, else
    rollout.num_engines without any (None).

    Raises:
        BadInput: tp does not divide this machine's GPUs.
    """
    count, tp = platform.device_count(), config.tp
    if count == 0:
        return [None] * config.num_engines
    if count % tp:
        raise BadInput(f"rollout.tp={tp} does not divide the {count} GPUs of this machine: choose a divisor")
    return [range(first, first + tp) for first in range(0, count, tp)]


def first_engine_devices(wanted: int, platform: Platform) -> range | None:
    """The first GPUs that this process sees, as many as rollout.tp has here; None on a machine without.

    Raises:
        BadInput: there are fewer.
    """
    count = platform.device_count()
    if 0 < count < wanted:
        raise BadInput(f"rollout.tp takes {wanted} GPUs here, {count} are visible: give as many")
    return range(wanted) if count else None

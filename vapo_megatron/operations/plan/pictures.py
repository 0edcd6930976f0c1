"""Pictures of a plan: of its figures as `vapo-megatron plan --json` prints them."""

from collections.abc import Mapping
from typing import Any

from vapo_megatron.monitoring.pictures import Bars

_GIB = 2**30


def pictures_of(figures: Mapping[str, Any]) -> tuple[Bars, Bars]:
    """Memory of the worst GPU by phase and part, and seconds by phase, of plan_figures."""
    memory, seconds = figures["memory"], figures["seconds"]
    held = [
        (phase["phase"], [(part, size / _GIB) for part, size in phase["parts"].items()])
        for phase in memory["phases"]
    ]
    usable = memory["usable_bytes_per_gpu"] / _GIB
    spent = [
        (phase.replace("_", " "), [("seconds", time)])
        for phase, time in seconds["phases"].items()
        if time > 0
    ]
    return (
        Bars("Planned memory of the worst GPU", "GiB", held, usable),
        Bars("Planned seconds of a step", "seconds", spent),
    )

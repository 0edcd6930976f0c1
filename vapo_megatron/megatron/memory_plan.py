"""Which parts of which model are on the device in each phase of a step, and the account of it."""

from collections.abc import Mapping
from typing import Literal, Protocol

from vapo_megatron.megatron.offload import PARTS, Footprint, Part

Phase = Literal[
    "rollout",
    "score_reference",
    "score_policy",
    "score_values",
    "update_critic",
    "update_policy",
    "replace_reference",
    "weight_sync",
    "export_policy",
    "export_critic",
]

WEIGHTS: frozenset[Part] = frozenset({"weights"})
ALL: frozenset[Part] = frozenset(PARTS)

# What is not named sleeps. While engines write responses they have the device to themselves.
ONLOADED: Mapping[Phase, Mapping[str, frozenset[Part]]] = {
    "rollout": {},
    "score_reference": {"reference": WEIGHTS},
    "score_policy": {"actor": WEIGHTS},
    "score_values": {"critic": WEIGHTS},
    "update_critic": {"critic": ALL},
    "update_policy": {"actor": ALL},
    "replace_reference": {"actor": WEIGHTS, "reference": WEIGHTS},
    "weight_sync": {"actor": WEIGHTS},
    "export_policy": {"actor": WEIGHTS},
    "export_critic": {"critic": WEIGHTS},
}

_GIB = 2**30


class Offloadable(Protocol):
    """A model that can leave the device in parts."""

    @property
    def onloaded(self) -> frozenset[Part]: ...
    def onload_only(self, *parts: Part) -> None: ...
    def footprint(self) -> dict[Part, Footprint]: ...


class MemoryPlan:
    """Moves models between phases, and keeps what each phase held when it ended."""

    def __init__(self, models: Mapping[str, Offloadable], shares_device: bool = True) -> None:
        """models by name: actor, critic, reference. shares_device: with engines; else nothing sleeps for rollouts."""
        self._models, self._shares_device = dict(models), shares_device
        self._phase: Phase | None = None
        self._held: dict[Phase, dict[tuple[str, Part], Footprint]] = {}

    def enter(self, phase: Phase) -> None:
        """Have on the device what a phase needs of every model, and nothing else: first what goes, then what comes."""
        self.settle()
        self._phase = phase
        if phase == "rollout" and not self._shares_device:
            return
        needed = ONLOADED[phase]
        if phase == "score_reference" and "reference" not in self._models:
            needed = ONLOADED["score_policy"]  # it is the actor without its adapters
        for name, model in self._models.items():
            model.onload_only(*(model.onloaded & needed.get(name, frozenset())))
        for name, model in self._models.items():
            model.onload_only(*needed.get(name, frozenset()))

    def settle(self) -> None:
        """Take account of the phase that is going on."""
        if self._phase is not None:
            self._held[self._phase] = {
                (name, part): found
                for name, model in self._models.items()
                for part, found in model.footprint().items()
                if found.device or found.host
            }

    def metrics(self) -> dict[str, float]:
        """GiB of this rank: memory/<phase>/<place>_gib as each phase last ended, and memory/<model>/<part>_gib."""
        found: dict[str, float] = {}
        for phase, parts in self._held.items():
            found[f"memory/{phase}/device_gib"] = sum(p.device for p in parts.values()) / _GIB
            found[f"memory/{phase}/host_gib"] = sum(p.host for p in parts.values()) / _GIB
        return found | {f"memory/{name}/{part}_gib": size / _GIB for (name, part), size in self._sizes().items()}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Titles and rows: each part's GiB, and where it was in each phase; a last row with what the device held."""
        phases = [phase for phase in ONLOADED if phase in self._held]
        rows = []
        for key, size in self._sizes().items():
            places = [self._place(self._held[phase].get(key)) for phase in phases]
            rows.append([" ".join(key), f"{size / _GIB:.3f}", *places])
        sums = [f"{sum(p.device for p in self._held[phase].values()) / _GIB:.3f}" for phase in phases]
        return ["part", "GiB", *phases], [*rows, ["on the device", "", *sums]]

    def _sizes(self) -> dict[tuple[str, Part], int]:
        """Bytes of every part that any phase knew, where it was largest."""
        sizes: dict[tuple[str, Part], int] = {}
        for parts in self._held.values():
            for key, found in parts.items():
                sizes[key] = max(sizes.get(key, 0), found.device or found.host)
        order = {name: index for index, name in enumerate(self._models)}
        return dict(sorted(sizes.items(), key=lambda item: (order[item[0][0]], PARTS.index(item[0][1]))))

    @staticmethod
    def _place(found: Footprint | None) -> str:
        if found is None:
            return "-"
        return "device" if found.device else "host"

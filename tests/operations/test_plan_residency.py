"""What stays on GPUs between the phases that need it: by the room beside engine and activations."""

from itertools import pairwise

import pytest
from plans import ROOT

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.megatron.offload import ONLOADED, PARTS, Phase
from vapo_megatron.megatron.platform import Platform
from vapo_megatron.operations.plan.inputs import GIB
from vapo_megatron.operations.plan.memory import HEADROOM
from vapo_megatron.operations.plan.plan import Plan, make_plan
from vapo_megatron.operations.plan.residency import planned_residency

EXAMPLE = ROOT / "examples" / "gsm8k" / "vapo.yaml"
ONE_GPU = (
    "model.path=Qwen2.5-1.5B",
    "actor.layout={tp: 1, sequence_parallel: false}",
    "critic.layout={tp: 1, sequence_parallel: false}",
    "rollout.tp=1",
    "cluster.ranks=1",
)


def plan(gib: float, fraction: float, *overrides: str) -> Plan:
    """On one GPU with this memory, whose engine takes a fraction of it."""
    settings = (
        *ONE_GPU,
        f"hardware.device_memory_gib={gib}",
        f"rollout.mem_fraction_static={fraction}",
        *overrides,
    )
    return make_plan(load_config(PlanConfig, EXAMPLE, [*settings], PRESETS), 1)


def kept(made: Plan, phase: Phase) -> set[str]:
    """What stays in a phase that does not need it."""
    return {
        f"{name} {part}"
        for name, parts in made.memory.stays[phase].items()
        for part in parts - ONLOADED[phase].get(name, frozenset())
        if name != "base"
    }


EVERYTHING = {f"{name} {part}" for name in ("actor", "critic") for part in PARTS}


@pytest.mark.parametrize(
    ("gib", "fraction", "in_rollouts"),
    [
        (300.0, 0.3, EVERYTHING),
        (140.0, 0.5, EVERYTHING),
        (140.0, 0.7, {"actor weights", "critic weights", "critic optimizer"}),
        (140.0, 0.85, {"actor weights"}),
        (140.0, 0.89, set()),
    ],
)
def test_parts_stay_where_there_is_room_beside_the_engine(
    gib: float, fraction: float, in_rollouts: set[str]
) -> None:
    made = plan(gib, fraction)
    assert kept(made, "rollout") == in_rollouts
    seconds = made.time.phases["offload_and_onload"]
    always = plan(gib, fraction, "actor.offload=always", "critic.offload=always")
    assert not kept(always, "rollout") and not kept(always, "update_critic")
    assert (seconds == 0) == (in_rollouts == EVERYTHING)
    most = always.time.phases["offload_and_onload"]
    assert seconds < most if in_rollouts else seconds == most


def test_what_stays_leaves_every_phase_its_headroom() -> None:
    for gib in range(60, 200, 7):
        made = plan(gib, 0.6)
        alone = plan(gib, 0.6, "actor.offload=always", "critic.offload=always")
        limit = made.hardware.usable_memory - HEADROOM
        for phase, before in zip(made.memory.phases, alone.memory.phases, strict=True):
            assert phase.total <= max(limit, before.total)
        assert made.fits == alone.fits
        assert made.time.step <= alone.time.step


def test_more_room_never_moves_more() -> None:
    seconds = [plan(gib, 0.5).time.phases["offload_and_onload"] for gib in range(60, 260, 10)]
    assert all(more <= less + 1e-9 for less, more in pairwise(seconds))
    assert seconds[0] > 0 == seconds[-1]


def test_a_run_keeps_what_its_plan_says() -> None:
    settings = [*ONE_GPU, "rollout.mem_fraction_static=0.6"]
    config = load_config(TrainConfig, EXAMPLE, settings, PRESETS)
    assert planned_residency(config, 1, 0) is ONLOADED
    for gib in (80, 140):
        found = planned_residency(config, 1, gib * GIB)
        assert found == plan(gib, 0.6).memory.stays
        for phase, held in found.items():
            assert all(held.get(name, parts) >= parts for name, parts in ONLOADED[phase].items())


@pytest.mark.parametrize(
    ("node", "world", "engine"),
    [
        (4, 12, "rollout.tp=4"),
        (4, 16, "rollout={tp: 8, nodes: 2}"),
        (8, 12, "rollout.tp=2"),  # this machine has eight, another one four
        (8, 6, "rollout.tp=2"),
    ],
)
def test_a_run_is_planned_on_nodes_of_its_own_size(
    monkeypatch: pytest.MonkeyPatch, node: int, world: int, engine: str
) -> None:
    monkeypatch.setattr(Platform, "device_count", lambda _: node)
    config = load_config(TrainConfig, EXAMPLE, [*ONE_GPU[:-2], engine], PRESETS)
    assert "actor" in planned_residency(config, world, 300 * GIB)["rollout"]


def test_shared_weights_stay_for_either_of_their_models() -> None:
    adapters = ("actor.kind=adapter", "critic.kind=adapter")
    made = plan(300, 0.3, *adapters)
    assert made.models["critic"].shares_base
    assert all(parts["base"] == {"weights"} for parts in made.memory.stays.values())

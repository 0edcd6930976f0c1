"""examples/deepseek_v3: the shape has the published size, and the layout fits its GPUs."""

from pathlib import Path

import pytest

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.inputs import SHIPPED
from vapo_megatron.operations.plan.plan import Plan, default_world, make_plan
from vapo_megatron.operations.plan.search import _engines

FOLDER = Path(__file__).parents[2] / "examples" / "deepseek_v3"


def planned(*overrides: str) -> Plan:
    config = load_config(PlanConfig, FOLDER / "plan.yaml", list(overrides), PRESETS)
    return make_plan(config, default_world(config))


def test_the_shape_has_the_published_size() -> None:
    spec = read_spec(SHIPPED / "DeepSeek-V3")
    assert spec.parameter_count() // 10**9 == 671
    assert spec.active_parameter_count() // 10**9 == 37


def test_the_layout_fits() -> None:
    plan = planned()
    assert not plan.memory.problems
    assert plan.engines == 32


def test_an_engine_in_fp8_fits_one_node_and_in_bf16_does_not() -> None:
    assert (
        planned(
            "rollout.quantization=fp8",
            "rollout.load_format=dummy",
            "rollout.tp=8",
            "rollout.nodes=1",
            "actor.precision.fp8=none",
        ).memory.engine.cache_tokens
        > 18432
    )
    assert planned("rollout.tp=8", "rollout.nodes=1").memory.engine.cache_tokens < 0


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("rollout.nodes=1",), r"rollout\.tp=16 does not divide the 8 .*set rollout\.nodes=2"),
        (("rollout.tp=12",), r"rollout\.tp=12 with rollout\.nodes=2.*set rollout\.tp=16"),
        (("rollout.tp=24", "rollout.nodes=3"), r"rollout\.tp=24 does not divide the 512 GPUs"),
    ],
)
def test_engines_that_nodes_cannot_hold_are_refused(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        planned(*overrides)


@pytest.mark.full
def test_engines_go_over_nodes_where_one_node_cannot_hold_them() -> None:
    assert {(engine.tp, engine.nodes) for engine in _engines(planned())} == {(16, 2)}

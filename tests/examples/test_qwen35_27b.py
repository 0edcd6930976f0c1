"""examples/qwen3.5_27b: the shape has the published size, and the layout fits its GPUs."""

from pathlib import Path

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.inputs import SHIPPED
from vapo_megatron.operations.plan.plan import default_world, make_plan

FOLDER = Path(__file__).parents[2] / "examples" / "qwen3.5_27b"


def test_the_shape_has_the_published_size() -> None:
    spec = read_spec(SHIPPED / "Qwen3.5-27B")
    assert round(spec.parameter_count() / 10**9) == 27
    assert spec.num_layers == 64


def test_the_layout_fits() -> None:
    config = load_config(PlanConfig, FOLDER / "plan.yaml", [], PRESETS)
    assert not make_plan(config, default_world(config)).memory.problems

"""examples/gpt_oss_20b: the shape has the published size, and the layout fits its GPUs."""

from pathlib import Path

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.inputs import SHIPPED
from vapo_megatron.operations.plan.plan import default_world, make_plan

FOLDER = Path(__file__).parents[2] / "examples" / "gpt_oss_20b"


def test_the_shape_has_the_published_size() -> None:
    spec = read_spec(SHIPPED / "gpt-oss-20b")
    assert round(spec.parameter_count() / 1e9, 1) == 20.9
    # Published without the input embedding.
    embedding = spec.embedding.count()
    assert round((spec.active_parameter_count() - embedding) / 1e9, 1) == 3.6


def test_the_layout_fits() -> None:
    config = load_config(PlanConfig, FOLDER / "plan.yaml", [], PRESETS)
    assert not make_plan(config, default_world(config)).memory.problems

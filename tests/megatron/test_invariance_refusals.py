"""Layouts that cannot work are refused in one line that names what to change, before any model is
built."""

from pathlib import Path

import pytest
from hf_models import write_model

from vapo_megatron.checks.sizes import check_capacity
from vapo_megatron.config.model import ActorConfig, LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.mesh import check_layout, check_model_layout
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path: Path = write_model(tmp_path_factory.mktemp("model"), "qwen3")
    return read_spec(path)


@pytest.mark.parametrize(
    "layout,named",
    [
        (LayoutConfig(tp=3), "actor.layout.tp=3"),
        (LayoutConfig(tp=8), "4 key-value heads"),
        (LayoutConfig(pp=5), "5 stages are more than the model's 4 layers"),
        (LayoutConfig(pp=4, vpp=2), "pp 4 x vpp 2 = 8 stages"),
    ],
)
def test_a_model_that_does_not_split_is_refused(
    spec: ModelSpec, layout: LayoutConfig, named: str
) -> None:
    with pytest.raises(BadInput, match=named) as refused:
        check_model_layout(spec, layout, "actor")
    assert "\n" not in str(refused.value)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match=r"critic\.layout: tp 2 x pp 1 x cp 2 = 4 ranks .* 6 ranks"):
        check_layout(LayoutConfig(tp=2, cp=2), 6, "critic")


def test_context_parallelism_may_exceed_the_heads(spec: ModelSpec) -> None:
    """Keys and values are gathered and heads stay whole: only sequences are cut."""
    check_model_layout(spec, LayoutConfig(cp=2 * spec.attention.num_heads), "actor")


@pytest.mark.parametrize("cp,sequence_parallel", [(1, False), (4, False), (2, True)])
def test_the_longest_sample_of_a_layout_is_where_refusal_begins(
    cp: int, sequence_parallel: bool
) -> None:
    layout = LayoutConfig(
        tp=2 if sequence_parallel else 1, cp=cp, sequence_parallel=sequence_parallel
    )
    section = ActorConfig(layout=layout, max_tokens_per_microbatch=100)
    longest = layout.longest_sample(100)
    assert 100 * cp - 2 * layout.total_alignment <= longest <= 100 * cp
    check_capacity(section, "actor", longest, "what is asked for")
    with pytest.raises(BadInput, match=r"actor\.max_tokens_per_microbatch=100 .* raise it"):
        check_capacity(section, "actor", longest + 1, "what is asked for")

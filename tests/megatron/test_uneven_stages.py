"""Models whose layers no pipeline divides train as on one rank."""

from pathlib import Path
from typing import Any

import pytest
from hf_models import write_model
from invariance import CASES, OPTIMIZER, Split, assert_same, run_split

from vapo_megatron.config.model import LayoutConfig, RecomputeConfig
from vapo_megatron.megatron.mesh import stage_pieces
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.inputs import model_directory

pytestmark = pytest.mark.usefixtures("small_buckets")

LAYERS = 5
IN_TEST = ("policy", "value", "glm", "adapter-experts")
NAMES = (*IN_TEST, "nll-tied", "latent", "adapter")
THREE_STAGES = Split(3, LayoutConfig(pp=3), 40, recompute=RecomputeConfig(granularity="full"))
SPLITS = [
    # Stages of two, two and one layers.
    (THREE_STAGES, IN_TEST, False),
    (THREE_STAGES, NAMES, True),
    # Pieces of one, one, two and one.
    (
        Split(
            4,
            LayoutConfig(pp=2, vpp=2),
            40,
            optimizer=OPTIMIZER.model_copy(update={"overlap": True}),
        ),
        NAMES,
        True,
    ),
    (Split(4, LayoutConfig(tp=2, pp=2, sequence_parallel=True), 40, offload="always"), NAMES, True),
]


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "sizes"),
    [
        ("GLM-4.5-Air", 4, None, [11, 12, 12, 11]),
        ("GLM-4.7-Flash", 2, None, [24, 23]),
        ("DeepSeek-V3", 8, None, [7, 7, 8, 8, 8, 8, 8, 7]),
        # Of its first three layers none has experts: the lightest ones go to the longer pieces.
        ("DeepSeek-V3", 16, None, [4] * 13 + [3] * 3),
        ("DeepSeek-V3", 4, 2, [7, 7, 8, 8, 8, 8, 8, 7]),
        ("Qwen2.5-7B", 4, None, [7, 7, 7, 7]),
    ],
)
def test_pieces_are_as_even_as_they_can_be(
    name: str, pp: int, vpp: int | None, sizes: list[int]
) -> None:
    spec = read_spec(model_directory(name))
    pieces = stage_pieces(spec, LayoutConfig(pp=pp, vpp=vpp))
    assert [index for piece in pieces for index in piece] == list(range(spec.num_layers))
    stages = [sum(len(piece) for piece in pieces[stage::pp]) for stage in range(pp)]
    assert max(stages) - min(stages) <= 1
    assert [len(piece) for piece in pieces] == sizes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    folder = tmp_path_factory.mktemp("models")
    wanted = {(CASES[name].family, CASES[name].tied) for name in NAMES}
    return {
        (family, tied): write_model(
            folder / f"{family}-{tied}",
            family,
            tie_word_embeddings=tied,
            seed=1,
            num_hidden_layers=LAYERS,
        )
        for family, tied in sorted(wanted)
    }


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, ...], dict[str, Any]]:
    """What one rank gives, by the names that are trained."""
    return {}


@pytest.mark.parametrize(
    ("split", "names"),
    [
        pytest.param(split, names, id=f"{split}-{len(names)}", marks=[pytest.mark.full] * in_full)
        for split, names, in_full in SPLITS
    ],
)
def test_uneven_stages_equal_one_rank(
    models: dict[tuple[str, bool], Path],
    references: dict[tuple[str, ...], dict[str, Any]],
    split: Split,
    names: tuple[str, ...],
) -> None:
    if names not in references:
        references[names] = run_split(models, names, Split())[0]
    assert_same(run_split(models, names, split), references[names])

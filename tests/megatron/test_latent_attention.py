"""Latent attention computes and learns the same however it is cut; its adapters as well."""

from pathlib import Path
from typing import Any

import pytest
from invariance import OPTIMIZER, Split, assert_same, make_models, run_split

from vapo_megatron.config.model import LayoutConfig, RecomputeConfig

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("small_buckets")]

NAMES = ("latent", "adapter-latent")
FULL = RecomputeConfig(granularity="full")
SELECTIVE = RecomputeConfig(granularity="selective")
OVERLAP = OPTIMIZER.model_copy(update={"overlap": True})
SPLITS = [
    Split(2, LayoutConfig(), 40),
    Split(2, LayoutConfig(cp=2), 40, recompute=SELECTIVE),
    Split(2, LayoutConfig(tp=2, sequence_parallel=True), 40, recompute=SELECTIVE),
    Split(4, LayoutConfig(pp=2, vpp=2), 40, optimizer=OVERLAP),
    Split(4, LayoutConfig(tp=2, sequence_parallel=True, ep=2, pp=2), 40, recompute=FULL),
    Split(4, LayoutConfig(tp=2, sequence_parallel=True, cp=2), 40),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(models: dict[tuple[str, bool], Path]) -> dict[str, Any]:
    return run_split(models, NAMES, Split())[0]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_split_equals_one_rank(
    models: dict[tuple[str, bool], Path], reference: dict[str, Any], split: Split
) -> None:
    assert_same(run_split(models, NAMES, split), reference)

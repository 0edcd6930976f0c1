"""A model with experts trains, and resumes, where stages of its pipeline have only dense layers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import LENGTHS
from hf_models import write_model
from invariance import OPTIMIZER, Split, assert_same, run_split
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from ranks import run_ranks
from test_dist_saver import resume, save
from test_train_step import OPTIMIZER as SHARP
from test_train_step import train

from vapo_megatron.config.model import LayoutConfig, RecomputeConfig

pytestmark = pytest.mark.usefixtures("small_buckets")

NAMES = ("glm", "latent")
FULL = RecomputeConfig(granularity="full")
OVERLAP = OPTIMIZER.model_copy(update={"overlap": True})
# How many of the four layers are dense, the split, and whether `make test-full` alone trains it.
SPLITS = [
    (2, Split(4, LayoutConfig(pp=2, ep=2), 40, optimizer=OVERLAP), True),
    (2, Split(2, LayoutConfig(pp=2), 40), False),
    # Stages in the middle have no experts, either.
    (3, Split(4, LayoutConfig(pp=4), 40, recompute=FULL), True),
    # Neither of the first stage's two pieces has experts.
    (3, Split(4, LayoutConfig(pp=2, vpp=2, ep=2), 40, offload="always"), True),
    (2, Split(4, LayoutConfig(tp=2, pp=2, ep=2, sequence_parallel=True), 60), True),
]


def write_models(folder: Path, dense: int) -> dict[tuple[str, bool], Path]:
    """Models of NAMES whose first layers are dense."""
    return {
        (family, False): write_model(
            folder / f"{family}-{dense}", family, seed=1, first_k_dense_replace=dense
        )
        for family in ("glm4_moe", "deepseek_v3")
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[tuple[str, bool], Path]]:
    """By the number of dense layers."""
    folder = tmp_path_factory.mktemp("models")
    return {dense: write_models(folder, dense) for dense in (2, 3)}


@pytest.fixture(scope="module")
def references(models: dict[int, dict[tuple[str, bool], Path]]) -> dict[int, dict[str, Any]]:
    return {}


@pytest.mark.parametrize(
    ("dense", "split"),
    [
        pytest.param(dense, split, id=f"{dense}-{split}", marks=[pytest.mark.full] * in_full)
        for dense, split, in_full in SPLITS
    ],
)
def test_stages_without_experts_equal_one_rank(
    models: dict[int, dict[tuple[str, bool], Path]],
    references: dict[int, dict[str, Any]],
    dense: int,
    split: Split,
) -> None:
    if dense not in references:
        references[dense] = run_split(models[dense], NAMES, Split())[0]
    assert_same(run_split(models[dense], NAMES, split), references[dense])


@pytest.mark.full
@pytest.mark.parametrize("recompute", [RecomputeConfig(), FULL], ids=["kept", "recomputed"])
def test_experts_are_replayed_behind_stages_that_have_none(
    models: dict[int, dict[tuple[str, bool], Path]], recompute: RecomputeConfig
) -> None:
    positions = sum(prompt + response - 1 for prompt, response in LENGTHS)
    noise = torch.rand(positions, 4, 4, generator=torch.Generator().manual_seed(9))
    experts = noise.topk(2).indices.flatten(1).to(torch.uint8).numpy()
    model = models[2]["glm4_moe", False]

    def trained(world: int, layout: LayoutConfig, chosen: np.ndarray | None) -> Any:
        given = (model, layout, 40, "lm", SHARP, recompute, chosen)
        return run_ranks(world, train, *given)[0]

    expected = trained(1, LayoutConfig(), experts)
    steps, total = trained(2, LayoutConfig(pp=2), experts)
    assert np.allclose(steps, expected[0], rtol=2e-5, atol=2e-6)
    assert total == pytest.approx(expected[1], rel=5e-5)
    assert trained(2, LayoutConfig(pp=2), None)[1] != pytest.approx(total, rel=1e-3)


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts its steps as Transformer Engine's does: in groups that have parameters."""

    def __init__(self, params: Any, adam_w_mode: bool, **defaults: Any) -> None:
        assert adam_w_mode
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            count = group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
                scale = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] / (1 - first**count) * state["exp_avg"] / scale)


@pytest.fixture
def adam(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Adam Megatron has: torch's, or one with a fused one's way to count steps."""
    if request.param == "fused":
        monkeypatch.setattr(megatron_optimizer, "Adam", FusedAdam)
        monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        monkeypatch.setattr(distrib_optimizer, "Adam", FusedAdam)
        monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)


# Dense layers, head, parameters, the layout that saves, layouts that resume.
SAVES = [
    pytest.param(2, "lm", "float32", (2, {"pp": 2}), [(2, {"ep": 2})]),
    pytest.param(
        3,
        "value",
        "bfloat16",
        (4, {"pp": 2, "vpp": 2, "ep": 2}),
        [],
        marks=pytest.mark.full,
    ),
    pytest.param(
        2, "lm", "float32", (2, {"ep": 2}), [(4, {"pp": 4}), (2, {"pp": 2})], marks=pytest.mark.full
    ),
    pytest.param(2, "lm", "adapter", (4, {"pp": 4}), [(1, {})], marks=pytest.mark.full),
]


@pytest.mark.parametrize(
    "adam", [pytest.param("torch", marks=pytest.mark.full), "fused"], indirect=True
)
@pytest.mark.parametrize(("dense", "head", "dtype", "saving", "others"), SAVES)
def test_training_resumes_with_stages_without_experts(
    models: dict[int, dict[tuple[str, bool], Path]],
    tmp_path: Path,
    adam: None,
    dense: int,
    head: str,
    dtype: str,
    saving: tuple[int, dict[str, Any]],
    others: list[tuple[int, dict[str, Any]]],
) -> None:
    model = models[dense]["glm4_moe", False]
    folder = tmp_path / "saved"
    world, layout = saving
    expected = run_ranks(world, save, model, LayoutConfig(**layout), head, dtype, folder, 2)[0]
    for count, other in (saving, *others):
        found = run_ranks(count, resume, model, LayoutConfig(**other), head, dtype, folder)[0]
        if (count, other) == saving:
            assert found == expected, "to the bit"
        assert np.allclose(found[0], expected[0], rtol=1e-4)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)

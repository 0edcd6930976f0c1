"""Adapters of experts whose weights one grouped layer holds: the numbers of a layer for each
expert."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import make_batch
from grouped_layers import use_grouped_layers
from hf_models import read_tensors, write_model
from ranks import run_ranks
from test_adapters import read_adapters, train
from trainables import loss_of, make_trainable

from vapo_megatron.megatron.adapters import GroupedLowRank
from vapo_megatron.weights.adapters import adapters_of


def train_grouped(*arguments: Any) -> Any:
    use_grouped_layers()
    return train(*arguments)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.mark.full
def test_grouped_layers_learn_and_export_like_single_experts(
    tmp_path: Path, model_dir: Path
) -> None:
    found = {}
    for run, ranks, layout in ((train, 1, {}), (train_grouped, 2, {"ep": 2})):
        folder = tmp_path / run.__name__
        found[run.__name__] = run_ranks(ranks, run, model_dir, folder, "lm", {"layout": layout})[0]
    (norms, *scores), (expected_norms, *expected_scores) = found["train_grouped"], found["train"]
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for score, expected in zip(scores, expected_scores, strict=True):
        np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-4)
    exported, expected_tensors = (
        read_tensors(tmp_path / name / "after") for name in ("train_grouped", "train")
    )
    assert exported.keys() == expected_tensors.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected_tensors[name], rtol=1e-4, atol=1e-5, msg=name)
    halves, expected_halves = (
        read_adapters(tmp_path / name / "before-adapter") for name in ("train_grouped", "train")
    )
    assert halves.keys() == expected_halves.keys()
    assert all(torch.equal(a, expected_halves[name][0]) for name, (a, _) in halves.items())


def train_beside(model_dir: Path, overlap: bool) -> tuple[list[float], float]:
    use_grouped_layers()
    adapter = {"rank": 4, "alpha": 16.0}
    optimizer = {"overlap": overlap, "clip_grad": 0.0}
    trainable = make_trainable(
        model_dir, "lm", adapter=adapter, max_tokens_per_microbatch=1000, optimizer=optimizer
    )
    batch = make_batch()
    loss = loss_of(trainable, batch)
    norms = [trainable.train_step(batch, range(batch.samples), loss).grad_norm for _ in range(3)]
    return norms, float(trainable.score(batch).double().square().sum())


def test_updated_weights_are_gathered_before_experts_read_them(model_dir: Path) -> None:
    """Two ranks with the same experts, each of which updates a part of their adapters."""
    plain, beside = (run_ranks(2, train_beside, model_dir, overlap)[0] for overlap in (False, True))
    assert beside[0] == pytest.approx(plain[0], rel=1e-6) and beside[1] == plain[1]


def grouped_products(model_dir: Path, rank: int, tokens: list[int], dtype: str = "float32") -> None:
    """A grouped product, and its gradients, of both layers of a layer's experts."""
    trainable = make_trainable(model_dir, "lm", adapter={"rank": rank, "alpha": 8.0}, dtype=dtype)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.05, "atol": 0.3}
    adapters = [
        adapter for _, adapter in adapters_of(trainable.chunks[0]) if adapter.adapts.layer == 1
    ]
    for half in ("linear_fc1", "linear_fc2"):
        mine = [adapter for adapter in adapters if half in adapter.adapts.rule.megatron]
        assert [adapter.adapts.expert for adapter in mine] == [0, 1, 2, 3]
        for adapter in mine:
            torch.nn.init.normal_(adapter.b)
        x = torch.randn(sum(tokens), mine[0].a.shape[1]).to(mine[0].a).requires_grad_()
        expected = torch.cat(
            [adapter(part) for adapter, part in zip(mine, x.split(tokens), strict=True)]
        )
        inputs = [x, *(p for adapter in mine for p in (adapter.a, adapter.b))]
        weights = torch.randn_like(expected)
        wanted = torch.autograd.grad((expected * weights).sum(), inputs)
        found = GroupedLowRank(mine)(x, tokens)
        torch.testing.assert_close(found, expected, **near)
        for gradient, other in zip(
            torch.autograd.grad((found * weights).sum(), inputs), wanted, strict=True
        ):
            torch.testing.assert_close(gradient, other, **near)


RANKS_AND_TOKENS = [(8, [2, 0, 5, 1]), (3, [2, 0, 5, 1]), (3, [0, 0, 0, 0])]


@pytest.mark.parametrize("rank,tokens", RANKS_AND_TOKENS)
def test_one_grouped_product_is_that_of_every_expert(
    model_dir: Path, rank: int, tokens: list[int]
) -> None:
    """Also of experts without a token, and of ranks that a grouped product does not take."""
    run_ranks(1, grouped_products, model_dir, rank, tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")
@pytest.mark.parametrize("rank,tokens", RANKS_AND_TOKENS)
def test_a_gpu_multiplies_so_as_well(model_dir: Path, rank: int, tokens: list[int]) -> None:
    """In bfloat16: an expert without a token has a gradient of zeros there, too."""
    run_ranks(1, grouped_products, model_dir, rank, tokens, "bfloat16", deadline=300, cuda=True)

"""A model cut over several ranks, each on a GPU of its own over NCCL, or all on one GPU by way of
the host (staged_group.py): `pytest -m gpu tests/megatron`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch
from hf_models import write_model
from ranks import run_ranks
from trainables import loss_of, make_trainable

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import CAPABILITY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]
# Of log-probs and entropies the largest difference and the mean one, and of gradient norms
# relative. In FP8 as in test_gpu_precision.py; two steps of AdamW make more of the rounding of
# gradients where experts share it out.
TOLERANCE = (0.1, 0.1, 0.05)
FP8_TOLERANCE = (1.3, 0.35, 0.4)
EXPERTS_TOLERANCE = (0.6, 0.1, 0.05)
LAYOUTS = {
    "dp2": LayoutConfig(),
    "tp2 sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
    "cp2": LayoutConfig(cp=2),
    "tp2 pp2 sp": LayoutConfig(tp=2, pp=2, sequence_parallel=True),
    "tp2 cp2 sp": LayoutConfig(tp=2, cp=2, sequence_parallel=True),
}
Found = tuple[list[list[float]], list[float]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = dict(hidden_size=256, head_dim=64, intermediate_size=512)
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16, **sizes)


@pytest.fixture(scope="module")
def one_rank(model_dir: Path) -> Found:
    found: Found = run_ranks(1, steps, model_dir, LayoutConfig(), {}, deadline=300, cuda=True)[0]
    return found


def steps(model_dir: Path, layout: LayoutConfig, precision: dict[str, Any]) -> Found:
    """Scores before and after two steps, with sleep in between, and the gradient norms of the
    steps."""
    trainable = make_trainable(
        model_dir,
        "lm",
        dtype="bfloat16",
        attention="auto",
        optimizer={"lr": 1e-4},
        layout=layout,
        precision=precision,
        offload="always",
        max_tokens_per_microbatch=256,
    )
    batch = make_batch()
    norms = []
    loss = loss_of(trainable, batch)
    scores = [trainable.score(batch)]
    for _ in range(2):
        norms.append(trainable.train_step(batch, range(batch.samples), loss).grad_norm)
        trainable.offloader.onload_only()
    scores.append(trainable.score(batch))
    return [score.flatten().tolist() for score in scores], norms


def check(
    ranks: list[Found], expected: Found, tolerance: tuple[float, float, float] = TOLERANCE
) -> None:
    largest, mean, norm = tolerance
    for scores, norms in ranks:
        assert (scores, norms) == ranks[0]
        assert norms == pytest.approx(expected[1], rel=norm)
        for score, exact in zip(scores, expected[0], strict=True):
            apart = (torch.tensor(score) - torch.tensor(exact)).abs()
            assert apart.max() < largest
            assert apart.mean() < mean


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_several_ranks_train_as_one_does(
    model_dir: Path, one_rank: Found, layout: LayoutConfig
) -> None:
    ranks = run_ranks(
        max(2, layout.model_size), steps, model_dir, layout, {}, deadline=300, cuda=True
    )
    check(ranks, one_rank)


def test_ranks_that_share_out_experts_train_as_one_does(tmp_path: Path) -> None:
    """Every token goes through every expert: rounding cannot choose others."""
    sizes: dict[str, Any] = dict(
        hidden_size=256, head_dim=64, moe_intermediate_size=128, num_experts_per_tok=4
    )
    model = write_model(tmp_path, "qwen3_moe", dtype=torch.bfloat16, **sizes)
    one = run_ranks(1, steps, model, LayoutConfig(), {}, deadline=300, cuda=True)[0]
    for layout in (LayoutConfig(ep=2), LayoutConfig(tp=2, ep=2, sequence_parallel=True)):
        check(
            run_ranks(2, steps, model, layout, {}, deadline=300, cuda=True), one, EXPERTS_TOLERANCE
        )


def test_two_ranks_train_in_fp8_as_one_does(model_dir: Path, one_rank: Found) -> None:
    platform = current_platform()
    if (
        not platform.has_transformer_engine
        or platform.compute_capability < CAPABILITY["tensorwise"]
    ):
        pytest.skip("no FP8 here: it needs Transformer Engine and compute capability 8.9")
    precision = {"fp8": "tensorwise"}
    ranks = run_ranks(2, steps, model_dir, LayoutConfig(), precision, deadline=300, cuda=True)
    check(ranks, one_rank, FP8_TOLERANCE)

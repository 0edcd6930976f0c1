"""A model cut over two GPUs, over NCCL: `pytest -m gpu tests/megatron`."""

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
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA GPUs"),
]
# As in test_gpu_precision.py: the largest difference of log-probs and entropies (in FP8 the mean too), and of gradient
# norms relative.
TOLERANCE, FP8_TOLERANCE, FP8_LARGEST, NORM, FP8_NORM = 0.1, 0.35, 1.3, 0.05, 0.4
LAYOUTS = {
    "dp2": LayoutConfig(),
    "tp2 sp": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
    "cp2": LayoutConfig(cp=2),
}
Found = tuple[list[list[float]], list[float]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = dict(hidden_size=256, head_dim=64, intermediate_size=512)
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16, **sizes)


@pytest.fixture(scope="module")
def one_gpu(model_dir: Path) -> Found:
    found: Found = run_ranks(1, steps, model_dir, LayoutConfig(), {}, deadline=300, cuda=True)[0]
    return found


def steps(model_dir: Path, layout: LayoutConfig, precision: dict[str, Any]) -> Found:
    """Scores before and after two steps, with sleep in between, and the gradient norms of the steps."""
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
    batch, norms = make_batch(), []
    loss, scores = loss_of(trainable, batch), [trainable.score(batch)]
    for _ in range(2):
        norms.append(trainable.train_step(batch, range(batch.samples), loss).grad_norm)
        trainable.offloader.onload_only()
    scores.append(trainable.score(batch))
    return [score.flatten().tolist() for score in scores], norms


def check(ranks: list[Found], expected: Found, fp8: bool = False) -> None:
    for scores, norms in ranks:
        assert (scores, norms) == ranks[0]
        assert norms == pytest.approx(expected[1], rel=FP8_NORM if fp8 else NORM)
        for score, exact in zip(scores, expected[0], strict=True):
            apart = (torch.tensor(score) - torch.tensor(exact)).abs()
            assert apart.max() < (FP8_LARGEST if fp8 else TOLERANCE)
            assert apart.mean() < (FP8_TOLERANCE if fp8 else TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_gpus_train_as_one_does(model_dir: Path, one_gpu: Found, layout: LayoutConfig) -> None:
    check(run_ranks(2, steps, model_dir, layout, {}, deadline=300, cuda=True), one_gpu)


def test_two_gpus_train_in_fp8_as_one_does(model_dir: Path, one_gpu: Found) -> None:
    platform = current_platform()
    if not platform.has_transformer_engine or platform.compute_capability < CAPABILITY["tensorwise"]:
        pytest.skip("no FP8 here: it needs Transformer Engine and compute capability 8.9")
    precision = {"fp8": "tensorwise"}
    ranks = run_ranks(2, steps, model_dir, LayoutConfig(), precision, deadline=300, cuda=True)
    check(ranks, one_gpu, fp8=True)

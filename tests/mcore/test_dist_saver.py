"""Weights, optimizer and schedule come back from a checkpoint to the bit, and at other layouts to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hf_models import write_model
from ranks import run_ranks
from test_train_step import OPTIMIZER, make_batch, policy_loss, token_tensors

from vapo_megatron.config.algorithm import ValueLossConfig
from vapo_megatron.config.model import ActorConfig, CriticConfig, LayoutConfig, ModelConfig
from vapo_megatron.mcore.dist_saver import load_training_state, plan_save
from vapo_megatron.mcore.mesh import make_mesh
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.training.losses import ValueLoss
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.spec import read_spec

Steps = tuple[list[tuple[float, float]], float]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tie_word_embeddings=True)


def build(model_dir: Path, layout: LayoutConfig, head: str, dtype: str, load: bool, **optimizer: Any) -> Trainable:
    spec, mesh = read_spec(model_dir), make_mesh(layout)
    shared: dict[str, Any] = {
        "layout": layout,
        "optimizer": OPTIMIZER.model_copy(update={"warmup_steps": 6, **optimizer}),
        "max_tokens_per_microbatch": 1000,
    }
    section = ActorConfig(**shared) if head == "lm" else CriticConfig(**shared)
    model = ModelConfig(path=str(model_dir), dtype=dtype)  # type: ignore[arg-type]
    trainable = Trainable(spec, model, section, mesh, head, name="actor", seed=1)  # type: ignore[arg-type]
    if load:
        load_hf(trainable.chunks, spec, model_dir, mesh, head)  # type: ignore[arg-type]
    trainable.prepare()
    return trainable


def train(trainable: Trainable, steps: int) -> Steps:
    """(gradient norm, learning rate) of each step, and the sum of squares of the outputs after the last."""
    batch, found = make_batch(), []
    tensors = token_tensors(batch)
    value = ValueLoss(ValueLossConfig(), tensors["targets"], tensors["targets"], tensors["weights"])
    for _ in range(steps):
        loss = policy_loss(batch) if trainable.head == "lm" else value
        result = trainable.train_step(batch, range(batch.samples), loss)
        found.append((result.grad_norm, result.lr))
    return found, float(trainable.score(batch).double().square().sum())


def save(
    model_dir: Path, layout: LayoutConfig, head: str, dtype: str, folder: Path, before: int, **optimizer: Any
) -> Steps:
    """Train, copy the state, train on, and only then write the copy: what training went on with."""
    trainable = build(model_dir, layout, head, dtype, load=True, **optimizer)
    train(trainable, before)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    plan = plan_save(trainable, folder)
    after = train(trainable, 2)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, plan.write())
    if dist.get_rank() == 0:
        plan.close(results)
    dist.barrier()
    return after


def resume(model_dir: Path, layout: LayoutConfig, head: str, dtype: str, folder: Path, **optimizer: Any) -> Steps:
    trainable = build(model_dir, layout, head, dtype, load=False, **optimizer)
    load_training_state(trainable, folder)
    return train(trainable, 2)


CASES = [
    # Head, dtype, updates before the save, the layout that saves, layouts that go on.
    ("lm", "float32", 2, (2, {"tp": 2}), [(2, {"tp": 2}), (2, {}), (1, {})]),
    # Tied embeddings on a pipeline have gradient buckets of their own, with padding before and after.
    ("lm", "float32", 2, (4, {"pp": 2, "vpp": 2}), [(4, {"pp": 2, "vpp": 2}), (2, {"tp": 2})]),
    ("value", "float32", 0, (2, {"pp": 2}), [(2, {"pp": 2}), (2, {"tp": 2, "sequence_parallel": True})]),
    ("value", "bfloat16", 1, (2, {"cp": 2}), [(2, {"cp": 2})]),
]


@pytest.mark.parametrize("head,dtype,before,saving,going_on", CASES)
def test_training_goes_on_as_if_nothing_had_happened(
    model_dir: Path,
    tmp_path: Path,
    head: str,
    dtype: str,
    before: int,
    saving: tuple[int, dict[str, Any]],
    going_on: list[tuple[int, dict[str, Any]]],
) -> None:
    folder = tmp_path / "saved"
    world, layout = saving
    expected = run_ranks(world, save, model_dir, LayoutConfig(**layout), head, dtype, folder, before)[0]
    for count, other in going_on:
        found = run_ranks(count, resume, model_dir, LayoutConfig(**other), head, dtype, folder)[0]
        if (count, other) == saving:
            assert found == expected, "to the bit"
            continue
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
        for (norm, rate), (expected_norm, expected_rate) in zip(found[0], expected[0], strict=True):
            assert norm == pytest.approx(expected_norm, rel=1e-4)
            assert rate == expected_rate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_distributed_optimizer(model_dir: Path, tmp_path: Path, dtype: str) -> None:
    one, folder = LayoutConfig(), tmp_path / "saved"
    for before in (0, 2):
        place = folder.with_name(f"saved{before}")
        expected = run_ranks(2, _plain_save, model_dir, one, dtype, place, before)
        assert run_ranks(2, _plain_resume, model_dir, one, dtype, place) == expected


def _plain_save(model_dir: Path, layout: LayoutConfig, dtype: str, folder: Path, before: int) -> Steps:
    return save(model_dir, layout, "lm", dtype, folder, before, distributed=False)


def _plain_resume(model_dir: Path, layout: LayoutConfig, dtype: str, folder: Path) -> Steps:
    return resume(model_dir, layout, "lm", dtype, folder, distributed=False)

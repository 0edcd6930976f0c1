"""Weights, optimizer and schedule come back from a checkpoint to the bit, and at other layouts to
rounding."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import make_batch
from hf_models import write_model
from megatron.core.dist_checkpointing import ShardedObject
from ranks import run_ranks
from test_train_step import OPTIMIZER, ROLLOUT, policy_loss, token_tensors
from torch.distributed.checkpoint import FileSystemReader

from vapo_megatron.checkpoint.dist_saver import ModelSaver, PlannedSave, load_training_state
from vapo_megatron.checkpoint.manifest import file_facts
from vapo_megatron.config.model import (
    ActorConfig,
    AdapterConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
)
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron import training_state
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.training.losses import ValueLoss
from vapo_megatron.weights.load import load_hf

Steps = tuple[list[tuple[float, float]], float]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen3": write_model(folder / "qwen3", "qwen3", tie_word_embeddings=True),
        "qwen3_moe": write_model(folder / "qwen3_moe", "qwen3_moe"),
        "glm4_moe": write_model(folder / "glm4_moe", "glm4_moe"),
    }


@pytest.fixture
def model_dir(models: dict[str, Path]) -> Path:
    return models["qwen3"]


def build(
    model_dir: Path, layout: LayoutConfig, head: str, dtype: str, load: bool, freezes: bool = False
) -> Trainable:
    """dtype: "adapter" stands for adapters on frozen weights in float32, which are always loaded;
    "adapter of experts" for those alone, which leave Megatron's optimizer of all else without a
    parameter."""
    adapter = dtype.startswith("adapter")
    spec = read_spec(model_dir)
    mesh = make_mesh(layout)
    shared: dict[str, Any] = {
        "layout": layout,
        "optimizer": OPTIMIZER.model_copy(update={"warmup_steps": 6}),
        "max_tokens_per_microbatch": 1000,
        "kind": "adapter" if adapter else "model",
    }
    section = ActorConfig(**shared) if head == "lm" else CriticConfig(**shared)
    settings = AdapterConfig(rank=3)
    if dtype == "adapter of experts":
        settings = settings.model_copy(update={"layers": ("linear_fc1", "linear_fc2")})
    model = ModelConfig(
        path=str(model_dir), dtype="float32" if adapter else dtype, adapter=settings
    )  # type: ignore[arg-type]
    trainable = Trainable(spec, model, section, mesh, head, name="actor", seed=1)  # type: ignore[arg-type]
    if load or adapter:
        load_hf(trainable.chunks, spec, model_dir, mesh, head)  # type: ignore[arg-type]
    if freezes:
        trainable.freeze()
    else:
        trainable.prepare()
    return trainable


def train(trainable: Trainable, steps: int) -> Steps:
    """(gradient norm, learning rate) of each step, and the sum of squares of the outputs after the
    last."""
    batch = make_batch(**ROLLOUT)
    found = []
    tensors = token_tensors(batch)
    value = ValueLoss(ValueLossConfig(), tensors["targets"], tensors["targets"], tensors["weights"])
    for _ in range(steps):
        loss = policy_loss(batch) if trainable.head == "lm" else value
        result = trainable.train_step(batch, range(batch.samples), loss)
        found.append((result.grad_norm, result.lr))
    return found, float(trainable.score(batch).double().square().sum())


def save(
    model_dir: Path, layout: LayoutConfig, head: str, dtype: str, folder: Path, before: int
) -> Steps:
    """Train, copy the state, train on, and only then write the copy: what training went on with."""
    trainable = build(model_dir, layout, head, dtype, load=True)
    train(trainable, before)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    plan = ModelSaver(trainable).plan(folder)
    after = train(trainable, 2)
    write(plan, folder)
    return after


def write(plan: PlannedSave, folder: Path) -> None:
    """Collective: a checkpoint of it, whose files are as they were said to be."""
    results: list[Any] = [None] * dist.get_world_size()
    written, facts = plan.write()
    dist.all_gather_object(results, written)
    if dist.get_rank() == 0:
        plan.close(results)
    assert facts == file_facts(folder, [folder / name for name in facts])
    dist.barrier()


def resume(model_dir: Path, layout: LayoutConfig, head: str, dtype: str, folder: Path) -> Steps:
    trainable = build(model_dir, layout, head, dtype, load=False)
    load_training_state(trainable, folder)
    return train(trainable, 2)


_only_in_full = partial(pytest.param, marks=pytest.mark.full)
CASES: list[Any] = [
    _only_in_full(
        "qwen3",
        "lm",
        "adapter",
        2,
        (2, {"tp": 2}),
        [(2, {"tp": 2}), (2, {}), (4, {"pp": 2, "vpp": 2})],
    ),
    _only_in_full(
        "qwen3",
        "value",
        "adapter",
        2,
        (2, {"pp": 2}),
        [(2, {"pp": 2}), (2, {"tp": 2, "sequence_parallel": True})],
    ),
    _only_in_full(
        "qwen3_moe", "lm", "adapter", 1, (2, {"ep": 2}), [(2, {"ep": 2}), (1, {}), (4, {"pp": 2})]
    ),
    _only_in_full(
        "qwen3_moe", "lm", "adapter of experts", 1, (2, {"ep": 2}), [(2, {"ep": 2}), (1, {})]
    ),
    # Family, head, dtype, updates before the save, the layout that saves, layouts that go on.
    _only_in_full("qwen3", "lm", "float32", 2, (2, {"tp": 2}), [(2, {"tp": 2}), (2, {}), (1, {})]),
    # Tied embeddings on a pipeline have gradient buckets of their own, with padding before and
    # after.
    (
        "qwen3",
        "lm",
        "float32",
        2,
        (4, {"pp": 2, "vpp": 2}),
        [(4, {"pp": 2, "vpp": 2}), (2, {"tp": 2})],
    ),
    _only_in_full(
        "qwen3",
        "value",
        "float32",
        0,
        (2, {"pp": 2}),
        [(2, {"pp": 2}), (2, {"tp": 2, "sequence_parallel": True})],
    ),
    ("qwen3", "value", "bfloat16", 1, (2, {"cp": 2}), [(2, {"cp": 2})]),
    (
        "qwen3_moe",
        "lm",
        "float32",
        2,
        (2, {"ep": 2}),
        [(2, {"ep": 2}), (2, {"tp": 2, "sequence_parallel": True})],
    ),
    # Layers with different parameters have keys of their own, and a frozen bias is saved with them;
    # test_dense_stages.py saves such a model in `make test`.
    _only_in_full(
        "glm4_moe",
        "lm",
        "float32",
        2,
        (2, {"pp": 2}),
        [(2, {"ep": 2}), (2, {"tp": 2, "sequence_parallel": True})],
    ),
    # Stages of one, two and one layers; of two, one and one.
    _only_in_full(
        "qwen3", "lm", "float32", 2, (3, {"pp": 3}), [(3, {"pp": 3}), (2, {"pp": 2, "vpp": 2})]
    ),
    _only_in_full("glm4_moe", "lm", "float32", 2, (3, {"pp": 3}), [(3, {"pp": 3}), (2, {"ep": 2})]),
    # Experts are shared by other ranks than the rest: their optimizer is cut over a group of its
    # own.
    _only_in_full(
        "qwen3_moe",
        "lm",
        "float32",
        2,
        (4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
        [(2, {"pp": 2})],
    ),
]


@pytest.mark.parametrize("family,head,dtype,before,saving,going_on", CASES)
def test_training_goes_on_as_if_nothing_had_happened(
    models: dict[str, Path],
    tmp_path: Path,
    family: str,
    head: str,
    dtype: str,
    before: int,
    saving: tuple[int, dict[str, Any]],
    going_on: list[tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Several parameters each time, and several times
    monkeypatch.setattr(training_state, "_GATHERED_BYTES", 150_000)
    model_dir = models[family]
    folder = tmp_path / "saved"
    world, layout = saving
    expected = run_ranks(
        world, save, model_dir, LayoutConfig(**layout), head, dtype, folder, before
    )[0]
    for count, other in going_on:
        found = run_ranks(count, resume, model_dir, LayoutConfig(**other), head, dtype, folder)[0]
        if (count, other) == saving:
            assert found == expected, "to the bit"
            continue
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
        for (norm, rate), (expected_norm, expected_rate) in zip(found[0], expected[0], strict=True):
            assert norm == pytest.approx(expected_norm, rel=1e-4)
            assert rate == expected_rate


def test_of_a_model_with_adapters_these_alone_are_saved(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_ranks(1, save, model_dir, LayoutConfig(), "value", "adapter", folder, 1)
    tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {name for name in tensors if not name.startswith(("optimizer.", "scheduler"))}
    assert {name for name in weights if ".adapter." not in name} == {
        "output_layer.weight",
        "output_layer.bias",
    }
    states = {
        name.removeprefix("optimizer.state.exp_avg.") for name in tensors if ".exp_avg." in name
    }
    assert states == weights and len(weights) == 2 + 4 * 4 * 2


def save_again(model_dir: Path, layout: LayoutConfig, root: Path) -> tuple[list[int], Steps]:
    """Five saves, the last with an object more: gathers of objects from ranks in each; steps after
    the fourth."""
    trainable = build(model_dir, layout, "lm", "float32", load=True)
    whole = training_state.training_state
    gathers = [0]
    for name in ("gather_object", "all_gather_object", "scatter_object_list"):
        setattr(dist, name, counted(getattr(dist, name), gathers))
    saver = ModelSaver(trainable)
    found = []
    after = ([], 0.0)
    more = ShardedObject("added", "late", (dist.get_world_size(),), (dist.get_rank(),))
    for number in range(5):
        folder = root / f"save{number}"
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        gathers[0] = 0
        if number == 4:
            training_state.training_state = lambda model: {**whole(model), "added": more}
        plan = saver.plan(folder)
        found.append(gathers[0])
        after = train(trainable, 2) if number < 4 else after
        write(plan, folder)
    return found, after


def counted(function: Callable[..., Any], into: list[int]) -> Callable[..., Any]:
    """The function, each call counted."""

    def call(*given: Any, **named: Any) -> Any:
        into[0] += 1
        return function(*given, **named)

    return call


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, pytest.param({}, marks=pytest.mark.full)], ids=["tp2", "dp2"]
)
def test_later_saves_exchange_no_plans_until_the_contents_change(
    model_dir: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    found = run_ranks(2, save_again, model_dir, LayoutConfig(**layout), tmp_path)
    for (first, second, *later, changed), _ in found:
        assert first > second > 0 and later == [0, 0] and changed == first
    # The fourth is of a plan made three saves ago: it holds the state of its own time.
    resumed = run_ranks(
        2, resume, model_dir, LayoutConfig(**layout), "lm", "float32", tmp_path / "save3"
    )
    assert resumed[0] == found[0][1]
    saved = [FileSystemReader(tmp_path / f"save{number}").read_metadata() for number in (3, 4)]
    added = [sum("added" in name for name in one.state_dict_metadata) for one in saved]
    stored = sum("added" in index.fqn for index in saved[1].storage_data)
    assert added == [0, 2] and stored == 2


def planned_bytes(model_dir: Path, layout: LayoutConfig, folder: Path) -> tuple[int, int]:
    """Host memory that a rank's copy keeps alive, and what the largest parameter's states take."""
    trainable = build(model_dir, layout, "lm", "float32", load=True)
    plan = ModelSaver(trainable).plan(folder)
    tensors = [
        tensor for _, _, (_, found) in plan.writer.write_buckets or () for _, tensor in found
    ]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    largest = max(
        parameter.numel() for chunk in trainable.chunks for parameter in chunk.parameters()
    )
    return sum(storages.values()), 16 * largest


def test_no_rank_holds_more_of_the_copy_than_its_share(model_dir: Path, tmp_path: Path) -> None:
    ((whole, largest),) = run_ranks(1, planned_bytes, model_dir, LayoutConfig(), tmp_path)
    parts = [held for held, _ in run_ranks(4, planned_bytes, model_dir, LayoutConfig(), tmp_path)]
    assert sum(parts) == pytest.approx(whole, rel=0.05)
    assert max(parts) <= whole / 4 + largest


def load_refused(model_dir: Path, layout: LayoutConfig, folder: Path) -> str:
    trainable = build(model_dir, layout, "lm", "float32", load=False)
    with pytest.raises(BadInput) as refused:
        load_training_state(trainable, folder)
    return str(refused.value)


def test_a_checkpoint_that_cannot_be_read_is_refused_in_one_line(
    model_dir: Path, tmp_path: Path
) -> None:
    """torch tells all ranks of what one of them met, by an error that is no Exception."""
    folder = tmp_path / "saved"
    layout = LayoutConfig()
    run_ranks(1, save, model_dir, layout, "lm", "float32", folder, 0)
    first = sorted(folder.glob("*.distcp"))[0]
    first.write_bytes(first.read_bytes()[:1000])
    (told,) = run_ranks(1, load_refused, model_dir, layout, folder)
    assert (
        told.startswith(f"{folder}: does not fit this model, or is damaged (") and "\n" not in told
    )
    other = write_model(tmp_path / "narrow", "qwen3", hidden_size=16)
    (told,) = run_ranks(1, load_refused, other, layout, folder)
    assert "shape" in told and "\n" not in told


def steps_of_groups(model_dir: Path, folder: Path) -> list[int]:
    trainable = build(model_dir, LayoutConfig(), "lm", "float32", load=False)
    assert trainable.optimizer is not None
    for group in trainable.optimizer.param_groups:
        group["step"] = 0  # a fused Adam has it from the start
    load_training_state(trainable, folder)
    return [group["step"] for group in trainable.optimizer.param_groups]


def test_a_resumed_fused_adam_has_the_steps_of_the_checkpoint(
    model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "actor"
    run_ranks(1, save, model_dir, LayoutConfig(), "lm", "float32", folder, 3)
    (steps,) = run_ranks(1, steps_of_groups, model_dir, folder)
    assert steps and set(steps) == {3}


def test_a_fused_adam_goes_on_counting_where_it_was() -> None:
    """It counts in its groups, as an int; what is saved of torch's Adam is a float tensor."""
    inner = SimpleNamespace(param_groups=[{"step": 0}])
    load = lambda state: inner.param_groups[0].update(step=torch.tensor(3.0))  # noqa: E731
    training_state._load(SimpleNamespace(optimizer=inner, load_state_dict=load), {})
    assert inner.param_groups == [{"step": 3}] and isinstance(inner.param_groups[0]["step"], int)

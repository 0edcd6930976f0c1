"""Transformer Engine's layers, FP8 and sleep on a real GPU: `pytest -m gpu tests/megatron`."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import make_batch
from hf_models import write_model
from trainables import loss_of, make_trainable

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.megatron.offload import PARTS
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.precision import CAPABILITY
from vapo_megatron.megatron.trainable import Trainable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]
needs_te = pytest.mark.skipif(
    not current_platform().has_transformer_engine, reason="Transformer Engine cannot be imported"
)
LAYERS = 4
# Of log-probs, the largest and the mean difference. Inputs and weights of this model's linear
# layers rounded to e4m3 by hand give a mean of 0.23 and a largest of 1.3 of 200 log-probs.
BF16_TOLERANCE = 0.1
FP8_TOLERANCE = 0.35
FP8_LARGEST = 1.3


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.cuda.set_device(0)
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group(
        current_platform().world_backend, init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("qwen3"),
        "qwen3",
        dtype=torch.bfloat16,
        hidden_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=512,
    )


def make(model_dir: Path, attention: str = "auto", **fields: Any) -> Trainable:
    return make_trainable(
        model_dir, "lm", dtype="bfloat16", attention=attention, optimizer={"lr": 1e-4}, **fields
    )


def score_and_norms(trainable: Trainable, steps: int = 2) -> tuple[torch.Tensor, list[float]]:
    batch = make_batch()
    loss = loss_of(trainable, batch)
    return trainable.score(batch), [
        trainable.train_step(batch, range(batch.samples), loss).grad_norm for _ in range(steps)
    ]


def skip_unless(recipe: str) -> None:
    found = current_platform().compute_capability
    if found < CAPABILITY[recipe]:
        pytest.skip(f"{recipe} needs compute capability {CAPABILITY[recipe]}, this GPU has {found}")


@needs_te
def test_transformer_engine_computes_what_the_local_layers_do(model_dir: Path) -> None:
    local, local_norms = score_and_norms(make(model_dir, attention="sdpa"))
    fused, fused_norms = score_and_norms(make(model_dir))
    assert (fused - local).abs().max() < BF16_TOLERANCE
    assert fused_norms == pytest.approx(local_norms, rel=0.05)


@needs_te
def test_grouped_expert_adapters_learn_as_local_ones(tmp_path: Path) -> None:
    """Every token goes through every expert: rounding cannot choose others."""
    sizes: dict[str, Any] = dict(
        hidden_size=256, head_dim=64, moe_intermediate_size=128, num_experts_per_tok=4
    )
    model = write_model(tmp_path, "qwen3_moe", dtype=torch.bfloat16, **sizes)
    local, local_norms = score_and_norms(make(model, attention="sdpa", adapter={"rank": 4}))
    fused, fused_norms = score_and_norms(make(model, adapter={"rank": 4}))
    assert (fused - local).abs().max() < BF16_TOLERANCE
    assert fused_norms == pytest.approx(local_norms, rel=0.05)


@needs_te
@pytest.mark.parametrize("adapter", [None, {"rank": 4}])
@pytest.mark.parametrize("recipe", CAPABILITY)
def test_a_recipe_is_near_bfloat16(
    model_dir: Path, recipe: str, adapter: dict[str, int] | None
) -> None:
    skip_unless(recipe)
    exact, exact_norms = score_and_norms(make(model_dir, adapter=adapter))
    trainable = make(model_dir, adapter=adapter, precision={"fp8": recipe})
    found, norms = score_and_norms(trainable)
    batch = make_batch()
    rows = trainable.config.precision.rows
    assert all(len(m.ids) % rows == 0 for m in trainable.microbatches(batch, range(batch.samples)))
    apart = (found - exact).abs()
    assert 0 < apart[:, 0].mean() < FP8_TOLERANCE  # above 0: FP8 was really used
    assert apart.max() < FP8_LARGEST
    # AdamW's first step goes by signs: where gradients are near 0, rounding decides what the second
    # norm is.
    assert norms[0] == pytest.approx(exact_norms[0], rel=0.15)
    assert norms[1] == pytest.approx(exact_norms[1], rel=0.4)


def phases(trainable: Trainable, sleeps: bool) -> list[Any]:
    batch = make_batch()
    found = []
    loss = loss_of(trainable, batch)
    for _ in range(3):
        if sleeps:
            trainable.offloader.onload_only()
            trainable.offloader.onload_only("weights")
        found.append(trainable.score(batch).tolist())
        if sleeps:
            trainable.offloader.onload_only(*PARTS)
        found.append(trainable.train_step(batch, range(batch.samples), loss).grad_norm)
    return found


@pytest.mark.parametrize(
    "attention,precision",
    [
        ("sdpa", {}),
        pytest.param("auto", {}, marks=needs_te),
        pytest.param("auto", {"fp8": "tensorwise"}, marks=needs_te),
        pytest.param("auto", {"fp8": "blockwise"}, marks=needs_te),
    ],
)
def test_training_goes_on_to_the_bit_after_sleep(
    model_dir: Path, attention: str, precision: dict[str, Any]
) -> None:
    """Sleep ends what is under way: gathers of updated weights, whose copies in FP8 have to
    follow."""
    if "fp8" in precision:
        skip_unless(precision["fp8"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        onloaded = phases(make(model_dir, attention, offload="never", precision=precision), False)
        slept = phases(make(model_dir, attention, offload="always", precision=precision), True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert slept == onloaded


@needs_te
def test_sleep_gives_the_memory_back(tmp_path: Path) -> None:
    """All but workspaces."""
    wide = write_model(
        tmp_path / "wide",
        "qwen3",
        dtype=torch.bfloat16,
        hidden_size=2048,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=8192,
    )
    fp8: dict[str, Any] = {}
    if current_platform().compute_capability >= CAPABILITY["tensorwise"]:
        fp8 = {"fp8": "tensorwise"}
    gc.collect()  # models of other tests, whose memory would come back in between
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free_before = torch.cuda.mem_get_info()[0]
    trainable = make(wide, offload="always", precision=fp8, layout=LayoutConfig())
    batch = make_batch()
    trainable.train_step(batch, range(batch.samples), loss_of(trainable, batch))
    held = sum(part.device for part in trainable.offloader.footprint().values())
    trainable.offloader.onload_only()
    assert all(part.device == 0 for part in trainable.offloader.footprint().values())
    left = torch.cuda.memory_allocated() - before
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert left < 0.02 * held, f"{left} of {held} bytes are still allocated"
    assert taken < 0.2 * held, "the driver did not get the memory back"
    trainable.offloader.onload_only("weights")
    weights = trainable.offloader.footprint()["weights"].device
    assert weights < torch.cuda.memory_allocated() - before < 1.1 * weights + left

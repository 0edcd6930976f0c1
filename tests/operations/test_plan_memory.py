"""Planned bytes against the bytes of real tensors: what a Trainable holds, and what autograd
keeps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_table import FAMILIES
from hf_models import write_model
from matrices import others_in_full
from ranks import run_ranks

from vapo_megatron.config.model import (
    ActorConfig,
    AdapterConfig,
    CriticConfig,
    LayoutConfig,
    ModelConfig,
    RecomputeConfig,
)
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.models import PlannedModel

SHAPE = dict(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=8,
    vocab_size=256,
)
TOKENS = 512


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


ADAPTER = AdapterConfig(rank=6, layers=("linear_qkv", "linear_fc1", "linear_fc2"))


def section_of(layout: LayoutConfig, head: str, kind: str) -> ActorConfig | CriticConfig:
    shared: dict[str, Any] = {"layout": layout, "kind": kind}
    return CriticConfig(**shared) if head == "value" else ActorConfig(**shared)


def held_by_rank(
    model_dir: Path, layout: LayoutConfig, dtype: str, head: str, kind: str
) -> tuple[int, dict[str, int]]:
    """This rank's pipeline stage and the bytes of its tensors, once a step of the optimizer has
    made its states."""
    mesh = make_mesh(layout)
    section = section_of(layout, head, kind)
    model = ModelConfig(path="unread", dtype=dtype, attention="sdpa", adapter=ADAPTER)  # type: ignore[arg-type]
    trainable = Trainable(read_spec(model_dir), model, section, mesh, head, name="actor", seed=1)  # type: ignore[arg-type]
    with torch.no_grad():
        for chunk in trainable.chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
    trainable.prepare()
    for wrapped in trainable.wrapped:
        wrapped.zero_grad_buffer()
    trainable.optimizer.step()
    parameters = [p for chunk in trainable.chunks for p in chunk.parameters()]
    main = [p for group in trainable.optimizer.param_groups for p in group["params"]]
    states = [
        t
        for o in inner(trainable.optimizer)
        for s in o.state.values()
        for t in s.values()
        if is_moment(t)
    ]
    owned = storage_bytes(states)
    if dtype == "bfloat16":
        owned += storage_bytes([p for p in main if p.dtype == torch.float32])
    return mesh.pp_rank, {
        "weights": storage_bytes(parameters),
        "gradients": storage_bytes([p.main_grad for p in parameters if p.requires_grad]),
        "optimizer": owned,
    }


def inner(optimizer: Any) -> list[Any]:
    """The torch optimizers inside Megatron's."""
    return [o.optimizer for o in getattr(optimizer, "chained_optimizers", [optimizer])]


def is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


_in_full = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("layout", "ranks", "dtype", "head", "tied", "kind"),
    [
        (LayoutConfig(), 1, "float32", "lm", False, "model"),
        (LayoutConfig(), 2, "bfloat16", "lm", True, "model"),
        _in_full(
            LayoutConfig(tp=2, sequence_parallel=True), 4, "bfloat16", "value", False, "model"
        ),
        (LayoutConfig(tp=2, pp=2), 4, "bfloat16", "lm", True, "model"),
        _in_full(LayoutConfig(pp=3), 3, "bfloat16", "lm", True, "model"),
        _in_full(LayoutConfig(), 2, "bfloat16", "lm", True, "adapter"),
        _in_full(LayoutConfig(tp=2, pp=2), 4, "float32", "value", False, "adapter"),
        (LayoutConfig(pp=2, ep=2), 4, "bfloat16", "value", False, "adapter"),
    ],
)
def test_weights_gradients_and_optimizer(
    tmp_path: Path, layout: LayoutConfig, ranks: int, dtype: str, head: str, tied: bool, kind: str
) -> None:
    family = "qwen2" if layout.ep == 1 else "qwen3_moe"
    directory = write_model(tmp_path, family, tie_word_embeddings=tied, **SHAPE)
    section = section_of(layout, head, kind)
    width = 4 if dtype == "float32" else 2
    adapter = ADAPTER if kind == "adapter" else None
    planned = PlannedModel(
        "actor", read_spec(directory), head, section, ranks, width, False, adapter
    )  # type: ignore[arg-type]
    padding = 4 * 512 * ranks
    for stage, held in run_ranks(
        ranks, held_by_rank, directory, layout, dtype, head, kind, deadline=240
    ):
        for part, size in held.items():
            expected = planned.bytes_of(part, stage)  # type: ignore[arg-type]
            # Megatron pads its buffers so that every rank's part begins at 128 bytes; the last
            # rank's part is the rest.
            least = expected - (padding if part == "optimizer" else 0)
            assert least <= size <= expected + padding, (part, stage)


# Each kind of attention, and experts or none.
IN_TEST = ("qwen2", "gpt_oss", "gemma3_text", "glm4_moe", "deepseek_v32", "qwen3_5_moe_text")


@pytest.mark.parametrize("family", others_in_full(FAMILIES, IN_TEST))
def test_every_family_holds_what_is_planned(tmp_path: Path, family: str) -> None:
    directory = write_model(tmp_path, family, **SHAPE)
    section = section_of(LayoutConfig(), "lm", "model")
    planned = PlannedModel("actor", read_spec(directory), "lm", section, 1, 2, False)
    ((_, held),) = run_ranks(
        1, held_by_rank, directory, LayoutConfig(), "bfloat16", "lm", "model", deadline=240
    )
    for part, size in held.items():
        assert planned.bytes_of(part, 0) == pytest.approx(size, rel=0.01), part  # type: ignore[arg-type]


def kept_by_rank(
    model_dir: Path, layout: LayoutConfig, recompute: RecomputeConfig, dtype: str, head: str
) -> int:
    """Bytes that autograd keeps of one forward pass over a micro-batch, weights aside."""
    from megatron.core.packed_seq_params import PackedSeqParams

    mesh = make_mesh(layout)
    section = ActorConfig(layout=layout, recompute=recompute)
    model = ModelConfig(path="unread", dtype=dtype, attention="sdpa")  # type: ignore[arg-type]
    trainable = Trainable(read_spec(model_dir), model, section, mesh, head, name="actor", seed=1)  # type: ignore[arg-type]
    chunk = trainable.chunks[0]
    weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    starts = torch.arange(0, TOKENS + 1, TOKENS // 4, dtype=torch.int32)
    local = TOKENS // layout.cp
    if head == "lm":
        chunk.output_layer.labels = torch.zeros(1, local, dtype=torch.long)
        chunk.output_layer.rows = torch.arange(local)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=TOKENS // 4,
        max_seqlen_kv=TOKENS // 4,
    )
    ids = torch.zeros(1, local, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk(ids, ids, None, packed_seq_params=packed)
    return storage_bytes(list(kept.values()))


FULL, SELECTIVE, NONE = (
    RecomputeConfig(granularity=kind) for kind in ("full", "selective", "none")
)


@pytest.mark.parametrize(
    ("family", "layout", "recompute", "dtype", "head"),
    [
        ("qwen3", LayoutConfig(), NONE, "float32", "lm"),
        ("qwen2", LayoutConfig(), NONE, "bfloat16", "value"),
        ("qwen3", LayoutConfig(tp=2, sequence_parallel=True), NONE, "float32", "lm"),
        ("llama", LayoutConfig(tp=2), SELECTIVE, "float32", "lm"),
        ("qwen3", LayoutConfig(), FULL, "bfloat16", "lm"),
        ("qwen2", LayoutConfig(cp=2), NONE, "float32", "lm"),
        ("qwen3_5_text", LayoutConfig(), NONE, "float32", "lm"),
        pytest.param(
            "qwen3_5_text",
            LayoutConfig(tp=2, sequence_parallel=True),
            NONE,
            "bfloat16",
            "lm",
            marks=pytest.mark.full,
        ),
    ],
)
def test_activations_within_a_tenth_of_what_autograd_keeps(
    tmp_path: Path,
    family: str,
    layout: LayoutConfig,
    recompute: RecomputeConfig,
    dtype: str,
    head: str,
) -> None:
    head_dim = {} if family == "qwen2" else {"head_dim": 16}
    directory = write_model(tmp_path, family, **SHAPE, **head_dim)
    measured = max(
        run_ranks(
            layout.model_size, kept_by_rank, directory, layout, recompute, dtype, head, deadline=240
        )
    )
    width = 4 if dtype == "float32" else 2
    spec = read_spec(directory)
    section = section_of(layout, head, "model").model_copy(update={"recompute": recompute})
    model = PlannedModel("actor", spec, head, section, layout.model_size, width, False)  # type: ignore[arg-type]
    tokens = TOKENS / layout.cp
    planned = model.activations_kept(tokens, 0, tokens)
    if recompute.granularity == "full":
        # What backward computes again is not there after forward
        planned -= tokens * model.layer(model.spec.layers[0])
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "recompute", "dtype"),
    [
        (LayoutConfig(), NONE, "bfloat16"),
        (LayoutConfig(tp=2, sequence_parallel=True), NONE, "float32"),
        (LayoutConfig(), SELECTIVE, "float32"),
    ],
)
def test_latent_attention_keeps_what_is_planned(
    tmp_path: Path, layout: LayoutConfig, recompute: RecomputeConfig, dtype: str
) -> None:
    """Seen in two models that differ by two dense layers."""
    found = []
    for dense in (2, 4):
        depth = {"num_hidden_layers": dense + 1, "first_k_dense_replace": dense}
        directory = write_model(tmp_path / str(dense), "deepseek_v3", **SHAPE | depth)
        ranks = run_ranks(
            layout.model_size,
            kept_by_rank,
            directory,
            layout,
            recompute,
            dtype,
            "value",
            deadline=240,
        )
        width = 4 if dtype == "float32" else 2
        section = section_of(layout, "value", "model")
        section = section.model_copy(update={"recompute": recompute})
        planned = PlannedModel(
            "critic", read_spec(directory), "value", section, layout.model_size, width, False
        )
        found.append((max(ranks), planned.activations_kept(TOKENS, 0, TOKENS)))
    (few, planned_few), (many, planned_many) = found
    assert planned_many - planned_few == pytest.approx(many - few, rel=0.03)

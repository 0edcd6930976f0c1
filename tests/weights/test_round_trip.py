"""Hugging Face -> Megatron -> Hugging Face is the identity, bit by bit, and the stream the same, at
every layout."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from family_table import FAMILIES, WITH_EXPERTS
from hf_models import megatron, read_tensors, write_model
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.export import make_slots, save_hf, stream_hf
from vapo_megatron.weights.load import load_hf

pytestmark = pytest.mark.full

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = [
    (1, LayoutConfig()),
    (2, LayoutConfig(tp=2)),
    (2, LayoutConfig(pp=2)),
    (2, LayoutConfig(pp=2, vpp=2)),
    (3, LayoutConfig(pp=3)),
    (4, LayoutConfig(tp=2, pp=2)),
    (4, LayoutConfig(tp=4)),
    (4, LayoutConfig(tp=2, cp=2)),
    (2, LayoutConfig(ep=2)),
    (4, LayoutConfig(tp=2, ep=2)),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for every family, dtype and kind of head, half of them in several files."""
    root = tmp_path_factory.mktemp("sources")
    found = {}
    for family in FAMILIES:
        for dtype, torch_dtype in DTYPES.items():
            for tied in (False, True):
                name = f"{family}-{dtype}-{'tied' if tied else 'untied'}"
                found[name] = write_model(
                    root / name,
                    family,
                    dtype=torch_dtype,
                    tie_word_embeddings=tied,
                    max_shard_size="30KB" if tied else "1GB",
                )
    return found


def convert(layout: LayoutConfig, sources: dict[str, Path], out: Path) -> None:
    for name, source in sources.items():
        spec = read_spec(source)
        chunks, mesh = megatron(spec, layout, "lm", spec.dtype)
        load_hf(chunks, spec, source, mesh, "lm")
        # Tied copies on a last stage do not show in what is saved.
        assert all(
            parameter.isfinite().all() for chunk in chunks for parameter in chunk.parameters()
        )
        save_hf(chunks, spec, mesh, "lm", source, out / name, max_shard_bytes=40_000)


@pytest.mark.parametrize(
    ("world_size", "layout"), LAYOUTS, ids=[layout.describe(n) for n, layout in LAYOUTS]
)
def test_round_trip_is_bit_identical(
    sources: dict[str, Path], tmp_path: Path, world_size: int, layout: LayoutConfig
) -> None:
    if layout.ep > 1:
        sources = {name: path for name, path in sources.items() if name.startswith(WITH_EXPERTS)}
    elif world_size > 1:  # a tensor is cut alike in every dtype
        sources = {
            name: source
            for name, source in sources.items()
            if name.endswith(("bfloat16-untied", "32-tied"))
        }
    run_ranks(world_size, convert, layout, sources, tmp_path, deadline=240)
    for name, source in sources.items():
        expected = read_tensors(source)
        got = read_tensors(tmp_path / name)
        assert got.keys() == expected.keys(), name
        for key, tensor in expected.items():
            assert got[key].dtype == tensor.dtype
            assert torch.equal(got[key], tensor), (name, key)


def streamed(
    layout: LayoutConfig, source: Path, bucket_bytes: int
) -> list[list[tuple[str, np.ndarray]]]:
    """Names and values, in float32, of each bucket. (A tensor would go between processes by a
    handle to this one.)"""
    spec = read_spec(source)
    chunks, mesh = megatron(spec, layout, "lm", spec.dtype)
    load_hf(chunks, spec, source, mesh, "lm")
    slots = make_slots(torch.device("cpu"))
    return [
        [(name, tensor.float().numpy().copy()) for name, tensor in bucket]
        for bucket in stream_hf(chunks, spec, mesh, "lm", bucket_bytes, slots)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 20])
def test_every_rank_gets_the_same_buckets_at_every_layout(
    sources: dict[str, Path], bucket_bytes: int
) -> None:
    source = sources["qwen2-float32-untied"]
    (reference,) = run_ranks(1, streamed, LayoutConfig(), source, bucket_bytes)
    sizes = [[tensor.nbytes for _, tensor in bucket] for bucket in reference]
    # A bucket is over its bound only where it is one parameter (QKV and gate-up are several
    # tensors).
    assert all(sum(bucket) <= bucket_bytes or len(bucket) <= 3 for bucket in sizes)
    assert len(sizes) > 1 or bucket_bytes == 1 << 20
    for answer in run_ranks(4, streamed, LayoutConfig(tp=2, pp=2, vpp=2), source, bucket_bytes):
        assert [[name for name, _ in bucket] for bucket in answer] == [
            [name for name, _ in b] for b in reference
        ]
        for (_, got), (_, expected) in zip(chain(*answer), chain(*reference), strict=True):
            assert np.array_equal(got, expected)


def test_what_is_saved_is_a_complete_directory(sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["llama-bfloat16-untied"]
    out = tmp_path / "out"
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_text("not ours")
    (tmp_path / "other").mkdir()
    run_ranks(1, convert, LayoutConfig(), {"out": source}, tmp_path)
    assert {file.name for file in out.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    }
    assert not (out / "pytorch_model.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16

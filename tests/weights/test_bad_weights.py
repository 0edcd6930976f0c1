"""Damaged directories and full disks end in one line that names the tensor or the file, on every
rank."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import megatron, write_model, write_tensors
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.load import check_weights, load_hf

UP = "model.layers.2.mlp.up_proj.weight"


def _drop(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors.__delitem__(UP))


def _add(path: Path) -> None:
    write_tensors(
        path, lambda tensors: tensors.update({"model.layers.4.mlp.up_proj.weight": torch.ones(1)})
    )


def _reshape(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors.update({UP: torch.ones(48, 31)}))


def _quantise(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors.update({UP: torch.ones(48, 32, dtype=torch.int8)}))


def _nan(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors.update({UP: torch.full((48, 32), torch.nan)}))


def _untie(path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"] += 1e-3

    write_tensors(path, change)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _shard(path: Path, number: int) -> Path:
    return sorted(path.glob("model-*.safetensors"))[number]


def _drop_shard(path: Path) -> None:
    _shard(path, 1).unlink()


def _truncate_shard(path: Path) -> None:
    file = _shard(path, 1)
    file.write_bytes(file.read_bytes()[:50])


def _misplace(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][UP] = _shard(path, 0).name
    index.write_text(json.dumps(content))


def _spoil_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


CASES: list[tuple[Callable[[Path], None], str, list[str]]] = [
    (_drop, "1GB", [UP, "is missing (1 of 51 are)"]),
    (_add, "1GB", ["model.layers.4.mlp.up_proj.weight is not known"]),
    (_reshape, "1GB", [UP, "[48, 31], expected [48, 32]"]),
    (_quantise, "1GB", [UP, "dtype I8, expected one of"]),
    (_nan, "1GB", [UP, "holds NaN or infinity"]),
    (
        _untie,
        "1GB",
        ["lm_head.weight is not model.embed_tokens.weight", "tie_word_embeddings to false"],
    ),
    (_truncate, "1GB", ["model.safetensors: truncated"]),
    (_no_weights, "1GB", ["neither model.safetensors nor model.safetensors.index.json"]),
    (_drop_shard, "20KB", ["model-00002-of-", "no such file"]),
    (_truncate_shard, "20KB", ["model-00002-of-", "truncated"]),
    (_misplace, "20KB", [UP, "model-00001-of-"]),
    (_spoil_index, "20KB", ["index.json: no readable weight_map"]),
]


def test_fused_experts_are_called_so(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "qwen3_moe")

    def fuse(held: dict[str, Any]) -> None:
        experts = "model.layers.0.mlp.experts."
        parts = {name: held.pop(name) for name in list(held) if name.startswith(experts)}
        held[experts + "down_proj"] = torch.stack(
            [tensor for name, tensor in parts.items() if "down" in name]
        )

    write_tensors(source, fuse)
    with pytest.raises(BadInput, match=r"its experts are fused, \S+experts.down_proj is one") as at:
        check_weights(source, read_spec(source), "lm")
    assert "save_original_format=True" in str(at.value) and "fetch" not in str(at.value)


def load_refusals(sources: list[Path]) -> list[str]:
    messages = []
    for source in sources:
        spec = read_spec(source)
        chunks, mesh = megatron(spec, LayoutConfig(tp=2), "lm")
        with pytest.raises(BadInput) as error:
            load_hf(chunks, spec, source, mesh, "lm")
        messages.append(str(error.value))
    return messages


def test_damaged_weights_are_named_alike_on_every_rank(tmp_path: Path) -> None:
    sources = []
    for damage, max_shard_size, _ in CASES:
        sources.append(
            write_model(tmp_path / damage.__name__, "qwen2", max_shard_size=max_shard_size)
        )
        damage(sources[-1])
    first, second = run_ranks(2, load_refusals, sources)
    assert first == second
    for message, source, (_, _, told) in zip(first, sources, CASES, strict=True):
        assert all(part in message for part in (*told, str(source))), message
        assert "\n" not in message


@pytest.mark.parametrize("tied", [True, False])
def test_what_carries_no_parameter_may_be_there(tmp_path: Path, tied: bool) -> None:
    source = write_model(tmp_path / "model", "llama", tie_word_embeddings=tied)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        if tied:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    write_tensors(source, add)
    assert run_ranks(1, load_cleanly, source) == [True]


def load_cleanly(source: Path) -> bool:
    spec = read_spec(source)
    chunks, mesh = megatron(spec, LayoutConfig(), "lm")
    load_hf(chunks, spec, source, mesh, "lm")
    return all(bool(parameter.isfinite().all()) for parameter in chunks[0].parameters())


def save_to_a_full_disk(source: Path, out: Path) -> str:
    spec = read_spec(source)
    chunks, mesh = megatron(spec, LayoutConfig(tp=2), "lm")
    load_hf(chunks, spec, source, mesh, "lm")
    # No file of this process may grow further: what a full disk does to a writer, for anyone.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    with pytest.raises(BadInput) as error:
        save_hf(chunks, spec, mesh, "lm", source, out, max_shard_bytes=20_000)
    return str(error.value)


def test_a_full_disk_leaves_the_old_model_and_nothing_else(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3")
    out = write_model(tmp_path / "out", "qwen3", seed=1)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    messages = run_ranks(2, save_to_a_full_disk, source, out)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{out}: cannot be written (")
    assert "\n" not in messages[0]
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def save_over_something_else(source: Path, out: Path) -> str:
    spec = read_spec(source)
    chunks, mesh = megatron(spec, LayoutConfig(), "lm")
    load_hf(chunks, spec, source, mesh, "lm")
    with pytest.raises(BadInput) as error:
        save_hf(chunks, spec, mesh, "lm", source, out)
    return str(error.value)


def test_a_directory_that_is_no_model_is_not_replaced(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3")
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.tex").write_text("...")
    (message,) = run_ranks(1, save_over_something_else, source, out)
    assert message.startswith(f"{out}: exists and is not a model directory")
    assert [path.name for path in out.iterdir()] == ["chapter1.tex"]

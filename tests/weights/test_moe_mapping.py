"""Experts between Hugging Face files and Megatron shards: names under local and grouped layers,
every spread over ranks, and what a config may not say."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import megatron, read_tensors, write_model, write_tensors
from matrices import others_in_full
from ranks import run_ranks
from torch.nn import Module, Parameter

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.weights.export import save_hf, stream_hf
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.mapping import Entry, entries, local_parameters

LAYOUTS = [
    (2, LayoutConfig(ep=2)),
    (2, LayoutConfig(tp=2, sequence_parallel=True)),
    (4, LayoutConfig(tp=2, ep=2, sequence_parallel=True)),
    (4, LayoutConfig(tp=2, ep=4, sequence_parallel=True)),
    (4, LayoutConfig(tp=4, ep=2, sequence_parallel=True)),
    (4, LayoutConfig(pp=2, vpp=2, ep=2)),
    (8, LayoutConfig(cp=2, pp=2, ep=4)),
]
# Experts over more ranks than tensors, over fewer, and both on stages of two pieces.
IN_TEST = [LAYOUTS[3], LAYOUTS[4], LAYOUTS[5]]
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {
        name: write_model(
            root / name, "qwen3_moe", dtype=getattr(torch, name), max_shard_size="60KB"
        )
        for name in DTYPES
    }


def convert(
    layout: LayoutConfig, sources: dict[str, Path], out: Path
) -> dict[str, np.ndarray] | None:
    """Save every source; what this rank's block streams of the first."""
    streamed = None
    for name, source in sources.items():
        spec = read_spec(source)
        chunks, mesh = megatron(spec, layout, "lm", spec.dtype)
        load_hf(chunks, spec, source, mesh, "lm")
        assert all(
            parameter.isfinite().all() for chunk in chunks for parameter in chunk.parameters()
        )
        save_hf(chunks, spec, mesh, "lm", source, out / name, max_shard_bytes=40_000)
        if streamed is None:
            buckets = stream_hf(chunks, spec, mesh, "lm", 20_000)
            streamed = {
                key: tensor.float().numpy().copy() for bucket in buckets for key, tensor in bucket
            }
    return streamed


@pytest.mark.parametrize(
    ("world_size", "layout"),
    others_in_full(LAYOUTS, IN_TEST),
    ids=[layout.describe(n) for n, layout in LAYOUTS],
)
def test_experts_come_back_bit_by_bit_from_every_layout(
    sources: dict[str, Path], tmp_path: Path, world_size: int, layout: LayoutConfig
) -> None:
    answers = run_ranks(world_size, convert, layout, sources, tmp_path)
    for name, source in sources.items():
        expected = read_tensors(source)
        got = read_tensors(tmp_path / name)
        assert got.keys() == expected.keys()
        assert all(got[key].dtype == expected[key].dtype for key in expected)
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    expected = read_tensors(sources["float32"])
    order = list(answers[0])
    for streamed in answers:
        assert list(streamed) == order
        assert all(np.array_equal(streamed[key], expected[key].numpy()) for key in expected)


class Layer(Module):
    """The MLP of a layer under Megatron's names: experts 2 and 3 of 4 are here."""

    def __init__(self, spec: ModelSpec, names: dict[str, str]) -> None:
        super().__init__()
        self.layer_number = 1
        self.mlp = Module()
        self.mlp.local_expert_indices = [2, 3]  # type: ignore[assignment]
        for entry in entries(spec, "lm"):
            if entry.layer != 0 or entry.expert not in (None, 2, 3):
                continue
            index = None if entry.expert is None else entry.expert - 2
            name = names.get(entry.rule.megatron, entry.rule.megatron).format(index)
            *path, last = name.split(".")
            module: Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, Module())
                module = module.get_submodule(part)
            module.register_parameter(last, Parameter(torch.zeros(entry.rule.shard_shape(1))))


def chunk(layer: Layer) -> Module:
    model = Module()
    model.decoder = Module()
    model.decoder.layers = torch.nn.ModuleList([layer])
    return model


NAMES = {
    "local": {
        f"mlp.experts.linear_fc{i}.weight": f"mlp.experts.local_experts.{{}}.linear_fc{i}.weight"
        for i in (1, 2)
    },
    "grouped": {
        f"mlp.experts.linear_fc{i}.weight": f"mlp.experts.linear_fc{i}.weight{{}}" for i in (1, 2)
    },
}


@pytest.fixture(scope="module")
def spec(sources: dict[str, Path]) -> ModelSpec:
    return read_spec(sources["float32"])


@pytest.mark.parametrize("names", NAMES)
def test_experts_are_counted_over_the_whole_layer(spec: ModelSpec, names: str) -> None:
    found = [
        entry for entry, _ in local_parameters([chunk(Layer(spec, NAMES[names]))], spec, "lm", 1)
    ]
    wanted = [
        entry for entry in entries(spec, "lm") if entry.layer == 0 and entry.expert in (None, 2, 3)
    ]
    assert sorted(map(str, found)) == sorted(map(str, wanted))
    gate_up = next(entry for entry in found if entry.expert == 3 and "fc1" in entry.rule.megatron)
    assert gate_up.hf == tuple(
        f"model.layers.0.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")
    )


def test_every_expert_has_one_owner(spec: ModelSpec) -> None:
    rule = spec.layers[0].expert_rules[0]
    assert [Entry(rule, 0, expert).owner(spec, 2) for expert in range(4)] == [0, 0, 1, 1]
    assert Entry(spec.layers[0].rules[0], 0).owner(spec, 2) is None


def test_parameters_are_counted_as_transformers_counts_them(
    sources: dict[str, Path], spec: ModelSpec
) -> None:
    tensors = read_tensors(sources["float32"])
    assert spec.parameter_count() == sum(tensor.numel() for tensor in tensors.values())
    expert = sum(tensor.numel() for name, tensor in tensors.items() if ".experts.0." in name)
    # Of four experts two are idle; the sum above is over all layers.
    assert spec.active_parameter_count() == spec.parameter_count() - 2 * expert


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_either_name_of_the_number_of_experts_is_read(tmp_path: Path, key: str) -> None:
    path = write_model(tmp_path, "qwen3_moe") / "config.json"
    config = json.loads(path.read_text())
    config.pop("num_local_experts", None)
    path.write_text(
        json.dumps({name: x for name, x in config.items() if name != "num_experts"} | {key: 4})
    )
    assert read_spec(tmp_path).num_experts == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": None, "num_local_experts": None}, "num_experts is missing"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], expected \[\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most the 4 experts"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob is true with num_experts_per_tok 1"),
    ],
)
def test_what_the_layers_cannot_represent_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = write_model(tmp_path, "qwen3_moe") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(BadInput, match=told):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"),
            r"experts\.3\.up_proj\.weight is missing",
        ),
        (
            lambda t: t.update(
                {"model.layers.2.mlp.experts.4.up_proj.weight": torch.zeros(24, 32)}
            ),
            r"experts\.4\.up_proj\.weight is not known",
        ),
    ],
)
def test_an_expert_missing_or_too_many_is_refused_by_name(
    tmp_path: Path, change: Any, told: str
) -> None:
    source = write_model(tmp_path, "qwen3_moe")
    write_tensors(source, change)
    mesh = SimpleNamespace(tp_size=1, tp_rank=0)
    with pytest.raises(BadInput, match=told):
        load_hf([], read_spec(source), source, mesh, "lm")


def test_a_dense_spec_has_no_experts(tmp_path: Path) -> None:
    spec = read_spec(write_model(tmp_path, "qwen3"))
    assert spec.num_experts == 0 and spec.experts is None
    assert all(entry.expert is None for entry in entries(spec, "lm"))

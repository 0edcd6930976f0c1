"""Buckets of own shares: each tensor-parallel rank's part of every tensor, without a gather."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES
from hf_models import megatron, read_tensors, write_model
from matrices import others_in_full
from numpy.typing import NDArray
from ranks import run_ranks
from trainables import make_trainable
from typing_extensions import override

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.adapters import adapters_of
from vapo_megatron.weights.bucket import DeviceSlots, Memory
from vapo_megatron.weights.export import stream_hf, stream_masks
from vapo_megatron.weights.load import load_hf

LIMIT = 20_000
CPU = torch.device("cpu")
# A plain model, experts of their own ranks, experts in one tensor, latent attention, and a query
# projection and delta nets whose rows stand in another order.
IN_TEST = ["qwen2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text"]
NAN_BYTE = 255

# Whole values where a rank's share is, elsewhere NaN; and the mask of its share.
Shares = list[tuple[str, NDArray[np.float32], NDArray[np.bool_]]]


class NanSlots(DeviceSlots):
    """Memory in which everything that was not written is NaN."""

    @override
    def take(self, index: int, nbytes: int) -> Memory:
        memory = super().take(index, nbytes)
        memory.buffer[:nbytes] = NAN_BYTE
        return memory


def shares(model_dir: Path, layout: LayoutConfig) -> tuple[int, Shares]:
    """This rank's number among tensor-parallel ranks, and its shares."""
    spec = read_spec(model_dir)
    chunks, mesh = megatron(spec, layout, "lm")
    load_hf(chunks, spec, model_dir, mesh, "lm")
    own = [
        (name, tensor.float().numpy().copy())
        for bucket in stream_hf(
            chunks, spec, mesh, "lm", LIMIT, NanSlots(CPU), own_shares=range(1000)
        )
        for name, tensor in bucket
    ]
    masks = [
        (name, (tensor > 0).numpy())
        for bucket in stream_masks(chunks, spec, mesh, "lm", LIMIT, NanSlots(CPU))
        for name, tensor in bucket
    ]
    assert [name for name, _ in own] == [name for name, _ in masks]
    rows = [(name, value, mask) for (name, value), (_, mask) in zip(own, masks, strict=True)]
    return mesh.tp_rank, rows


@pytest.mark.parametrize("family", others_in_full(sorted(FAMILIES), IN_TEST))
def test_a_rank_has_exactly_its_shares_and_all_ranks_have_everything(
    tmp_path: Path, family: str
) -> None:
    source = write_model(tmp_path / family, family)
    expected = read_tensors(source)
    ep = 2 if FAMILIES[family].experts else 1
    layout = LayoutConfig(tp=2, pp=2, ep=ep, sequence_parallel=True)
    answers = run_ranks(4, shares, source, layout, deadline=240)
    seen: dict[str, NDArray[np.int64]] = {}
    for rank, rows in answers:
        assert [name for name, _, _ in rows] == [name for name, _, _ in answers[0][1]]
        for name, value, mask in rows:
            whole = expected[name].float().numpy()
            assert np.array_equal(value[mask], whole[mask]), (rank, name)
            assert np.isnan(value[~mask]).all(), (rank, name)
            seen[name] = seen.get(name, np.zeros(mask.shape, dtype=np.int64)) + mask
    assert all((count > 0).all() for count in seen.values())
    # On both stages, either one rank of two has an element, or both have the tensor.
    assert {int(n) for count in seen.values() for n in np.unique(count)} == {2, 4}
    cut = [name for name, count in seen.items() if (count == 2).all()]
    assert any("embed_tokens" in name for name in cut)


def some_buckets(model_dir: Path) -> list[tuple[bool, bool]]:
    """For each bucket whether it is of own shares, and whether it has the checkpoint's values."""
    spec = read_spec(model_dir)
    chunks, mesh = megatron(spec, LayoutConfig(tp=2), "lm")
    load_hf(chunks, spec, model_dir, mesh, "lm")
    expected = read_tensors(model_dir)
    stream = stream_hf(chunks, spec, mesh, "lm", LIMIT, NanSlots(CPU), own_shares={1, 2})
    found = [
        (bucket.own_shares, all(torch.equal(tensor, expected[name]) for name, tensor in bucket))
        for bucket in stream
    ]
    dist.barrier()
    return found


def test_only_chosen_buckets_are_of_own_shares(tmp_path: Path) -> None:
    source = write_model(tmp_path / "qwen2", "qwen2", num_hidden_layers=2)
    for found in run_ranks(2, some_buckets, source):
        assert len(found) > 4
        assert found == [(i in (1, 2), i not in (1, 2)) for i in range(len(found))]


def with_adapters(model_dir: Path) -> list[str]:
    """Names of tensors whose own share is not that of the gathered tensor; adapters change them."""
    layout = LayoutConfig(tp=2)
    adapter = {"rank": 4, "alpha": 16.0}
    model = make_trainable(model_dir, "lm", adapter=adapter, layout=layout)
    for _, module in adapters_of(model.chunks[0]):
        # Where ranks have the same half, they have the same values
        torch.nn.init.constant_(module.b, 0.1)
    arguments = (model.chunks, model.spec, model.mesh, "lm", LIMIT)
    base = read_tensors(model_dir)
    gathered = {}
    for bucket in stream_hf(*arguments):
        gathered |= {name: tensor.clone() for name, tensor in bucket}
    projection = "model.layers.1.mlp.up_proj.weight"
    assert (gathered[projection] != base[projection]).float().mean() > 0.9
    own = stream_hf(*arguments, NanSlots(CPU), own_shares=range(1000))
    masks = stream_masks(*arguments, NanSlots(CPU))
    return [
        name
        for bucket, mask in zip(own, masks, strict=True)
        for (name, value), (_, is_own) in zip(bucket, mask, strict=True)
        if not torch.equal(value[is_own > 0], gathered[name][is_own > 0])
    ]


def test_adapters_are_in_own_shares(tmp_path: Path) -> None:
    source = write_model(tmp_path / "qwen3", "qwen3", num_hidden_layers=2)
    assert run_ranks(2, with_adapters, source) == [[], []]

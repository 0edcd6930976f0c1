"""Rules, without process groups: what is cut comes together again, and each rank holds the rows that are its own."""

import dataclasses

import pytest
import torch

from vapo_megatron.weights.families import EMBEDDING, FAMILIES, GATED_MLP, QKV_WEIGHT
from vapo_megatron.weights.mapping import entries
from vapo_megatron.weights.spec import ModelSpec

SPEC = ModelSpec(
    family="qwen2",
    num_layers=2,
    hidden_size=24,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    ffn_size=20,
    vocab_size=131,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    dtype="float32",
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("divisible_by", [1, 64])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_every_rule_restores_what_it_cut(family: str, tp_size: int, divisible_by: int, head: str) -> None:
    spec = dataclasses.replace(SPEC, family=family, vocab_divisible_by=divisible_by)
    for entry in entries(spec, head):  # type: ignore[arg-type]
        originals = [torch.randn(shape) for shape in entry.rule.hf_shapes(spec)]
        shards = [entry.rule.to_shard(originals, spec, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(shard.shape) for shard in shards} == {entry.rule.shard_shape(spec, tp_size)}
        restored = entry.rule.to_hf(shards, spec)
        assert all(tensor.is_contiguous() for tensor in restored)
        assert all(torch.equal(a, b) for a, b in zip(restored, originals, strict=True)), entry.hf


def test_padding_rows_are_zero_and_on_the_last_ranks() -> None:
    spec = dataclasses.replace(SPEC, vocab_divisible_by=64)
    table = torch.ones(131, 24)
    real = [int(EMBEDDING.to_shard([table], spec, rank, 4).sum(0)[0]) for rank in range(4)]
    assert spec.padded_vocab_size(4) == 256
    assert real == [64, 64, 3, 0]


def test_a_rank_holds_whole_query_groups_with_their_key_and_value() -> None:
    spec = dataclasses.replace(SPEC, hidden_size=1)
    # Row numbers as weights: queries from 0, keys from 1000, values from 2000.
    q, k, v = (
        torch.arange(rows, dtype=torch.float32)[:, None] + start for rows, start in ((48, 0), (24, 1000), (24, 2000))
    )
    shard = QKV_WEIGHT.to_shard([q, k, v], spec, 1, 2)[:, 0].tolist()
    third_group = [*range(24, 36), *range(1012, 1018), *range(2012, 2018)]
    fourth_group = [*range(36, 48), *range(1018, 1024), *range(2018, 2024)]
    assert shard == third_group + fourth_group


def test_a_rank_holds_its_gate_above_its_up() -> None:
    spec = dataclasses.replace(SPEC, hidden_size=1)
    gate, up = torch.arange(20.0)[:, None], torch.arange(20.0)[:, None] + 100
    assert GATED_MLP[0].to_shard([gate, up], spec, 1, 2)[:, 0].tolist() == [*range(10, 20), *range(110, 120)]

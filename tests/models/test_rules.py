"""Rules, without process groups: what is cut comes together again, and each rank holds the rows
that are its own."""

import pytest
import torch
from specs import spec_of

from vapo_megatron.models.layers import SelfAttention
from vapo_megatron.models.parts import gated_mlp, self_attention
from vapo_megatron.models.registry import FAMILIES
from vapo_megatron.models.spec import Head
from vapo_megatron.weights.mapping import entries

SPEC = spec_of("qwen2")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("divisible_by", [1, 64])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_every_rule_restores_what_it_cut(
    family: str, tp_size: int, divisible_by: int, head: Head
) -> None:
    for entry in entries(spec_of(family, divisible_by), head):
        originals = [torch.randn(shape) for shape in entry.rule.hf_shapes()]
        shards = [entry.rule.to_shard(originals, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(shard.shape) for shard in shards} == {entry.rule.shard_shape(tp_size)}
        restored = entry.rule.to_hf(shards)
        assert all(tensor.is_contiguous() for tensor in restored)
        assert all(torch.equal(a, b) for a, b in zip(restored, originals, strict=True)), entry.hf


def test_padding_rows_are_zero_and_on_the_last_ranks() -> None:
    spec = spec_of("qwen2", divisible_by=64)
    table = torch.ones(131, 24)
    real = [int(spec.embedding.to_shard([table], rank, 4).sum(0)[0]) for rank in range(4)]
    assert spec.padded_vocab_size(4) == 256
    assert real == [64, 64, 3, 0]


def test_rank_holds_whole_query_groups_with_their_key_and_value() -> None:
    rule = self_attention(1, SelfAttention(8, 4, 6, rotary=None))[0]
    # Row numbers as weights: queries from 0, keys from 1000, values from 2000.
    q, k, v = (
        torch.arange(rows, dtype=torch.float32)[:, None] + start
        for rows, start in ((48, 0), (24, 1000), (24, 2000))
    )
    shard = rule.to_shard([q, k, v], 1, 2)[:, 0].tolist()
    third_group = [*range(24, 36), *range(1012, 1018), *range(2012, 2018)]
    fourth_group = [*range(36, 48), *range(1018, 1024), *range(2018, 2024)]
    assert shard == third_group + fourth_group


def test_a_rank_holds_its_gate_above_its_up() -> None:
    gate = torch.arange(20.0)[:, None]
    up = torch.arange(20.0)[:, None] + 100
    assert gated_mlp(1, 20)[0].to_shard([gate, up], 1, 2)[:, 0].tolist() == [
        *range(10, 20),
        *range(110, 120),
    ]

"""gpt-oss: what its files have beyond other families' is read, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from specs import spec_of

from vapo_megatron.config.model import ActorConfig, AdapterConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.layers import ClampedSwiGLU
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.spec import ModelSpec
from vapo_megatron.operations.plan.inputs import SHIPPED
from vapo_megatron.weights.adapters import check_adapter
from vapo_megatron.weights.fp8 import check_blocks
from vapo_megatron.weights.mapping import by_tensors, entries


def published(folder: Path, **changes: Any) -> ModelSpec:
    config = json.loads((SHIPPED / "gpt-oss-20b" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


def test_the_published_config_is_read(tmp_path: Path) -> None:
    spec = published(tmp_path)
    first, second, *_ = spec.layers
    assert (first.attention.window, second.attention.window) == (128, None)
    assert spec.attention.sinks and spec.attention.qkv_bias and spec.attention.output_bias
    assert spec.activation == ClampedSwiGLU(1.702, 7.0)
    rotary = spec.attention.rotary
    assert rotary is not None and rotary.scaling is not None
    assert (rotary.theta, rotary.scaling.factor, rotary.scaling.truncate) == (150_000.0, 32, False)


def test_a_file_without_rotary_scaling_has_the_published_one(tmp_path: Path) -> None:
    assert published(tmp_path, rope_scaling=None).layers == published(tmp_path).layers


def test_rotary_parameters_without_a_key_scale_nothing(tmp_path: Path) -> None:
    """As in transformers, whose default is for a file that has none."""
    rotary = published(tmp_path, rope_scaling=None, rope_parameters={}).attention.rotary
    read = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert read["rope_type"] == "default"
    assert rotary is not None and rotary.scaling is None and rotary.theta == read["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_bias": False}, "attention_bias is False, expected true"),
        ({"layer_types": ["full_attention"]}, r"layer_types is .* one for each of 24 layers"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types.0"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33, expected at most the 32"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "convert-hf-to-megatron"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1"),
    ],
)
def test_what_cannot_be_represented_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        published(tmp_path, **changes)


def test_a_tensor_of_all_experts_is_one_group_of_entries() -> None:
    spec = spec_of("gpt_oss")
    groups = [group for group in by_tensors(entries(spec, "lm")) if group[0].expert is not None]
    assert [group[0].hf[0].rpartition(".")[2] for group in groups[:4]] == [
        "gate_up_proj",
        "gate_up_proj_bias",
        "down_proj",
        "down_proj_bias",
    ]
    assert all([entry.expert for entry in group] == [0, 1, 2, 3] for group in groups)


def test_an_expert_has_its_own_gate_above_its_up() -> None:
    spec = spec_of("gpt_oss")
    entry = next(entry for entry in entries(spec, "lm") if entry.expert == 2)
    whole = torch.arange(4 * 24 * 40.0).view(4, 24, 40)
    shard = entry.rule.to_shard([entry.part(whole)], 0, 1)
    assert torch.equal(shard[:20], whole[2, :, 0::2].T)
    assert torch.equal(shard[20:], whole[2, :, 1::2].T)


def test_adapters_and_fp8_of_its_experts_are_refused() -> None:
    spec = spec_of("gpt_oss")
    actor = ActorConfig(kind="adapter")
    with pytest.raises(BadInput, match=r"has linear_fc1: .*one tensor of all experts"):
        check_adapter(spec, AdapterConfig(rank=4), actor, "actor")
    check_adapter(spec, AdapterConfig(rank=4, layers=("linear_qkv", "linear_proj")), actor, "actor")
    with pytest.raises(BadInput, match="experts of gpt_oss are one tensor"):
        check_blocks(spec, 1)

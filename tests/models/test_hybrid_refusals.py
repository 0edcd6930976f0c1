"""What models with delta nets cannot be, each in one line that names the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from specs import SIZES, spec_of

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.megatron.mesh import check_model_layout
from vapo_megatron.models.registry import FAMILIES, read_spec
from vapo_megatron.weights.fp8 import check_blocks


def sizes_of(family: str) -> dict[str, Any]:
    """A config.json with the keys that a family reads."""
    read = FAMILIES[family].config.model_fields
    return {key: value for key, value in SIZES.items() if key in read} | {"model_type": family}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False, expected true"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads is 6, expected a multiple of"),
        ({"layer_types": ["linear_attention"] * 2}, "expected full_attention in some layer"),
        ({"layer_types": ["full_attention"]}, "expected one for each of 2 layers"),
        ({"layer_types": ["mamba", "full_attention"]}, "layer_types.0 is 'mamba'"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid', expected 'silu'"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    config = sizes_of("qwen3_next") | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput) as refusal:
        read_spec(tmp_path)
    assert told in str(refusal.value)


def test_a_gate_of_attention_is_refused_by_other_families(tmp_path: Path) -> None:
    config = sizes_of("qwen3") | {"attn_output_gate": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="attn_output_gate is True, expected False for qwen3"):
        read_spec(tmp_path)


def test_ranks_share_whole_key_heads() -> None:
    spec = spec_of("qwen3_5_text")
    check_model_layout(spec, LayoutConfig(tp=2, cp=2), "actor")
    with pytest.raises(BadInput, match="tp 2 x cp 4 = 8 ranks do not divide the 4 key heads"):
        check_model_layout(spec, LayoutConfig(tp=2, cp=4), "actor")


def test_rollouts_in_fp8_are_refused() -> None:
    with pytest.raises(BadInput, match="the delta nets of qwen3_5_text were not tried in FP8"):
        check_blocks(spec_of("qwen3_5_text"), 1)

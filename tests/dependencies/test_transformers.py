"""What transformers writes and computes that one would not guess (docs/dependencies.md)."""

import importlib.util
import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from hf_models import read_tensors
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor,
    _yarn_get_mscale,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig

from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.carried import ExportForm
from vapo_megatron.weights.hf_writer import exported_config

FACTOR = 40.0
MLA = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=48,
    vocab_size=131,
    max_position_embeddings=640,
    n_routed_experts=8,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=24,
    q_lora_rank=16,
    kv_lora_rank=20,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": FACTOR,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}


def mla_config(**yarn: float) -> transformers.DeepseekV3Config:
    return transformers.DeepseekV3Config(**MLA, rope_parameters=YARN | yarn)


@pytest.mark.parametrize(
    ("yarn", "of_all", "of_rotary"),
    [
        ({}, 1.0, (0.1 * math.log(FACTOR) + 1) ** 2),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, (0.1 * math.log(FACTOR) + 1) ** 2, 1.0),
    ],
    ids=["without mscale", "with mscale"],
)
def test_mla_scales_rotary_channels_alone_without_mscale(
    yarn: dict[str, float], of_all: float, of_rotary: float
) -> None:
    """Products of queries and keys, beside 1 / sqrt(d): of all channels, and of the rotary ones
    once more."""
    model = transformers.DeepseekV3Model(mla_config(**yarn))
    width = MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]
    assert model.layers[0].self_attn.scaling * math.sqrt(width) == pytest.approx(of_all)
    cos, sin = model.rotary_emb(torch.zeros(1, 1, 32), torch.arange(7)[None])
    assert (cos.square() + sin.square()).mean().item() == pytest.approx(of_rotary)

    settings = {name: yarn[name] for name in ("mscale", "mscale_all_dim") if name in yarn}
    megatron = MLATransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, multi_latent_attention=True, **settings
    )
    assert _yarn_get_mscale(FACTOR, megatron.mscale_all_dim) ** 2 == pytest.approx(of_all)
    ratio = _yarn_get_concentration_factor(FACTOR, megatron.mscale, megatron.mscale_all_dim)
    assert ratio**2 == pytest.approx(of_rotary)


LAYER = "model.layers."
ATTENTION = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
ATTENTION |= {"self_attn.q_norm", "self_attn.k_norm"}
DELTA_NET = {
    f"linear_attn.{name}"
    for name in ("A_log", "conv1d", "dt_bias", "in_proj_a", "in_proj_b", "in_proj_qkv")
}
DELTA_NET |= {"linear_attn.in_proj_z", "linear_attn.norm", "linear_attn.out_proj"}
SHARED = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
SHARED |= {"mlp.gate", "mlp.shared_expert_gate", "input_layernorm", "post_attention_layernorm"}


def test_names_of_a_text_only_qwen35_moe(tmp_path: Path) -> None:
    """A tensor an expert, no `language_model.` in front, delta nets with four input projections."""
    config = transformers.Qwen3_5MoeTextConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=131,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    transformers.Qwen3_5MoeForCausalLM(config).save_pretrained(tmp_path)
    names = {name.removesuffix(".weight") for name in read_tensors(tmp_path)}
    experts = {
        f"mlp.experts.{expert}.{name}_proj" for expert in (0, 1) for name in ("gate", "up", "down")
    }
    of_layers = [
        {name.removeprefix(f"{LAYER}{layer}.") for name in names if f"{LAYER}{layer}." in name}
        for layer in range(4)
    ]
    assert of_layers == [experts | SHARED | DELTA_NET] * 3 + [experts | SHARED | ATTENTION]
    outside = {name for name in names if not name.startswith(LAYER)}
    assert outside == {"lm_head", "model.embed_tokens", "model.norm"}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_5_moe_text"


# SGLang reads these of a DeepSeek-V3's config as they are; transformers 5 has no field for them.
READ_BY_SGLANG = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def sglang_source(name: str) -> str:
    """A file of SGLang, which is not imported: that takes seconds."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / name).read_text()


def test_transformers_configs_lack_keys_that_sglang_reads(tmp_path: Path) -> None:
    mla_config().save_pretrained(tmp_path)
    assert not READ_BY_SGLANG.keys() & json.loads((tmp_path / "config.json").read_text()).keys()
    model = sglang_source("srt/models/deepseek_v2.py")
    assert all(f"config.{key}" in model for key in READ_BY_SGLANG)


def test_an_exported_config_keeps_keys_that_transformers_lacks(tmp_path: Path) -> None:
    transformers.Qwen3Config(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | READ_BY_SGLANG
    exported = exported_config(ExportForm(config), read_spec(tmp_path), "lm", torch.bfloat16)
    assert {key: exported[key] for key in READ_BY_SGLANG} == READ_BY_SGLANG


def write_gguf(path: Path) -> None:
    """A one-layer Llama in eight bits."""
    hidden = 32
    heads = 4
    ffn = 64
    vocabulary = 131
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary, hidden),
        "output": (vocabulary, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (ffn, hidden),
        "blk.0.ffn_up": (ffn, hidden),
        "blk.0.ffn_down": (hidden, ffn),
    }
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            quantised = gguf.quants.quantize(values, eight_bits)
            writer.add_tensor(f"{name}.weight", quantised, raw_dtype=eight_bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_is_loaded_but_saved_only_when_dequantised(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate alone")
    write_gguf(tmp_path / "model.gguf")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "refused")
    plain = transformers.GgufConfig(dequantize=True)
    model = load(tmp_path, gguf_file="model.gguf", dtype=torch.float32, quantization_config=plain)
    model.save_pretrained(tmp_path / "saved")
    assert read_spec(tmp_path / "saved").num_layers == 1
    assert all(tensor.isfinite().all() for tensor in read_tensors(tmp_path / "saved").values())

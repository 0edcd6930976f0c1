"""What DeepSeek-V3's family has and no other: latent attention in its several forms, and files in
FP8."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from called import called, called_apart
from family_table import LATENT
from hf_models import VOCAB, forward, megatron, read_tensors, write_model, write_tensors
from ranks import run_ranks
from specs import spec_of

from tools.convert_hf_to_megatron import app as to_megatron
from tools.convert_megatron_to_hf import app as to_hf
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.engine_limits import check_load_format
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.models.layers import LatentAttention
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.plan.inputs import SHIPPED
from vapo_megatron.weights.fp8 import (
    FP8,
    SCALE_SUFFIX,
    BlockFp8,
    check_blocks,
    dequantize,
    quantize,
)
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.load import check_weights, load_hf
from vapo_megatron.weights.mapping import entries
from vapo_megatron.weights.torch_dist_files import place_of

IDS = torch.randint(0, VOCAB, (48,), generator=torch.Generator().manual_seed(3))
YARN = LATENT["rope_parameters"]
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def changed(path: Path, **changes: Any) -> None:
    config = path / "config.json"
    content = json.loads(config.read_text()) | changes
    config.write_text(json.dumps({key: value for key, value in content.items() if value != ...}))


def test_published_models_have_their_published_sizes(tmp_path: Path) -> None:
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config())
    biases = 58 * 256
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert spec.parameter_count() == counted + biases == 671_026_419_200
    assert spec.active_parameter_count() // 10**8 == 375  # 37B, its embedding included
    kimi = {"n_routed_experts": 384, "num_attention_heads": 64, "vocab_size": 163840}
    changed(tmp_path, **kimi, n_group=1, topk_group=1, first_k_dense_replace=1)
    changed(tmp_path, model_type="kimi_k2")
    assert read_spec(tmp_path).parameter_count() // 10**9 == 1026
    transformers.Glm4MoeLiteConfig().save_pretrained(tmp_path)
    flash = read_spec(tmp_path)
    assert flash.parameter_count() // 10**8 == 299
    assert read_spec(SHIPPED / "DeepSeek-V3").parameter_count() == 671_026_419_200
    assert read_spec(SHIPPED / "GLM-4.7-Flash").parameter_count() == flash.parameter_count()
    # What engines keep of a token: 61 layers of 512 + 64 numbers, on each of their GPUs.
    assert sum(n * kind.attention.cached_size(8) for kind, n in spec.kinds.items()) == 61 * 576


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v32", "glm_moe_dsa"])
def test_pairs_apart_are_refused_where_transformers_has_none(tmp_path: Path, family: str) -> None:
    def logits() -> torch.Tensor:
        with torch.no_grad():
            return transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(IDS[None]).logits

    write_model(tmp_path, family, num_hidden_layers=2)
    expected = logits()
    changed(tmp_path, rope_interleave=False)
    assert torch.equal(logits(), expected)
    with pytest.raises(BadInput, match="rope_interleave is False, expected true: transformers"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_group": 2, "topk_group": 2}, "n_group is 2, expected 1"),
        ({"n_group": 3}, "n_group is 3, expected 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, expected true"),
        ({"scoring_func": "softmax"}, "scoring_func is softmax, expected sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is greedy, expected noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, expected 1"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace is 4, expected less than the 4"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"index_topk": 2048}, "index_topk is 2048"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, expected an even number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is"),
        ({"rope_parameters": YARN | {"mscale": None}}, "mscale and mscale_all_dim are None and"),
        ({"rope_parameters": YARN | {"attention_factor": 1.2}}, "attention_factor is 1.2"),
        ({"rope_parameters": YARN | {"rope_type": "linear"}}, "rope_type is 'linear', expected"),
        ({"rope_parameters": YARN | {"rope_type": "longrope"}}, "'longrope'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config has quant_method"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size [64, 64], expected [128, 128]",
        ),
        ({"model_type": "deepseek_v4"}, "model_type is 'deepseek_v4', expected one of"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    write_model(tmp_path, "deepseek_v3")
    changed(tmp_path, **changes)
    with pytest.raises(BadInput) as refusal:
        read_spec(tmp_path)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)


def test_dense_layers_of_glm_are_a_list_or_a_number(tmp_path: Path) -> None:
    write_model(tmp_path, "glm4_moe_lite")
    kinds = ["dense", "dense", "sparse", "sparse"]
    changed(tmp_path, mlp_layer_types=kinds)
    assert [layer.experts for layer in read_spec(tmp_path).layers] == [0, 0, 4, 4]
    changed(tmp_path, mlp_layer_types=..., first_k_dense_replace=3)
    assert [layer.experts for layer in read_spec(tmp_path).layers] == [0, 0, 0, 4]
    changed(tmp_path, mlp_layer_types=kinds[::-1])
    with pytest.raises(BadInput, match="dense layers come first"):
        read_spec(tmp_path)


# Every factor of YaRN by which a score may be stretched; what the files of Moonlight, Kimi K2 and
# V3 differ in; more groups than one choice of experts could tell apart.
FORMS: dict[str, dict[str, Any]] = {
    "published": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "without_mscale": {
        "rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("mscale")}
    },
    "plain": {"rope_parameters": PLAIN},
    "halves": {"rope_interleave": False},
    "moonlight": {"q_lora_rank": None, "rms_norm_eps": 1e-2, "rope_parameters": PLAIN},
    "groups": {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    "kimi": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 1},
    "no_shared": {"n_shared_experts": 0},
    "all_sparse": {"first_k_dense_replace": 0, "num_attention_heads": 6, "v_head_dim": 24},
}


def logits(sources: list[Path]) -> list[np.ndarray]:
    """Of each source, at tp 1."""
    results = []
    for source in sources:
        spec = read_spec(source)
        (chunk,), mesh = megatron(spec, LayoutConfig(), "lm")
        load_hf([chunk], spec, source, mesh, "lm")
        results.append(forward(chunk, IDS)[:, :VOCAB].numpy())
    return results


def test_every_form_computes_what_transformers_computes(tmp_path: Path) -> None:
    sources = {
        name: write_model(tmp_path / name, "deepseek_v3", **form) for name, form in FORMS.items()
    }
    (answers,) = run_ranks(1, logits, list(sources.values()))
    outputs = {}
    for (name, source), answer in zip(sources.items(), answers, strict=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        with torch.no_grad():
            expected = model(IDS[None]).logits[0]
        assert expected.std() > 0.1
        torch.testing.assert_close(
            torch.from_numpy(answer), expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m
        )
        outputs[name] = expected
    # The factors would not be seen if they made no difference.
    for name in ("without_mscale", "plain", "halves"):
        assert (outputs[name] - outputs["published"]).abs().max() > 1e-3, name


def test_old_and_new_spellings_of_yarn_are_read_alike(tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v3")
    expected = read_spec(tmp_path).attention
    scaling = {key: value for key, value in YARN.items() if not key.startswith("rope_")}
    changed(tmp_path, rope_parameters=..., rope_theta=1e4, rope_scaling=scaling | {"type": "yarn"})
    attention = read_spec(tmp_path).attention
    assert attention == expected and isinstance(attention, LatentAttention)
    # Section 3.4 of YaRN with DeepSeek's numbers: 0.1 * 0.7 * ln 4 + 1, squared.
    assert attention.softmax_scale == pytest.approx(1.097_040_6**2 / 20**0.5, rel=1e-6)
    assert attention.turned_factor == pytest.approx(1.138_629_4 / 1.097_040_6, rel=1e-6)


def test_saved_norms_have_the_names_of_transformer_engine() -> None:
    """As Megatron's MLASelfAttention has them there: those of narrow vectors in the projections
    after them, that of the layer's input on its own."""
    spec = spec_of("deepseek_v3")
    keys = {place_of(entry, spec).key for entry in entries(spec, "lm")}
    attention = "decoder.layers.0.self_attention."
    assert {
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        attention + "linear_q_down_proj.weight",
        attention + "linear_q_up_proj.layer_norm_weight",
        attention + "linear_kv_up_proj.layer_norm_weight",
    } <= keys
    assert not any("q_layernorm" in key or "kv_layernorm" in key for key in keys)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_engines_in_fp8_are_refused(family: str) -> None:
    with pytest.raises(BadInput, match=rf"which {family} has.*set rollout\.quantization=none"):
        check_blocks(spec_of(family), 1)


def test_engines_of_fp8_files_read_none_of_them(tmp_path: Path) -> None:
    """What the trainer sends is not quantised: an engine that had read the files could not take
    it."""
    write_model(tmp_path, "deepseek_v3")
    check_load_format(tmp_path, RolloutConfig())
    changed(tmp_path, quantization_config=BLOCKS)
    with pytest.raises(BadInput, match=r"set rollout\.load_format=dummy"):
        check_load_format(tmp_path, RolloutConfig())
    server = EngineServer(
        tmp_path, RolloutConfig(load_format="dummy"), "bfloat16", tmp_path / "log"
    )
    arguments = server._engine_args(tmp_path)
    override = arguments[arguments.index("--json-model-override-args") + 1]
    assert json.loads(override) == {"quantization_config": None}


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
# Sides that are multiples of a block and sides that are not.
WIDE = {"hidden_size": 160, "intermediate_size": 256, "moe_intermediate_size": 144}


def quantised(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Quantise the linear layers of a directory as DeepSeek's are; returns what they stand for.
    dtype: of the scales."""
    meant: dict[str, torch.Tensor] = {}
    recipe = BlockFp8.of(read_spec(path))

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            meant[name] = tensor
            if recipe.covers(name):
                values, scales = quantize(tensor.float())
                scales = scales.to(dtype)
                tensors |= {name: values, name + SCALE_SUFFIX: scales}
                meant[name] = dequantize(values, scales).bfloat16()

    write_tensors(path, quantise)
    changed(path, quantization_config=BLOCKS)
    return meant


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_fp8_files_are_read_and_exported_as_bfloat16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    source = write_model(tmp_path / "source", family, dtype=torch.bfloat16, **WIDE)
    meant = quantised(source)
    tensors = HFTensors(source)
    assert tensors.names == meant.keys()
    files = read_tensors(source)
    scaled = [name for name in meant if files[name].dtype == FP8]
    assert len(scaled) == tensors.scaled > 20
    for name in scaled[:9]:
        for index in (slice(None), (slice(90, 131), slice(3, 130)), (slice(128, 160), slice(None))):
            assert torch.equal(tensors[name][index], meant[name][index])
    monkeypatch.setattr(logging.getLogger("vapo_megatron"), "propagate", True)
    check_weights(source, read_spec(source), "lm")
    told = "FP8 tensors are read as bfloat16; exports have no FP8 weights"
    assert any(told in record.getMessage() for record in caplog.records)
    code, output = called_apart(to_megatron, "--hf", source, "--out", tmp_path / "mcore")
    assert code == 0 and told in output, output
    code, output = called_apart(to_hf, "--checkpoint", tmp_path / "mcore", "--out", tmp_path / "hf")
    assert code == 0, output
    written = read_tensors(tmp_path / "hf")
    assert written.keys() == meant.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in meant.items())
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "dtype", "name"),
    [("qwen3", torch.bfloat16, "e4m3"), ("minimax_m2", torch.float32, "float8_e4m3fn")],
)
def test_fp8_is_read_as_others_than_deepseek_publish_it(
    tmp_path: Path, family: str, dtype: torch.dtype, name: str
) -> None:
    """Qwen3's scales are bfloat16, MiniMax-M2 has another name of the format."""
    source = write_model(tmp_path / "source", family, dtype=torch.bfloat16, hidden_size=160)
    meant = quantised(source, dtype)
    changed(source, quantization_config=BLOCKS | {"fmt": name})
    check_weights(source, read_spec(source), "lm")
    tensors = HFTensors(source)
    assert tensors.scaled > 10
    assert all(torch.equal(tensors[key][:], tensor) for key, tensor in meant.items())


def without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight" + SCALE_SUFFIX]


def of_other_blocks(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight" + SCALE_SUFFIX
    tensors[name] = torch.ones(4, 4)


def of_nothing(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.gone_proj.weight" + SCALE_SUFFIX] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without_scales, "has dtype F8_E4M3, expected one of"),
        (of_other_blocks, r"shape \[4, 4\], expected F8_E4M3 and F32 or BF16 of shape \[2, 2\]"),
        (of_nothing, "weight_scale_inv is not known"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, change: Any, told: str) -> None:
    source = write_model(tmp_path, "deepseek_v3", dtype=torch.bfloat16, **WIDE)
    quantised(source)
    write_tensors(source, change)
    with pytest.raises(BadInput, match=told):
        check_weights(source, read_spec(source), "lm")


def test_kimi_is_exported_under_the_name_that_others_read(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "deepseek_v3")
    changed(source, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.X"})
    for app, option, given, out in (
        (to_megatron, "--hf", source, tmp_path / "mcore"),
        (to_hf, "--checkpoint", tmp_path / "mcore", tmp_path / "hf"),
    ):
        code, output = called(app, option, given, "--out", out)
        assert code == 0, output
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and "auto_map" not in config
    written = read_tensors(tmp_path / "hf")
    assert all(torch.equal(written[k], v) for k, v in read_tensors(source).items())

"""config.json as every version of transformers writes it, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from family_table import FAMILIES
from family_table import LATENT as LATENT_SIZES
from hf_models import write_model
from sglang.srt.layers.rotary_embedding import rope_variant, yarn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vapo_megatron.errors import BadInput
from vapo_megatron.models.model_files import family_names
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.rotary import RopeScaling, inverse_frequencies, read_rope

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "hf_configs"
PLAIN = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def long_rope(**changes: Any) -> dict[str, Any]:
    """Of 64 tokens, extended to 512."""
    scaling = {"type": "longrope", "short_factor": 8 * [1.5], "long_factor": 8 * [3.0]}
    return {"rope_scaling": scaling | {"original_max_position_embeddings": 64} | changes}


LONGROPE = long_rope()
LATENT = {key: LATENT_SIZES[key] for key in LATENT_SIZES if key != "rope_parameters"} | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def written(path: Path, **changes: Any) -> Path:
    content = {key: value for key, value in (PLAIN | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_spec_and_count_are_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    write_model(
        tmp_path,
        family,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    spec = read_spec(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = model.state_dict()
    trained = [
        tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name in saved and ".indexer." not in name
    ]
    assert spec.parameter_count() == sum(tensor.numel() for tensor in trained)
    attention = spec.attention
    assert (attention.num_heads, attention.num_kv_heads) == (8, FAMILIES[family].kv_heads)
    assert attention.head_dim == FAMILIES[family].head_dim
    assert spec.tied is tied
    # transformers keeps a base for each type of layer where a family has several.
    saved = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    bases = [entry["rope_theta"] for entry in saved.values() if isinstance(entry, dict)]
    assert {rotary.theta for rotary in spec.rotary_kinds} == set(bases or [5e5])
    assert spec.dtype == "float32"


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the published config files are not beside the checkout"
)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-32b.json", 32_763_876_352),
        ("qwen2.5-7b.derived.json", 7_615_616_512),
        ("qwen3-8b.third-party-copy.json", 8_190_735_360),
    ],
)
def test_published_models_have_their_published_size(
    tmp_path: Path, name: str, parameters: int
) -> None:
    shutil.copy(SHARED / name, tmp_path / "config.json")
    assert read_spec(tmp_path).parameter_count() == parameters


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        },  # transformers 4.43 to 4.57
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},  # before
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},  # 5
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
            }
        },  # 5, by layer type
    ],
)
def test_rope_is_read_in_every_spelling(tmp_path: Path, spelling: dict[str, Any]) -> None:
    spec = read_spec(written(tmp_path, **spelling))
    rotary = spec.attention.rotary
    assert rotary is not None and rotary.theta == 5e5
    assert rotary.scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 256)


def test_two_spellings_of_rope_have_to_say_the_same(tmp_path: Path) -> None:
    """transformers reads rope_scaling where a file has both: one saved by transformers 5, to which
    somebody adds what a model card of an earlier time says."""
    new = {"rope_type": "yarn", "rope_theta": 5e5, **YARN}
    old = {"rope_type": "yarn", **YARN}
    alone = read_spec(written(tmp_path, rope_parameters=new))
    assert read_spec(written(tmp_path, rope_parameters=new, rope_scaling={})) == alone
    both = written(tmp_path, rope_parameters=new, rope_scaling=old, rope_theta=5e5)
    assert read_spec(both) == alone
    saved = {"rope_type": "default", "rope_theta": 5e5}
    for changes in (
        {"rope_parameters": saved, "rope_scaling": old, "rope_theta": 5e5},
        {"rope_parameters": new, "rope_scaling": old},
        {"rope_parameters": new, "rope_scaling": old, "rope_theta": 1e6},
    ):
        with pytest.raises(BadInput, match=r"rope_scaling is .* beside rope_parameters .* one of"):
            read_spec(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("linear", {"factor": 4.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
    ],
)
def test_frequencies_are_those_of_transformers(kind: str, parameters: dict[str, Any]) -> None:
    config = SimpleNamespace(
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **parameters},
        head_dim=64,
        hidden_size=64,  # read by YaRN and not used
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    scaling = RopeScaling(kind, **parameters)  # type: ignore[arg-type]
    assert torch.equal(inverse_frequencies(64, 5e5, scaling), expected)
    assert scaling.attention_factor == attention_factor


def test_yarn_is_that_of_the_engines() -> None:
    """As Qwen2.5's first revision of its instruction models and Qwen3's model cards write it."""
    engine = SimpleNamespace(
        base=1e6,
        rotary_dim=64,
        beta_fast=32,
        beta_slow=1,
        max_position_embeddings=32768,
        truncate=True,
        extrapolation_factor=1,
    )
    parameters = {"rope_theta": 1e6, "rope_scaling": YARN | {"type": "yarn"}}
    theta, scaling = read_rope(parameters)
    assert scaling is not None and scaling.attention_factor == yarn.yarn_get_mscale_simple(4.0)
    ours = inverse_frequencies(64, theta, scaling)
    theirs = yarn.YaRNScalingRotaryEmbedding._compute_inv_freq(engine, 4.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_longrope_is_that_of_the_engines() -> None:
    """Up to the original context, with the stretch of the extended one."""
    scaling = long_rope()["rope_scaling"]
    theta, read = read_rope({"max_position_embeddings": 512, "rope_scaling": scaling})
    assert read is not None
    engine = rope_variant.Phi3LongRoPEScaledRotaryEmbedding(
        head_size=24,
        rotary_dim=16,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        base=int(theta),
        is_neox_style=True,
        dtype=torch.float32,
        short_factor=scaling["short_factor"],
        long_factor=scaling["long_factor"],
    )
    angles = torch.outer(torch.arange(64).float(), inverse_frequencies(16, theta, read))
    ours = torch.cat((angles.cos(), angles.sin()), -1) * read.attention_factor
    torch.testing.assert_close(ours, engine.long_short_cos_sin_cache[:64], rtol=1e-5, atol=1e-5)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    mistral = dict(model_type="mistral", num_key_value_heads=4, sliding_window=128)
    assert read_spec(written(tmp_path, **mistral)).max_position_embeddings == 128
    assert (
        read_spec(written(tmp_path, **mistral | {"sliding_window": None})).max_position_embeddings
        == 512
    )
    # Qwen's config files name a window that is off.
    qwen = mistral | dict(model_type="qwen2", use_sliding_window=False)
    assert read_spec(written(tmp_path, **qwen)).max_position_embeddings == 512


def test_longrope_bounds_the_context(tmp_path: Path) -> None:
    """Longer inputs would have other frequencies."""
    spec = read_spec(written(tmp_path, **LONGROPE))
    assert spec.max_position_embeddings == 64
    phi = {"model_type": "phi3", "max_position_embeddings": 8192}
    scaling = long_rope(original_max_position_embeddings=4096)
    assert read_spec(written(tmp_path, **phi, **scaling)).max_position_embeddings == 4096
    del scaling["rope_scaling"]["original_max_position_embeddings"]
    assert read_spec(written(tmp_path, **phi, **scaling)).max_position_embeddings == 4096


def test_layer_types_with_a_window_need_it_to_be_on(tmp_path: Path) -> None:
    """transformers masks such a layer of SmolLM3 whatever use_sliding_window says."""
    types = ["full_attention", "sliding_attention"]
    for family in ("smollm3", "qwen3"):
        off: dict[str, Any] = {"model_type": family, "num_key_value_heads": 4}
        off |= {"sliding_window": 128, "use_sliding_window": False}
        read_spec(written(tmp_path, **off, layer_types=["full_attention"] * 2))
        with pytest.raises(BadInput, match=r"layer_types is .* expected 'full_attention' alone"):
            read_spec(written(tmp_path, **off, layer_types=types))
        on = off | {"use_sliding_window": True}
        assert read_spec(written(tmp_path, **on, layer_types=types)).max_position_embeddings == 128


def test_old_and_new_names_of_the_dtype(tmp_path: Path) -> None:
    assert read_spec(written(tmp_path, torch_dtype="bfloat16")).torch_dtype is torch.bfloat16
    assert read_spec(written(tmp_path, dtype="bfloat16")).torch_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model_type": "qwen3_omni"},
            f"'qwen3_omni', expected one of {', '.join(sorted(FAMILIES))}, the nearest being qwen3",
        ),
        ({"model_type": ...}, "model_type is None"),
        ({"rope_scaling": {"type": "yarn"}}, "factor of the rotary embedding is None"),
        ({"rope_scaling": YARN | {"type": "yarn", "mscale": 0.7}}, "mscale of YaRN is 0.7"),
        (
            {"rope_scaling": YARN | {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.0}},
            "mscale of YaRN is 0.7",
        ),
        (
            {"rope_scaling": YARN | {"type": "yarn", "attention_factor": 1.0}},
            "attention_factor of YaRN is 1.0",
        ),
        (LONGROPE | {"hidden_size": 32}, "short_factor of longrope has 8 numbers, expected 4"),
        (long_rope(short_factor=[]), "short_factor of longrope is [], expected numbers"),
        (long_rope(short_factor=[1.0, 0]), "short_factor of longrope is [1.0, 0], expected"),
        (long_rope(factor=4.0), "factor of longrope is 4.0, expected 8 or none"),
        (long_rope(attention_factor=1.0), "attention_factor of longrope is 1.0, expected 1.22"),
        (long_rope(long_mscale=1.3), "long_mscale of longrope is 1.3, expected 1.22"),
        (long_rope() | {"model_type": "deepseek_v3", **LATENT}, "rope_type is 'longrope'"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type is 'linear', expected 'longrope' or 'default'",
        ),
        (
            {"model_type": "phi3", "rope_scaling": LONGROPE["rope_scaling"]},
            "original_max_position_embeddings is 4096 beside the rotary embedding's own 64",
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {"type": "longrope"}}},
            "rope scaling 'longrope' cannot be represented",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor of the rotary embedding is None"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        (
            {
                "rope_scaling": YARN | {"type": "yarn"},
                "original_max_position_embeddings": 4096,
            },
            "original_max_position_embeddings is 4096 beside the rotary embedding's own 32768",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        read_spec(written(tmp_path, **changes))
    assert told in str(refusal.value)
    assert str(tmp_path / "config.json") in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such directory"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"config\.json: no such file"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        read_spec(tmp_path)


def test_names_of_families_are_read_without_torch() -> None:
    assert family_names() == sorted(FAMILIES)

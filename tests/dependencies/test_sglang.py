"""What SGLang makes of a config that one would not guess (docs/dependencies.md)."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from test_transformers import sglang_source

from vapo_megatron.engines.server.model_directory import engine_directory
from vapo_megatron.errors import BadInput
from vapo_megatron.models.layers import LatentAttention
from vapo_megatron.models.registry import engine_config_of


def get_rope_config() -> Any:
    """SGLang's function of this name, without importing SGLang, which takes seconds."""
    tree = ast.parse(sglang_source("srt/utils/hf_transformers/common.py"))
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "get_rope_config"
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "common.py", "exec"), names)
    return names["get_rope_config"]


def test_sglang_loses_the_rotary_base_of_olmo3() -> None:
    """transformers 5 nests rotary settings by the kind of layer, and SGLang reads them flat; an
    engine gets them flat."""
    nested = transformers.Olmo3Config(num_hidden_layers=4, rope_parameters=None)
    assert nested.rope_parameters["full_attention"]["rope_theta"] == 500_000.0
    assert get_rope_config()(nested)[0] == 10_000
    flat = transformers.Olmo2Config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert get_rope_config()(flat)[0] == 500_000.0
    assert "self.rope_theta, _ = get_rope_config(config)" in sglang_source("srt/models/olmo2.py")
    given = engine_config_of({"model_type": "olmo3", "rope_parameters": nested.rope_parameters})
    assert get_rope_config()(SimpleNamespace(**given)) == (500_000.0, None)


def test_an_olmo3_with_two_rotary_bases_gets_no_engine(tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    config = {"model_type": "olmo3", "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"config\.json: rope_parameters of sliding_attention are"):
        engine_directory(tmp_path, tmp_path)


def test_sglang_gives_latent_norms_another_epsilon() -> None:
    """And its loader of DeepSeek keeps half of a pair, and copies in threads of its own."""
    config = transformers.DeepseekV3Config(num_hidden_layers=1, rms_norm_eps=1e-5)
    with torch.device("meta"):
        attention = transformers.DeepseekV3Model(config).layers[0].self_attn
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        assert norm.variance_epsilon == LatentAttention.norm_eps == 1e-6
    assert "q_a_layernorm = RMSNorm(self.q_lora_rank, eps=config.rms_norm_eps)" in sglang_source(
        "srt/models/deepseek_v2.py"
    )
    loader = sglang_source("srt/models/deepseek_common/deepseek_weight_loader.py")
    assert "use_async_loading = should_async_load(loaded_weight)" in loader
    assert "cached_a_proj[name]" in loader

"""A config.json that lacks a key means what transformers' default for it says."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from family_table import FAMILIES
from hf_models import SIZES

from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec

# Of these nothing depends on how the key is spelled or whether it is there.
UNREAD = {"architectures", "model_type", "transformers_version", "dtype"}


def facts(folder: Path, config: dict[str, Any]) -> Any:
    """What a config.json gives; None where it is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        spec = read_spec(folder)
    except BadInput:
        return None
    return spec.facts(), spec.layers


def completed(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config with transformers' defaults for what it lacks."""
    (folder / "config.json").write_text(json.dumps(config))
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder)
    defaults = json.loads((folder / "config.json").read_text())
    return defaults | config


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_window_bounds_inputs_where_it_is_not_computed(tmp_path: Path, family: str) -> None:
    """transformers reads use_sliding_window in four families alone."""
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family].sizes))
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": 5}
    contexts = []
    for switch in (False, True):
        (tmp_path / "config.json").write_text(json.dumps(written | {"use_sliding_window": switch}))
        contexts.append(read_spec(tmp_path).max_position_embeddings)
    if family in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
        assert contexts == [64, 5]
    else:
        assert contexts == ([5, 5] if family in ("mistral", "phi3") else [64, 64])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_key_that_is_missing_has_the_default_of_transformers(tmp_path: Path, family: str) -> None:
    row = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **(SIZES | row.sizes))
    config.save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text()) | row.engine_keys
    assert facts(tmp_path, whole) is not None
    read = 0
    for key in whole.keys() - UNREAD:
        cut = {name: value for name, value in whole.items() if name != key}
        ours = facts(tmp_path, cut)
        if ours is None:  # required here
            continue
        assert ours == facts(tmp_path, completed(tmp_path, cut)), key
        read += 1
    assert read > 10

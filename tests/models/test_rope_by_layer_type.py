"""Families with a rotary table for each type of layer: what transformers reads of a config.json is
what is computed, anything else is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from family_table import FAMILIES
from hf_models import SIZES

from vapo_megatron.engines.server.model_directory import engine_directory
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.rotary import Rotary

NESTED = ("gemma3_text", "olmo3")
LINEAR = {"rope_type": "linear", "factor": 2.0}
TYPES = ["sliding_attention", "full_attention"] * 2
READ: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a base": {"rope_theta": 5e5},
    "both bases": {"rope_theta": 5e5, "rope_local_base_freq": 3e4},
    "scaling": {"rope_theta": 5e5, "rope_scaling": LINEAR},
    "entries": {
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 3e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
        }
    },
    "entries without bases": {
        "rope_theta": 7e5,
        "rope_local_base_freq": 3e4,
        "rope_parameters": {
            "full_attention": LINEAR,
            "sliding_attention": {"rope_type": "default"},
        },
    },
    "an empty entry": {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": None}},
}


def written(path: Path, family: str, **changes: Any) -> Path:
    sizes = SIZES | FAMILIES[family].sizes | {"model_type": family, "layer_types": TYPES}
    (path / "config.json").write_text(json.dumps(sizes | changes))
    return path


@pytest.mark.parametrize("family", NESTED)
@pytest.mark.parametrize("said", sorted(READ))
def test_every_spelling_is_read_as_transformers_does(
    tmp_path: Path, family: str, said: str
) -> None:
    written(tmp_path, family, **READ[said])
    read = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    local, full = (layer.attention.rotary for layer in read_spec(tmp_path).layers[:2])
    for rotary, expected in ((local, read[TYPES[0]]), (full, read[TYPES[1]])):
        assert isinstance(rotary, Rotary)
        kind = "default" if rotary.scaling is None else rotary.scaling.kind
        assert (rotary.theta, kind) == (expected["rope_theta"], expected["rope_type"])


@pytest.mark.parametrize("family", NESTED)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "expected entries full_attention and sliding_attention",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "expected a rope_type in it"),
    ],
)
def test_what_transformers_would_not_read_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        read_spec(written(tmp_path, family, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
    ],
)
def test_another_base_of_olmo3_needs_both_entries(tmp_path: Path, changes: dict[str, Any]) -> None:
    """transformers gives it to layers without a window alone."""
    with pytest.raises(BadInput, match=r"rope_theta is 1000000\.0, expected 500000 or rope_param"):
        read_spec(written(tmp_path, "olmo3", **changes))


def test_an_engine_of_olmo3_has_one_base(tmp_path: Path) -> None:
    plain = {"rope_type": "default"}
    entries = {"full_attention": plain, "sliding_attention": plain}
    source = written(tmp_path, "olmo3", rope_theta=7e5, rope_parameters=entries)
    with pytest.raises(BadInput, match="rope_parameters of sliding_attention are"):
        engine_directory(source, tmp_path / "scratch")

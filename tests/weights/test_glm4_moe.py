"""What GLM-4.5's family has and no other: a router's bias, layers that predict ahead, layers of two
kinds."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from called import called, called_apart
from hf_models import megatron, read_tensors, write_model, write_tensors
from ranks import run_ranks

from tools.convert_hf_to_megatron import app as to_megatron
from tools.convert_megatron_to_hf import app as to_hf
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.export import stream_hf
from vapo_megatron.weights.load import check_weights, load_hf

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def test_published_model_has_the_size_that_transformers_gives(tmp_path: Path) -> None:
    config = transformers.Glm4MoeConfig(head_dim=128, attention_bias=True)  # GLM-4.5-Air
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.Glm4MoeForCausalLM(config)
    spec = read_spec(tmp_path)
    biases = 45 * spec.num_experts
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert spec.parameter_count() == counted + biases
    assert spec.parameter_count() // 10**9 == 106
    idle = 45 * (128 - 8) * 3 * 4096 * 1408
    assert spec.active_parameter_count() == spec.parameter_count() - idle


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_group": 2, "topk_group": 2}, "n_group is 2, expected 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, expected true"),
        (
            {"first_k_dense_replace": 4},
            "first_k_dense_replace is 4, expected less than the 4 layers",
        ),
        ({"n_routed_experts": None}, "n_routed_experts is missing"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
            "partial_rotary_factor is 1.5",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}}, "is 3 channels"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = write_model(tmp_path, "glm4_moe") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(BadInput, match=told):
        read_spec(tmp_path)


def streamed(source: Path) -> dict[str, tuple[str, list[float]]]:
    spec = read_spec(source)
    chunks, mesh = megatron(spec, LayoutConfig(tp=2, ep=2), "lm", "bfloat16")
    load_hf(chunks, spec, source, mesh, "lm")
    buckets = stream_hf(chunks, spec, mesh, "lm", 20_000)
    return {
        name: (str(t.dtype), t.flatten()[:4].tolist()) for bucket in buckets for name, t in bucket
    }


def test_the_bias_that_chooses_experts_is_never_rounded(tmp_path: Path) -> None:
    """Nor in a checkpoint that was asked for in another dtype: half a bit more, and other experts
    are chosen."""
    source = write_model(tmp_path / "source", "glm4_moe", dtype=torch.bfloat16)
    expected = read_tensors(source)
    assert not torch.equal(expected[BIAS.format(1)], expected[BIAS.format(1)].bfloat16().float())
    for found in run_ranks(2, streamed, source):
        for layer in (1, 2, 3):
            assert found[BIAS.format(layer)] == (
                "torch.float32",
                expected[BIAS.format(layer)].tolist(),
            )
        assert found["model.layers.0.mlp.gate_proj.weight"][0] == "torch.bfloat16"
    mcore = tmp_path / "mcore"
    steps = (to_megatron, "--hf", source, mcore), (to_hf, "--checkpoint", mcore, tmp_path / "hf")
    for app, option, given, out in steps:
        code, output = called(app, option, given, "--out", out, "--dtype", "float16")
        assert code == 0, output
    written = read_tensors(tmp_path / "hf")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(
            written[name], tensor if name.endswith("correction_bias") else tensor.half()
        ), name


def test_layers_that_predict_ahead_are_left_out_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "source", "glm4_moe", num_mtp_layers=1)
    ahead = {
        "model.layers.4.eh_proj.weight": torch.ones(2),
        "model.layers.4.mlp.gate.weight": torch.ones(2),
    }
    write_tensors(source, lambda tensors: tensors.update(ahead))
    monkeypatch.setattr(logging.getLogger("vapo_megatron"), "propagate", True)
    check_weights(source, read_spec(source), "lm")
    told = (
        "model.layers.4.* (2 tensors for multi-token prediction) are not read, trained, synced or "
        "exported"
    )
    # A record comes twice where an earlier test has left pytest's handler with the package's logger
    # as well.
    assert [record.getMessage() for record in dict.fromkeys(caplog.records)] == [
        f"{source}: {told}"
    ]
    code, output = called_apart(to_megatron, "--hf", source, "--out", tmp_path / "mcore")
    assert code == 0 and told in output, output
    code, output = called_apart(to_hf, "--checkpoint", tmp_path / "mcore", "--out", tmp_path / "hf")
    assert code == 0, output
    assert read_tensors(tmp_path / "hf").keys() == read_tensors(source).keys() - ahead.keys()
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0
    write_tensors(
        source, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2)})
    )
    with pytest.raises(BadInput, match=r"model\.layers\.3\.eh_proj\.weight is not known"):
        check_weights(source, read_spec(source), "lm")

"""Experts in MXFP4: their numbers are transformers', and a conversion writes them as bfloat16."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import read_tensors, write_model
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_megatron.weights.hf_files import HFTensors

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
EXPERTS = 4


def silent(stage: str, nbytes: int) -> object:
    return lambda done: None


def packed(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a tensor [experts, in, out]."""
    experts, rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    groups = (experts, columns, rows // 32)
    blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, groups, generator=generator, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture
def quantised(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A directory of gpt-oss with MXFP4 experts, and the tensors that it stands for."""
    source = write_model(tmp_path / "model", "gpt_oss", dtype=torch.bfloat16, **SIZES)
    held = read_tensors(source)
    meant = dict(held)
    for number, name in enumerate(sorted(held)):
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        blocks, scales = packed(tuple(held.pop(name).shape), number)
        held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(config))
    return source, meant


def test_a_conversion_writes_what_blocks_and_scales_mean(
    quantised: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    source, meant = quantised
    hf_to_megatron(source, tmp_path / "megatron", silent)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", silent)
    got = read_tensors(tmp_path / "back")
    assert got.keys() == meant.keys()
    for name, tensor in meant.items():
        assert got[name].dtype == torch.bfloat16
        assert torch.equal(got[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    read_spec(tmp_path / "back")


def test_an_index_reads_one_expert(quantised: tuple[Path, dict[str, Tensor]]) -> None:
    source, meant = quantised
    name = "model.layers.1.mlp.experts.down_proj"
    tensor = HFTensors(source)[name]
    assert torch.equal(tensor[2], meant[name][2])
    assert torch.equal(tensor[1:3, :5], meant[name][1:3, :5])
    assert torch.equal(tensor[3, 4:9], meant[name][3, 4:9])


def test_training_refuses_them_and_says_what_to_do(
    quantised: tuple[Path, dict[str, Tensor]],
) -> None:
    source, _ = quantised
    with pytest.raises(BadInput, match="mxfp4, which cannot be trained: convert the directory"):
        read_spec(source)


@pytest.mark.parametrize("change", ["no scales", "short scales"])
def test_blocks_and_scales_have_to_fit(
    quantised: tuple[Path, dict[str, Tensor]], change: str
) -> None:
    source, _ = quantised
    tensors = read_tensors(source)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scales = tensors.pop(name)
    if change == "short scales":
        tensors[name] = scales[:, :-1].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"layers\.0\.mlp\.experts\.down_proj_blocks .*fetch"):
        HFTensors(source)

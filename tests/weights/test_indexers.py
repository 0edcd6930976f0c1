"""Models with sparse attention: trained as the dense model that they are up to index_topk tokens,
exported with the indexers that they came with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import forward, megatron, read_tensors, write_model, write_tensors
from ranks import run_ranks

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.engines.server.model_directory import engine_directory
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.fp8 import quantize
from vapo_megatron.weights.load import load_hf

INDEXED = ("deepseek_v32", "glm_moe_dsa")
IDS = torch.arange(3, 30)
INDEXER = ".self_attn.indexer."


def ignore(stage: str, total: int) -> Any:
    return lambda done: None


def configured(path: Path, **changes: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def predicts_ahead(path: Path) -> Path:
    """The model with a layer after the last, which has an indexer of its own."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        first = f"model.layers.0{INDEXER}"
        extra = {name: t for name, t in tensors.items() if name.startswith(first)}
        tensors |= {name.replace("layers.0", "layers.4"): t.clone() for name, t in extra.items()}

    write_tensors(path, add)
    return configured(path, num_nextn_predict_layers=1)


def same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = read_tensors(path)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("family", INDEXED)
def test_the_name_of_layers_before_is_the_same_type(tmp_path: Path, family: str) -> None:
    expected = read_spec(write_model(tmp_path, family))
    configured(tmp_path, layer_types=["deepseek_sparse_attention"] * 4)
    assert transformers.AutoConfig.from_pretrained(tmp_path).layer_types[0] == "indexed_attention"
    assert read_spec(tmp_path) == expected


@pytest.mark.parametrize("family", INDEXED)
def test_a_conversion_there_and_back_carries_indexers(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path / "model", family)
    expected = read_tensors(source)
    held = json.loads((source / "config.json").read_text())
    shared = {name for name in expected if INDEXER in name}
    assert len(shared) == 5 * {"deepseek_v32": 4, "glm_moe_dsa": 2}[family]
    predicts_ahead(source)
    made = hf_to_megatron(source, tmp_path / "megatron", ignore)
    assert "(5 tensors for multi-token prediction)" in made.described
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ignore)
    same(tmp_path / "back", expected)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written == held | {"num_nextn_predict_layers": 0}


@pytest.mark.parametrize("family", INDEXED)
def test_without_its_source_a_model_is_exported_as_a_dense_one(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path / "model", family)
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)(IDS[None]).logits
    hf_to_megatron(source, tmp_path / "megatron", ignore)
    shutil.rmtree(source)
    made = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ignore)
    assert f"the indexers of {source} are gone" in made.described
    assert "exported as deepseek_v3, which is the same up to 64 tokens" in made.described
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(loaded).__name__ == "DeepseekV3ForCausalLM"
    torch.testing.assert_close(loaded(IDS[None]).logits, expected, rtol=1e-5, atol=1e-5)
    assert read_spec(tmp_path / "back").family == "deepseek_v3"


def test_a_part_of_an_indexer_that_is_missing_is_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "deepseek_v32")
    name = f"model.layers.1{INDEXER}k_norm.bias"
    write_tensors(source, lambda tensors: tensors.pop(name))
    with pytest.raises(BadInput, match=f"tensor {name} is missing, and others of this indexer"):
        hf_to_megatron(source, tmp_path / "megatron", ignore)
    assert not (tmp_path / "megatron").exists()


def test_other_indexers_are_not_taken(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "deepseek_v32")
    hf_to_megatron(source, tmp_path / "megatron", ignore)
    name = f"model.layers.2{INDEXER}k_norm.weight"
    write_tensors(source, lambda tensors: tensors[name].add_(1.0))
    made = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ignore)
    assert "or others than those the model came with" in made.described
    assert not any(INDEXER in name for name in read_tensors(tmp_path / "back"))


def exported(source: Path, out: Path) -> None:
    spec = read_spec(source)
    for head in ("lm", "value"):
        (chunk,), mesh = megatron(spec, LayoutConfig(), head, "bfloat16")
        load_hf([chunk], spec, source, mesh, head)
        save_hf([chunk], spec, mesh, head, source, out / head)


def test_exports_of_a_run_carry_indexers_in_their_own_dtype(tmp_path: Path) -> None:
    """Rounded, the numbers that choose tokens would choose others."""
    source = write_model(tmp_path / "model", "deepseek_v32", dtype=torch.bfloat16)
    exact = f"model.layers.0{INDEXER}weights_proj.weight"
    write_tensors(source, lambda tensors: tensors.update({exact: torch.randn(3, 32)}))
    held = read_tensors(source)
    run_ranks(1, exported, source, tmp_path)
    same(tmp_path / "lm", held)
    critic = read_tensors(tmp_path / "value")
    assert torch.equal(critic[exact], held[exact])
    loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "value")
    assert type(loaded).__name__ == "DeepseekV32ForTokenClassification"
    assert loaded(IDS[None]).logits.shape == (1, len(IDS), 1)


def test_indexers_in_fp8_are_carried_as_bfloat16(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "deepseek_v32", dtype=torch.bfloat16)
    name = f"model.layers.0{INDEXER}wq_b.weight"
    values, scales = quantize(read_tensors(source)[name])
    files = {name: values, f"{name}_scale_inv": scales}
    write_tensors(source, lambda tensors: tensors.update(files))
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    configured(source, quantization_config=blocks)
    hf_to_megatron(source, tmp_path / "megatron", ignore)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ignore)
    tensor = read_tensors(tmp_path / "back")[name]
    expected = (values.float() * scales[0, 0]).bfloat16()
    assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected)


def logits(source: Path, count: int) -> Any:
    spec = read_spec(source)
    (chunk,), mesh = megatron(spec, LayoutConfig(), "lm")
    load_hf([chunk], spec, source, mesh, "lm")
    return forward(chunk, IDS[:count])[:, : spec.vocab_size].numpy()


def test_the_context_ends_where_indexers_would_leave_tokens_out(tmp_path: Path) -> None:
    source = write_model(tmp_path, "deepseek_v32", index_topk=16)
    assert read_spec(source).max_position_embeddings == 16
    model = transformers.AutoModelForCausalLM.from_pretrained(source)

    def difference(count: int) -> float:
        (ours,) = run_ranks(1, logits, source, count)
        with torch.no_grad():
            theirs = model(IDS[None, :count]).logits[0]
        return float((torch.from_numpy(ours) - theirs).abs().max())

    assert difference(16) < 1e-5
    assert difference(17) > 1e-3, "the 17th token does not read one of those before it"


@pytest.mark.parametrize("family", INDEXED)
def test_engines_get_the_dense_model(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path / "model", family)
    (tmp_path / "scratch").mkdir()
    folder = engine_directory(source, tmp_path / "scratch")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert not any(key.startswith("index") for key in config)
    dense = read_spec(folder)
    assert dense.family == "deepseek_v3" and dense.layers == read_spec(source).layers


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types is"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2}, "dense layers come first"),
        ({"index_topk": 0}, "index_topk is 0"),
    ],
)
def test_what_is_not_sparse_attention_as_known_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    source = configured(write_model(tmp_path, "deepseek_v32"), **changes)
    with pytest.raises(BadInput) as refusal:
        read_spec(source)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)

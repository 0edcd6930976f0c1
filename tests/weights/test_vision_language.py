"""Vision-language directories: the language model is read, and written beside the vision part."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_table import FAMILIES
from hf_models import SIZES, forward, megatron, read_tensors, write_tensors
from ranks import run_ranks
from safetensors.torch import save_file
from torch import Tensor

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.engines.server.model_directory import engine_directory
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.weights.carried import LanguageTensors
from vapo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.load import load_hf

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
IDS = torch.arange(3, 30)


def write_vision_language(path: Path, moe: bool = False, tied: bool = False) -> Path:
    """A Qwen3.5 directory as published ones are: experts stacked, a layer that predicts ahead."""
    name = "qwen3_5_moe_text" if moe else "qwen3_5_text"
    classes = FAMILIES[name].classes
    sizes = SIZES | FAMILIES[name].sizes | {"tie_word_embeddings": tied}
    config = getattr(transformers, classes + "Config")(
        text_config=sizes, vision_config=VISION, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    model = getattr(transformers, classes + "ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    write_tensors(path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(4, 4)}))
    held = json.loads((path / "config.json").read_text())
    held["text_config"]["mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(held))
    (path / "preprocessor_config.json").write_text("{}")
    return path


def stack_experts(tensors: dict[str, Tensor]) -> None:
    """The form of published files: one tensor of all experts of a layer."""
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(4)]
            for part in ("gate", "up", "down")
        )
        both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(both)
        tensors[f"{prefix}.down_proj"] = torch.stack(downs)


def ignore(stage: str, total: int) -> Any:
    return lambda done: None


def there_and_back(source: Path, folder: Path) -> Path:
    made = hf_to_megatron(source, folder / "megatron", ignore)
    assert "mtp.* (1 tensors for multi-token prediction)" in made.described
    megatron_to_hf(folder / "megatron", folder / "back", ignore)
    return folder / "back"


@pytest.mark.parametrize(("moe", "tied"), [(False, True), (True, False)])
def test_what_comes_back_is_the_whole_model(tmp_path: Path, moe: bool, tied: bool) -> None:
    source = write_vision_language(tmp_path / "model", moe, tied)
    expected = read_tensors(source)
    del expected["mtp.fc.weight"]
    if moe:
        write_tensors(source, stack_experts)
    back = there_and_back(source, tmp_path)
    tensors = read_tensors(back)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    written = json.loads((back / "config.json").read_text())
    held = json.loads((source / "config.json").read_text())
    held["text_config"]["mtp_num_hidden_layers"] = 0
    assert written == held
    assert (back / "preprocessor_config.json").is_file()
    loaded = getattr(transformers, held["architectures"][0]).from_pretrained(back)
    assert torch.equal(
        loaded.model.visual.pos_embed.weight, expected["model.visual.pos_embed.weight"]
    )


@pytest.mark.parametrize("moe", [False, True])
def test_tied_words_are_said_outside_of_the_language_model(tmp_path: Path, moe: bool) -> None:
    """transformers writes false into the text_config of a tied model that had no key there."""
    source = write_vision_language(tmp_path / "model", moe, tied=True)
    held = json.loads((source / "config.json").read_text())
    expected = read_spec(source)
    held["text_config"]["tie_word_embeddings"] = False
    (source / "config.json").write_text(json.dumps(held))
    assert "lm_head.weight" not in read_tensors(source)
    whole = getattr(transformers, held["architectures"][0]).from_pretrained(source)
    assert whole.lm_head.weight is whole.model.language_model.embed_tokens.weight
    assert read_spec(source) == expected and expected.tied
    back = read_tensors(there_and_back(source, tmp_path))
    assert back.keys() == read_tensors(source).keys() - {"mtp.fc.weight"}


def test_without_its_source_the_language_model_is_alone(tmp_path: Path) -> None:
    source = write_vision_language(tmp_path / "model")
    ids = IDS[None]
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)(ids).logits
    hf_to_megatron(source, tmp_path / "megatron", ignore)
    shutil.rmtree(source)
    made = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ignore)
    assert f"the vision tensors of {source} are gone" in made.described
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert loaded.config.model_type == "qwen3_5_text"
    assert torch.equal(loaded(ids).logits, expected)


def test_a_checkpoint_of_an_earlier_version_still_has_its_vision_part(tmp_path: Path) -> None:
    source = write_vision_language(tmp_path / "model")
    hf_to_megatron(source, tmp_path / "megatron", ignore)
    (path,) = (tmp_path / "megatron").rglob("model.json")
    card = json.loads(path.read_text())
    card["vision"] = card.pop("carried")
    path.write_text(json.dumps(card))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ignore)
    assert any("visual" in name for name in read_tensors(tmp_path / "back"))


def test_other_vision_tensors_are_not_taken(tmp_path: Path) -> None:
    source = write_vision_language(tmp_path / "model")
    hf_to_megatron(source, tmp_path / "megatron", ignore)
    write_tensors(source, lambda tensors: tensors["model.visual.pos_embed.weight"].add_(1.0))
    made = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", ignore)
    assert "or others than those the model came with" in made.described
    assert not any("visual" in name for name in read_tensors(tmp_path / "back"))


def trained_rank(source: Path, out: Path) -> list[float]:
    spec = read_spec(source)
    (chunk,), mesh = megatron(spec, LayoutConfig(), "lm")
    load_hf([chunk], spec, source, mesh, "lm")
    logits = forward(chunk, IDS)[:, : spec.vocab_size]
    save_hf([chunk], spec, mesh, "lm", source, out)
    return [float(x) for x in logits.flatten()]


def test_a_live_model_computes_and_writes_the_same(tmp_path: Path) -> None:
    source = write_vision_language(tmp_path / "model")
    ((logits),) = run_ranks(1, trained_rank, source, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    expected = model(IDS[None]).logits.flatten()
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-4, atol=1e-4)
    written = read_tensors(tmp_path / "out")
    held = read_tensors(source)
    del held["mtp.fc.weight"]
    assert written.keys() == held.keys()
    assert all(torch.equal(written[name], held[name]) for name in held)


def test_an_engine_gets_the_language_model(tmp_path: Path) -> None:
    source = write_vision_language(tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    folder = engine_directory(source, tmp_path / "scratch")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert read_spec(folder) == read_spec(source)
    assert (folder / "model.safetensors").resolve() == (source / "model.safetensors").resolve()


def test_a_directory_without_a_language_model_is_refused(tmp_path: Path) -> None:
    source = write_vision_language(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    del config["text_config"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"config\.json: text_config is None, expected an object"):
        read_spec(source)


@pytest.mark.parametrize(
    ("stored", "name", "shape", "scales"),
    [
        ("mlp.experts.gate_up_proj", "mlp.experts.1.up_proj.weight", (2, 256, 128), (2, 2, 1)),
        ("mlp.up_proj.weight", "mlp.up_proj.weight", (128, 128), (4, 1)),
    ],
)
def test_fp8_scales_under_the_prefix_are_checked(
    tmp_path: Path, stored: str, name: str, shape: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    """They were read as far as they went, or ended in a stack trace."""
    full = f"model.language_model.layers.0.{stored}"
    values = torch.zeros(shape).to(torch.float8_e4m3fn)
    save_file(
        {full: values, f"{full}_scale_inv": torch.ones(scales)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(BadInput, match=r"expected F8_E4M3 .* give the bf16 original"):
        LanguageTensors(tmp_path).check(f"model.layers.0.{name}", (128, 128))

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from called import called
from family_table import FAMILIES

from tools.make_tiny_model import app
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.tiny import (
    CHATML_TEMPLATE,
    AutoModelForCausalLM,
    AutoTokenizer,
    tokenizer_from,
)

QWEN = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers" / "qwen2.5"


def _make(*arguments: object) -> tuple[int, str]:
    return called(app, *arguments)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_every_family(tmp_path: Path, family: str, tied: bool) -> None:
    out = tmp_path / "model"
    code, output = _make(
        "--out", out, "--family", family, "--tied" if tied else "--no-tied", "--vocab-size", 112
    )
    assert code == 0, output
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.model_type == family and model.config.vocab_size == 112
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == tied
    ids = torch.tensor([tokenizer.encode("1 2 3")])
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert _make("--out", tmp_path / name, "--seed", seed)[0] == 0
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", 3], "kv_heads 2"),
        (["--family", "qwen2", "--head-dim", 64], "head_dim"),
        (["--vocab-size", 10], "vocab_size 10"),
        (["--layers", 0], "layers"),
        (["--family", "gpt"], "family 'gpt': expected one of deepseek_v2, deepseek_v3"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line_and_exit_2(
    tmp_path: Path, arguments: list, message: str
) -> None:
    code, output = _make("--out", tmp_path / "model", *arguments)
    assert code == 2 and message in output and output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_export_keeps_existing_directory_and_umask(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        assert _make("--out", tmp_path / "model")[0] == 0
    finally:
        os.umask(before)
    weights = tmp_path / "model" / "model.safetensors"
    assert {stat.S_IMODE(path.stat().st_mode) for path in weights.parent.iterdir()} == {0o644}
    content = weights.read_bytes()
    code, output = _make("--out", tmp_path / "model", "--seed", 2)
    assert code == 2 and "exists already" in output
    assert weights.read_bytes() == content


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    code, output = _make("--out", tmp_path)
    assert code == 2 and "exists already" in output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_bare_qwen_vocabulary_becomes_the_qwen_tokenizer(tmp_path: Path) -> None:
    if not QWEN.is_dir():
        pytest.skip(f"{QWEN} is not there")
    tokenizer_from(QWEN).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = json.loads((QWEN / "tokenizer_config.qwq-32b.json").read_text())[
        "added_tokens_decoder"
    ]
    qwen25 = {
        int(index): token["content"] for index, token in expected.items() if int(index) <= 151_664
    }
    assert len(tokenizer) == 151_665
    assert {index: tokenizer.convert_ids_to_tokens(index) for index in qwen25} == qwen25
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "Let $x = \\frac{1}{2}$.\n\n  Then 1234 é 数学"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("1234") == [16, 17, 18, 19]  # Qwen reads digits one by one
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_template == CHATML_TEMPLATE


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        tokenizer_from(tmp_path)

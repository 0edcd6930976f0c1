"""examples/gsm8k as a user runs it, on a small random model with Qwen2.5's whole vocabulary and its
tokenizer."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from called import called
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_tiny_model import app
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.tokenizer import TextTokenizer

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gsm8k"
TOOLS = EXAMPLE.parents[1] / "tools"
DATA = ROOT.parent / "shared" / "data"
QWEN = DATA / "tokenizers" / "qwen2.5"
VOCABULARY = 151_936
NEW_TOKENS = 16

needs_data = pytest.mark.skipif(
    not QWEN.is_dir(), reason=f"no Qwen2.5 tokenizer and GSM8K rows at {DATA}"
)


def _python(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and model, made as README.md says."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for name, source in (
        ("train", DATA / "train" / "gsm8k_train.jsonl"),
        ("test", DATA / "eval" / "gsm8k_test.jsonl"),
    ):
        (folder / f"{name}.jsonl").write_text(
            "\n".join(source.read_text().splitlines()[:16]) + "\n"
        )
    for source, out in (("train", "train"), ("test", "eval")):
        _python(
            TOOLS / "prepare_data.py",
            "--source",
            folder / f"{source}.jsonl",
            "--out",
            folder / "data" / f"{out}.jsonl",
        )
    shape = [
        "--family",
        "qwen2",
        "--vocab-size",
        VOCABULARY,
        "--hidden-size",
        64,
        "--max-positions",
        2048,
    ]
    code, output = called(app, "--out", folder / "model", "--tokenizer-from", QWEN, *shape)
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def run_dir(folder: Path) -> Path:
    """Two steps at TP 2 on the CPU."""
    return train(folder, "vapo.yaml", {})


def train(folder: Path, example: str, changes: dict[str, Any]) -> Path:
    """Two steps, in which wrong answers cost a point, so that a model that is never right learns
    too."""
    overrides = _readme_overrides() | {
        "model.path": folder / "model",
        "data.train": folder / "data" / "train.jsonl",
        "data.eval.0.path": folder / "data" / "eval.jsonl",
        "data.eval.0.limit": 2,
        "data.eval.0.samples": 2,
        "run.root": folder,
        "actor.optimizer.lr": 1e-3,
        "actor.optimizer.warmup_steps": 0,
        "critic.optimizer.warmup_steps": 0,
        "reward.incorrect": -1.0,
        **changes,
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    _python("-m", "vapo_megatron.cli", "train", EXAMPLE / example, *arguments)
    directory: Path = folder / overrides["run.name"]
    return directory


def _readme_overrides() -> dict[str, Any]:
    """What README.md gives for two CPU cores."""
    text = (EXAMPLE / "README.md").read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if "run.name=gsm8k_tiny" in line)
    return dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)


@needs_data
def test_the_rows_of_a_run(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert any("value_pretraining/value_loss" in row for row in rows)
    steps = {row["step"]: row for row in rows}
    assert sorted(steps) == [0, 1, 2]
    for step in (1, 2):
        row = steps[step]
        assert row["rollout/train_infer_logprob_diff"] < 1e-4
        assert row["actor/train_infer_logprob_diff_max"] < 1e-4, (
            "engine and trainer disagree on sampled tokens"
        )
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
        assert row["actor/updates"] == row["critic/updates"] == 2
        assert 1 <= row["response_length/min"] <= row["response_length/max"] <= NEW_TOKENS
        # ln 151,936 is the entropy of a model that knows nothing.
        assert row["actor/entropy"] == pytest.approx(11.93, abs=0.1)
    assert steps[2]["rollout/weight_version"] == steps[1]["rollout/weight_version"] + 1
    assert {row["step"] for row in rows if "evaluation/gsm8k_avg@2" in row} == {0, 2}


@needs_data
def test_sampled_tokens_decode_to_text(folder: Path, run_dir: Path) -> None:
    problems = {row["problem"] for row in map(json.loads, (folder / "data" / "train.jsonl").open())}
    lines = (run_dir / "samples" / "step_000002.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 4 * 2 and len({sample["response"] for sample in samples}) == len(samples)
    for sample in samples:
        assert sample["problem"] in problems and sample["answer"].isdigit()
        # Random tokens of a vocabulary of words and word parts are text, with some broken bytes in
        # between.
        readable = [letter for letter in sample["response"] if letter.isalnum()]
        assert len(readable) > sample["tokens"]
        assert not sample["correct"] and sample["reward"] == -1.0


@needs_data
def test_the_policy_is_an_ordinary_directory_that_has_learnt(folder: Path, run_dir: Path) -> None:
    directory = run_dir / "hf" / "final" / "actor"
    trained, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert trained.config.model_type == "qwen2" and trained.config.vocab_size == VOCABULARY
    before = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    moved = {
        name
        for name, tensor in trained.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    assert moved == set(before)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        written = trained.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert (
        isinstance(tokenizer.decode(written[0]), str)
        and written.shape[1] > prompt["input_ids"].shape[1]
    )


@needs_data
def test_a_problem_is_put_in_the_chat_form_of_the_model(folder: Path) -> None:
    config = load_config(TrainConfig, EXAMPLE / "vapo.yaml", [], PRESETS)
    tokenizer = TextTokenizer(folder / "model", config.data.prompt)
    text = tokenizer.prompt_text("What is 2 + 3?")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert (
        "<|im_start|>user\nWhat is 2 + 3?\n\nPlease reason step by step, and put your final answer "
        "within" in text
    )
    assert "\\boxed{}.<|im_end|>" in text
    assert tokenizer.decode(tokenizer.encode_prompt("What is 2 + 3?")).count("\\boxed{}") == 1


@needs_data
def test_adapters_are_trained_synced_resumed_and_exported(folder: Path) -> None:
    small = {
        "run.name": "lora",
        "model.adapter.rank": 4,
        "value_pretraining.enabled": False,
        "checkpoint.every": 100,
    }
    run_dir = train(folder, "vapo_lora.yaml", small | {"run.steps": 1})
    assert train(folder, "vapo_lora.yaml", small | {"run.resume": "auto"}) == run_dir
    rows = {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").open())}
    assert sorted(rows) == [0, 1, 2]
    for step in (1, 2):
        assert rows[step]["actor/train_infer_logprob_diff_max"] < 1e-4, (
            "engine and trainer disagree on sampled tokens"
        )
        assert rows[step]["actor/grad_norm"] > 0 and rows[step]["critic/grad_norm"] > 0
    exported = run_dir / "hf" / "final"
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(exported / "actor" / "model.safetensors")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
    halves = load_file(exported / "actor_adapter" / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    a, b = (halves[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    merged = before[f"{name}.weight"] + 32 / 4 * b @ a
    assert torch.allclose(merged, after[f"{name}.weight"], atol=1e-6)
    checkpoint = run_dir / "checkpoints" / "step_000002"
    out = folder / "converted"
    _python(
        TOOLS / "convert_megatron_to_hf.py",
        "--checkpoint",
        checkpoint,
        "--base",
        folder / "model",
        "--out",
        out,
    )
    again = load_file(out / "model.safetensors")
    assert all(torch.allclose(again[name], tensor, atol=1e-6) for name, tensor in after.items())
    weights = folder / "model" / "model.safetensors"
    content = weights.read_bytes()
    try:
        save_file(
            before | {f"{name}.weight": before[f"{name}.weight"] + 1},
            weights,
            metadata={"format": "pt"},
        )
        with pytest.raises(AssertionError, match="its weights are not those that the adapters in"):
            train(folder, "vapo_lora.yaml", small | {"run.resume": "auto", "run.steps": 3})
    finally:
        weights.write_bytes(content)


def test_both_configs_ask_in_the_same_way() -> None:
    train = load_config(TrainConfig, EXAMPLE / "vapo.yaml", [], PRESETS)
    evaluate = load_config(EvaluateConfig, EXAMPLE / "evaluate.yaml", [], PRESETS)
    assert evaluate.data.prompt == train.data.prompt
    assert evaluate.data.max_prompt_tokens == train.data.max_prompt_tokens
    assert evaluate.data.eval == train.data.eval
    assert evaluate.reward.answer_format == train.reward.answer_format
    assert evaluate.sampling.max_new_tokens == train.sampling.max_new_tokens
    assert (evaluate.sampling.temperature, evaluate.sampling.top_p) == (
        train.evaluation.temperature,
        train.evaluation.top_p,
    )
    assert evaluate.model.path == f"{train.run.directory}/hf/final/actor"

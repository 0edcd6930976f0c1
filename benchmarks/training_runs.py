"""Whole runs of `vapo-megatron train` that benchmarks time: their models, prompts, and what a step
of them took."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.files import atomic_write
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.monitoring.metrics import read_metrics
from vapo_megatron.weights.tiny import hf_config, word_tokenizer

ROOT = Path(__file__).parents[1]
# The first steps start engines, compile and fill caches.
SKIPPED = 3
MODELS: dict[str, dict[str, Any]] = {
    "1m": {"layers": 4, "intermediate_size": 384, "vocab_size": 256},
    "30m": {
        "layers": 9,
        "hidden_size": 512,
        "head_dim": 64,
        "heads": 8,
        "kv_heads": 4,
        "intermediate_size": 1536,
        "vocab_size": 256,
    },
    # The shape of Qwen2.5-1.5B.
    "1.5b": {
        "family": "qwen2",
        "layers": 28,
        "hidden_size": 1536,
        "head_dim": 128,
        "heads": 12,
        "kv_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "max_positions": 4096,
        "tied": True,
    },
}
_SPECIAL_TOKENS = 4
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_inputs(
    folder: Path, prompts: int, tokens: int, model: str = "1m", dtype: str = "float32"
) -> None:
    """Write folder/model, a random one of MODELS, and folder/train.jsonl with prompts of so many
    tokens. The model is drawn on the accelerator, where there is one."""
    shape = TinyModel(**{"tied": False, **MODELS[model]})
    words = [f"w{number}" for number in range(shape.vocab_size - _SPECIAL_TOKENS)]
    tokenizer = word_tokenizer(words, shape.max_positions, _TEMPLATE)
    torch.manual_seed(shape.seed)
    with current_platform().device:
        network = transformers.AutoModelForCausalLM.from_config(
            hf_config(shape, tokenizer), dtype=getattr(torch, dtype)
        )
    transformers.utils.logging.disable_progress_bar()
    network.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    rows = [
        {"problem": " ".join(random.choice(words, tokens)), "answer": "7"} for _ in range(prompts)
    ]
    with atomic_write(folder / "train.jsonl") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def train(
    folder: Path, name: str, preset: str, settings: Mapping[str, object]
) -> list[dict[str, float]]:
    """Train on the inputs of `folder`; the metrics of each step behind the SKIPPED ones.

    settings: of keys, beside those that follow from the inputs. `run.steps` counts the steps that
    are returned.
    """
    config = folder / f"{name}.yaml"
    config.write_text(f"preset: {preset}\n")
    on_gpu = current_platform().is_cuda
    given = {
        "run.name": name,
        "run.root": folder / "runs",
        "model.path": folder / "model",
        "data.train": folder / "train.jsonl",
        "reward.verifier": "function",
        "reward.function": "benchmarks.parity_reward:verify",
        "reward.grade_truncated": "true",
        "reward.workers": 1,
        # The model is random: its log-probs in bfloat16 are far from the engine's now and then.
        **({"rollout.sync.tolerance": 10} if on_gpu else {}),
        **settings,
        "run.steps": int(str(settings["run.steps"])) + SKIPPED,
    }
    command = [sys.executable, "-W", "ignore", "-m", "vapo_megatron.cli", "train", str(config)]
    run([*command, *(f"{key}={value}" for key, value in given.items())], OMP_NUM_THREADS="1")
    return list(read_metrics(folder / "runs" / name))[SKIPPED:]


def phases_of(row: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase of a step."""
    return {
        name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")
    }


def run(command: list[str], **environment: str) -> None:
    """Run a program; its failure is ours, with the end of what it said."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise SystemExit(
            f"{' '.join(command)}: ended with code "
            f"{ended.returncode}\n{(ended.stdout + ended.stderr)[-3000:]}"
        )

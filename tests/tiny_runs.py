"""A tiny model of whole words, problems for it, and configs of all three commands, for tests of the
command line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, save_tiny_model, word_tokenizer

WORDS = [
    "####",
    *(str(digit) for digit in range(10)),
    "<|im_start|>user",
    "<|im_start|>assistant",
    "plus",
]
CONTEXT = 128

Row = Mapping[str, Any]


def make_model(directory: Path, seed: int = 0) -> Path:
    """A random Qwen3 with 4 heads, 2 key-value heads and 2 layers, in a context of 128 tokens."""
    tokenizer = word_tokenizer(WORDS, CONTEXT, CHATML_TEMPLATE)
    shape = TinyModel(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        max_positions=CONTEXT,
        seed=seed,
    )
    save_tiny_model(shape, tokenizer, directory)
    return directory


def problems(count: int) -> list[dict[str, Any]]:
    """Sums of digits; an answer is a digit."""
    return [
        {"id": f"p{n}", "problem": f"{n % 5} plus {n % 4}", "answer": n % 5 + n % 4}
        for n in range(count)
    ]


def write_rows(path: Path, rows: Sequence[Row | str]) -> Path:
    """Rows as jsonl; a text is a line as it is."""
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
    """A config as YAML."""
    path.write_text(yaml.safe_dump(dict(config)))
    return path


def train_config(folder: Path, model: Path) -> dict[str, Any]:
    """A config of `train` that works, with its data; the run goes to folder/runs/tiny."""
    return {
        "run": {"name": "tiny", "root": str(folder / "runs")},
        "cluster": {"ranks": 2},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"layout": {"tp": 2}},
        "critic": {"layout": {"tp": 2}},
        "data": {
            "train": str(write_rows(folder / "train.jsonl", problems(8))),
            "eval": [
                {
                    "name": "sums",
                    "path": str(write_rows(folder / "eval.jsonl", problems(12)[8:])),
                    "samples": 2,
                }
            ],
            "max_prompt_tokens": 16,
        },
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "sampling": {"max_new_tokens": 8},
        "algorithm": {"advantage": {"length_adaptive_alpha": 0.4}},  # of 4 tokens: no caution
    }


def sft_config(folder: Path, model: Path) -> dict[str, Any]:
    """A config of `sft` that works, with its data."""
    rows = [{"problem": row["problem"], "response": f"#### {row['answer']}"} for row in problems(8)]
    return {
        "run": {"name": "tiny", "root": str(folder / "runs")},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(write_rows(folder / "sft.jsonl", rows)), "batch_size": 4},
        "actor": {"optimizer": {"warmup_steps": 2}},  # of 2 steps: no caution
    }


def evaluate_config(folder: Path, model: Path) -> dict[str, Any]:
    """A config of `evaluate` that works, with its data."""
    return {
        "run": {"name": "tiny", "root": str(folder / "runs")},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "eval": [
                {
                    "name": "sums",
                    "path": str(write_rows(folder / "eval.jsonl", problems(4))),
                    "samples": 2,
                }
            ],
            "max_prompt_tokens": 16,
        },
        "sampling": {"max_new_tokens": 8},
    }

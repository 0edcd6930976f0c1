"""examples/gsm8k/vapo_lora.yaml as a user runs it, in small: VAPO with adapters on a CPU, its data
made on the spot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import make_model, problems, write_rows

ROOT = Path(__file__).parents[2]
SMALL = {
    "cluster.ranks": 1,
    "model.dtype": "float32",
    "model.adapter.rank": 4,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.warmup_steps": 0,
    "critic.optimizer.warmup_steps": 0,
    "run.steps": 2,
    "batch": "{prompts_per_step: 4, samples_per_prompt: 2}",
    "algorithm.update.minibatch_size": 4,
    "value_pretraining": "{iterations: 1, minibatch_size: 4}",
    "sampling.max_new_tokens": 16,
    "data.max_prompt_tokens": 32,
    "rollout.context_length": 128,
    "reward": "{workers: 1, incorrect: -1.0}",  # a model that is never right learns too
    "data.eval.0.limit": 2,
    "data.eval.0.samples": 1,
}


@pytest.mark.full
def test_vapo_with_adapters_learns_on_cpu_and_exports_both_forms(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    settings = SMALL | {
        "model.path": model,
        "data.train": write_rows(tmp_path / "train.jsonl", problems(16)),
        "data.eval.0.path": write_rows(tmp_path / "eval.jsonl", problems(4)),
        "run.root": tmp_path,
    }
    command = ["-m", "vapo_megatron.cli", "train", ROOT / "examples" / "gsm8k" / "vapo_lora.yaml"]
    arguments = [
        sys.executable,
        *map(str, command),
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "gsm8k_lora"
    rows = {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").open())}
    assert sorted(rows) == [0, 1, 2]
    for step in (1, 2):
        assert rows[step]["actor/train_infer_logprob_diff_max"] < 1e-4, (
            "engine and trainer disagree on sampled tokens"
        )
        assert rows[step]["actor/grad_norm"] > 0 and rows[step]["critic/grad_norm"] > 0
    before, after = (
        load_file(path / "model.safetensors")
        for path in (model, run_dir / "hf" / "final" / "actor")
    )
    halves = load_file(run_dir / "hf" / "final" / "actor_adapter" / "adapter_model.safetensors")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
    for name in moved:
        a, b = (
            halves[f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight"]
            for half in "AB"
        )
        torch.testing.assert_close(after[name], before[name] + 32 / 4 * b @ a, rtol=0, atol=1e-6)

"""`vapo-megatron pretrain-critic` as a user starts it: two ranks, neither actor nor engines, a
value checkpoint."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import read_tensors
from tiny_runs import make_model, train_config, write_config

pytestmark = pytest.mark.full
DEADLINE = 300


def command(config: Path, *overrides: str, expect: int = 0, name: str = "pretrain-critic") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "vapo_megatron.cli", name, str(config), *overrides],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_critic_learns_from_files_alone_and_resumes(tmp_path: Path) -> None:
    """What a response says first decides: a critic that learns explains held-out prompts."""
    model = make_model(tmp_path / "model")
    drawn = random.Random(1)
    records = tmp_path / "rows.jsonl"
    lines = []
    for number in range(512):
        good = drawn.random() < 0.5
        body = " ".join(str(drawn.randrange(5)) for _ in range(3))
        text = f"{'plus' if good else '####'} {body}"
        lines.append(
            {"prompt": f"{number % 64 // 8} plus {number % 8}", "response": text, "result": good}
        )
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = train_config(tmp_path, model) | {
        "value_pretraining": {"from": [str(records)], "replay_epochs": 2, "minibatch_size": 32},
        "checkpoint": {"every": 1, "every_minutes": 0.001, "keep": {"last": 6}},
    }
    settings["critic"] = {"layout": {"tp": 2}, "optimizer": {"lr": 3e-3, "warmup_steps": 0}}
    config = write_config(tmp_path / "critic.yaml", settings)
    out = command(config, "run.name=whole")
    whole = tmp_path / "runs/whole"
    explained = [row["value_pretraining/explained_variance"] for row in rows(whole)]
    assert explained[0] < 0.1 and explained[-1] > 0.7, explained
    assert "critic.init_path=" in out
    critic = read_tensors(whole / "hf/value_pretrained/critic")
    assert "score.weight" in critic
    assert not (whole / "hf/value_pretrained/actor").exists()
    # As if it had been killed on its way: it continues without the files, from its record, to
    # the same critic.
    saved = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert saved[0] == "step_000000" and saved[1].startswith("step_000000_pretraining_"), saved
    for path in (
        whole / "hf",
        whole / "checkpoints" / saved[0],
        *(whole / "checkpoints" / name for name in saved[2:]),
    ):
        shutil.rmtree(path)
    records.unlink()
    out = command(config, "run.name=whole", "run.resume=auto")
    assert f"resumes from {whole / 'checkpoints' / saved[1]}" in out
    again = read_tensors(whole / "hf/value_pretrained/critic")
    assert all(torch.equal(tensor, again[name]) for name, tensor in critic.items())
    assert [row["value_pretraining/explained_variance"] for row in rows(whole)] == explained
    assert "finished already" in command(config, "run.name=whole", "run.resume=auto")


def test_critic_reading_the_deciding_field_explains_the_outcome(
    tmp_path: Path,
) -> None:
    """Result and response have nothing to do with each other, nor with the prompt: a field of the
    row alone tells."""
    model = make_model(tmp_path / "model")
    drawn = random.Random(2)
    records = tmp_path / "rows.jsonl"
    lines = []
    for number in range(256):
        is_good = drawn.random() < 0.5
        text = " ".join(str(drawn.randrange(5)) for _ in range(4))
        line = {
            "prompt": f"{number % 32 // 8} plus {number % 8}",
            "response": text,
            "result": is_good,
        }
        lines.append(line | {"hidden": "plus" if is_good else "####"})
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = train_config(tmp_path, model) | {
        "value_pretraining": {"from": [str(records)], "replay_epochs": 3, "minibatch_size": 32},
        "checkpoint": {"every_minutes": 60, "keep": {"last": 1}},
    }
    settings["critic"] = {"layout": {"tp": 2}, "optimizer": {"lr": 3e-3, "warmup_steps": 0}}
    config = write_config(tmp_path / "critic.yaml", settings)
    explained = {}
    for name, override in (("told", ["critic.privileged_field=hidden"]), ("untold", [])):
        command(config, f"run.name={name}", *override)
        explained[name] = rows(tmp_path / "runs" / name)[-1]["value_pretraining/explained_variance"]
    assert explained["told"] > 0.8 and explained["untold"] < 0.2, explained

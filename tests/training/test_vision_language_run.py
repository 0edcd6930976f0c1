"""A whole run on a vision-language directory: the language model is sampled from, trained with its
critic, and written back beside the vision part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from family_table import DELTA_NET, INTERVAL
from hf_models import read_tensors
from tiny_runs import CONTEXT, WORDS, train_config, write_config

from vapo_megatron.models.token_classification import register
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

pytestmark = pytest.mark.full

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    **DELTA_NET,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}


def write_model(path: Path) -> Path:
    """A random Qwen3.5 with the words of tiny_runs."""
    tokenizer = word_tokenizer(WORDS, CONTEXT, CHATML_TEMPLATE)
    special = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    config = transformers.Qwen3_5Config(
        text_config={**TEXT, **special, "vocab_size": len(tokenizer)},
        vision_config={**VISION, "out_hidden_size": 32, "num_position_embeddings": 16},
    )
    torch.manual_seed(0)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written["text_config"] |= INTERVAL  # as published ones have, and transformers drops
    (path / "config.json").write_text(json.dumps(written))
    return path


def test_a_run_trains_it_and_writes_it_back(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    config = train_config(tmp_path, source)
    config["run"]["steps"] = 1
    config["preset"] = "vapo"
    config["value_pretraining"] = {"iterations": 1, "replay_epochs": 1, "minibatch_size": 4}
    config["algorithm"]["update"] = {"minibatch_size": 4}
    config["rollout"] = {"context_length": CONTEXT}
    path = write_config(tmp_path / "train.yaml", config)
    done = subprocess.run(
        [sys.executable, "-m", "vapo_megatron.cli", "train", str(path)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "tiny"
    exported = run_dir / "hf" / "final"
    before = read_tensors(source)
    after = read_tensors(exported / "actor")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(".visual." in name for name in changed)
    transformers.AutoModelForImageTextToText.from_pretrained(exported / "actor")
    register()
    critic = transformers.AutoModelForTokenClassification.from_pretrained(exported / "critic")
    assert critic.score.out_features == 1
    cards = [json.loads(p.read_text()) for p in run_dir.glob("checkpoints/*/actor/model.json")]
    assert {card["carried"]["path"] for card in cards} == {str(source)}

"""Memory of a run on a machine without GPUs: each part follows its keys, and too little is said
before a run."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from called import exit_code_of
from tiny_runs import make_model, train_config, write_config

from examples.smollm import make_problems
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.operations.plan import without_gpu
from vapo_megatron.operations.plan.without_gpu import host_memory

EXAMPLE = Path(make_problems.__file__).parent / "rl.yaml"
GIB = 2**30
# SmolLM2-135M, whose memory was measured.
SMOLLM = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
# Has the KV cache follow from the running responses.
BY_RESPONSES = "rollout.max_total_tokens=null"
Free = namedtuple("Free", "available")


def config_of(folder: Path, *overrides: str) -> PlanConfig:

    (folder / "config.json").write_text(json.dumps(SMOLLM))
    return load_config(PlanConfig, EXAMPLE, [f"model.path={folder}", *overrides], PRESETS)


def test_the_example_is_estimated_as_it_was_measured(tmp_path: Path) -> None:
    """7.5 to 7.8 GiB (PSS of all processes); 10.9 GiB with a cache of 65,536 tokens, of which 4.1
    the engine's scheduler, and micro-batches of 2,048."""
    example = host_memory(config_of(tmp_path), 1)
    assert example.total / GIB == pytest.approx(7.7, rel=0.15)
    assert example.parts["KV caches"] == pytest.approx(9600 * 46080)
    larger = ("rollout.max_total_tokens=65536", "actor.max_tokens_per_microbatch=2048")
    measured = host_memory(config_of(tmp_path, *larger), 1)
    assert measured.total / GIB == pytest.approx(11.0, rel=0.15)
    assert measured.parts["KV caches"] == pytest.approx(65536 * 46080)
    by_responses = host_memory(config_of(tmp_path, BY_RESPONSES), 1)
    assert by_responses.parts["KV caches"] == pytest.approx(96 * 192 * 46080)


@pytest.mark.parametrize(
    ("overrides", "part", "factor"),
    [
        (["rollout.num_engines=2"], "KV caches", 2),
        (["rollout.num_engines=2"], "engine weights", 2),
        (["rollout.max_running_requests=48"], "KV caches", 0.5),
        (["cluster.ranks=2"], "actor weights", 2),
        (["cluster.ranks=2"], "actor optimizer", 1),
    ],
)
def test_a_part_follows_its_key(
    overrides: list[str], part: str, factor: float, tmp_path: Path
) -> None:
    before = host_memory(config_of(tmp_path, BY_RESPONSES), 1).parts[part]
    config = config_of(tmp_path, BY_RESPONSES, *overrides)
    after = host_memory(config, config.cluster.ranks or 1).parts[part]
    assert after == pytest.approx(factor * before)


def test_larger_microbatches_need_more_until_a_step_fits(tmp_path: Path) -> None:
    def working(tokens: int) -> float:
        config = config_of(tmp_path, f"actor.max_tokens_per_microbatch={tokens}")
        return host_memory(config, 1).parts["activations and logits"]

    assert working(1024) < working(2048) < working(4096)
    assert working(16384) == working(32768)  # 48 samples of at most 152 tokens


def test_check_and_plan_say_that_memory_does_not_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_config(
        tmp_path / "train.yaml", train_config(tmp_path, make_model(tmp_path / "model"))
    )

    def said(*command: Any) -> tuple[int, str]:
        code = exit_code_of(*command)
        return code, " ".join(capfd.readouterr().out.split())

    monkeypatch.setattr(without_gpu.psutil, "virtual_memory", lambda: Free(GIB))
    code, text = said("train", file, "--check")
    assert code == 0
    assert "warning" in text and "without GPUs the run may need" in text
    code, text = said("plan", file, "--gpus", "2")
    assert code == 0 and "1.0 are free on this machine: lower cluster.ranks" in text
    monkeypatch.setattr(without_gpu.psutil, "virtual_memory", lambda: Free(64 * GIB))
    assert "without GPUs the run" not in said("train", file, "--check")[1]
    assert "without GPUs the run" not in said("plan", file, "--gpus", "2")[1]

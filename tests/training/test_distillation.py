"""On-policy distillation: a teacher of another size, its reverse KL as the advantage of each token."""

from pathlib import Path

import pytest
import torch
from batches import spread, whole_of
from hf_models import write_model
from ranks import run_ranks
from switch_rollout import Watched, config_of, read_rollout, write_models
from tiny_runs import WORDS, make_model, train_config, write_config

from vapo_megatron.algorithms.advantages import distilled
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.models import planned_models
from vapo_megatron.run.preflight import check_train
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.score import score
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, save_tiny_model, word_tokenizer


def test_the_formula_is_that_of_a_loop() -> None:
    torch.manual_seed(0)
    advantages, student, teacher = torch.randn(3, 50)
    expected = [float(a) - 0.7 * (float(s) - float(t)) for a, s, t in zip(advantages, student, teacher, strict=True)]
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(distilled(advantages, student, teacher, 0.7).double(), wanted, rtol=1e-5, atol=1e-6)


def distances(folder: Path, layout: dict[str, int], kind: str = "model") -> dict[str, list[float]]:
    """Collective: advantages of a rollout that only the teacher judges, and both models' log-probs."""
    kl = {"placement": "advantage", "coef": 0.5, "reference_path": str(folder / "teacher")}
    config = config_of(
        folder,
        {f"algorithm.kl.{key}": value for key, value in kl.items()}
        | {"algorithm.advantage.estimator": "batch_baseline", "actor.layout": layout, "actor.kind": kind},
    )
    models, whole = load_models(config, None), read_rollout(folder)
    whole.rewards.zero_()
    whole.greedy_rewards = None
    batch = spread(whole)
    assert models.reference is not None
    assert (models.actor.spec.num_layers, models.reference.spec.num_layers) == (1, 2)
    with Watched(folder) as recorder:
        score(models, batch, config.algorithm, recorder)
        estimate_advantages(batch, config.algorithm, recorder)
    tensors = whole_of(batch).tensors()
    return {name: tensors[name].tolist() for name in ("advantages", "old_logprobs", "ref_logprobs")}


def test_a_larger_teacher_gives_each_token_its_reverse_kl_at_every_layout(tmp_path: Path) -> None:
    write_models(tmp_path)
    write_model(tmp_path / "policy", "qwen3", num_hidden_layers=1)
    write_model(tmp_path / "teacher", "qwen3", num_hidden_layers=2, seed=3)
    alone, cut = (run_ranks(ranks, distances, tmp_path, {"tp": ranks})[0] for ranks in (1, 2))
    pairs = zip(alone["old_logprobs"], alone["ref_logprobs"], strict=True)
    assert alone["advantages"] == pytest.approx([-0.5 * (s - t) for s, t in pairs], abs=1e-5)
    assert max(abs(advantage) for advantage in alone["advantages"]) > 0.01
    assert cut["advantages"] == pytest.approx(alone["advantages"], abs=1e-4)
    # Adapters begin as nothing; what they are added to is not the teacher here.
    (adapted,) = run_ranks(1, distances, tmp_path, {"tp": 1}, "adapter")
    assert adapted["advantages"] == pytest.approx(alone["advantages"], abs=1e-5)


def config_with_teacher(folder: Path, words: list[str], *overrides: str) -> TrainConfig:
    tokenizer = word_tokenizer(words, 128, CHATML_TEMPLATE)
    shape = TinyModel(vocab_size=len(tokenizer), layers=3, hidden_size=64, intermediate_size=96, max_positions=128)
    save_tiny_model(shape, tokenizer, folder / "teacher")
    settings = train_config(folder, make_model(folder / "model")) | {"preset": "distill"}
    del settings["critic"], settings["algorithm"]
    settings["algorithm"] = {"kl": {"reference_path": str(folder / "teacher")}}
    return load_config(TrainConfig, write_config(folder / "train.yaml", settings), overrides, PRESETS)


def test_checks_and_plans_know_the_teacher(tmp_path: Path) -> None:
    config = config_with_teacher(tmp_path, WORDS)
    check_train(config, 2)
    planned = planned_models(config, 2)
    assert {name: model.spec.num_layers for name, model in planned.items()} == {"actor": 2, "reference": 3}
    assert planned["reference"].bytes_of("weights", 0) > planned["actor"].bytes_of("weights", 0)


def test_a_teacher_with_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    config = config_with_teacher(tmp_path, [*WORDS[1:], WORDS[0]])
    with pytest.raises(BadInput, match=r"kl\.reference_path=.*gives \d+ of the .* another id, or none"):
        check_train(config, 2)


def test_a_teacher_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"replace_reference_every=3 with reference_path="):
        config_with_teacher(tmp_path, WORDS, "algorithm.kl.replace_reference_every=3")

"""A critic of one layer beside an actor of two: loaded, trained, exported and read back, at a
separate layout."""

from pathlib import Path
from typing import Any

import pytest
from batches import spread
from hf_models import write_model
from ranks import run_ranks
from switch_rollout import config_of, read_rollout, write_models
from tiny_runs import WORDS, make_model, train_config, write_config

from vapo_megatron.checkpoint.manifest import OPTIMIZER_BYTES
from vapo_megatron.checkpoint.sizes import checkpoint_bytes
from vapo_megatron.checks.preflight import check_train
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import read_spec
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.operations.plan.models import planned_models
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_frozen, load_models
from vapo_megatron.training.score import score, values
from vapo_megatron.training.updates import update_critic, update_policy
from vapo_megatron.weights.export import save_hf
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, save_tiny_model, word_tokenizer

LAYOUTS: list[dict[str, Any]] = [{}, {"critic.layout": {"tp": 2}}]


def two_steps(folder: Path, switches: dict[str, Any]) -> dict[str, Any]:
    """Collective: two iterations and an export; losses, and how the exported critic's values
    differ."""
    config = config_of(folder, {"critic.model_path": str(folder / "small"), **switches})
    models = load_models(config, None)
    whole = read_rollout(folder)
    losses = []
    whole.greedy_rewards = None
    batch = spread(whole)
    assert models.critic is not None
    with Recorder(folder, MonitoringConfig(), is_main_rank=False) as recorder:
        for step in (1, 2):
            score(models, batch, config.algorithm, recorder)
            estimate_advantages(batch, config.algorithm, recorder)
            update_critic(models, batch, config.algorithm, f"1/{step}", recorder)
            update_policy(models, batch, config.algorithm, f"1/{step}", recorder)
            losses.append(recorder.write(step)["critic/value_loss"])
    critic = models.critic
    place = folder / "exported"
    save_hf(critic.chunks, critic.spec, critic.mesh, critic.head, models.sources["critic"], place)
    started = {"critic.init": "value_checkpoint", "critic.init_path": str(place), **switches}
    again = load_frozen("critic", config_of(folder, started))
    difference = values(again, whole, config.algorithm.value_loss) - values(
        critic, whole, config.algorithm.value_loss
    )
    layers = models.actor.spec.num_layers, critic.spec.num_layers, read_spec(place).num_layers
    return {"losses": losses, "difference": float(difference.abs().max()), "layers": layers}


@pytest.mark.parametrize(
    "switches", [pytest.param(LAYOUTS[0], marks=pytest.mark.full), LAYOUTS[1]], ids=["one", "tp2"]
)
def test_a_smaller_critic_learns_and_is_exported(tmp_path: Path, switches: dict[str, Any]) -> None:
    write_models(tmp_path)
    write_model(tmp_path / "policy", "qwen3", num_hidden_layers=2)
    write_model(tmp_path / "small", "qwen3", num_hidden_layers=1, seed=3)
    seen = run_ranks(2 if switches else 1, two_steps, tmp_path, switches)[0]
    assert seen["layers"] == (2, 1, 1)
    assert seen["losses"][1] < seen["losses"][0]
    assert seen["difference"] < 1e-5


def tiny_config(folder: Path, words: list[str], *overrides: str) -> TrainConfig:
    tokenizer = word_tokenizer(words, 128, CHATML_TEMPLATE)
    shape = TinyModel(
        vocab_size=len(tokenizer), layers=1, hidden_size=64, intermediate_size=96, max_positions=128
    )
    save_tiny_model(shape, tokenizer, folder / "small")
    settings = train_config(folder, make_model(folder / "model"))
    settings["critic"]["model_path"] = str(folder / "small")
    return load_config(
        TrainConfig, write_config(folder / "train.yaml", settings), overrides, PRESETS
    )


def test_checks_and_plans_know_its_size(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, WORDS)
    check_train(config, 2)
    planned = planned_models(config, 2)
    sizes = {name: planned[name].spec.parameter_count() for name in ("actor", "critic")}
    assert sizes["critic"] < sizes["actor"]
    assert checkpoint_bytes(config, sizes) == sum(sizes.values()) * (4 + OPTIMIZER_BYTES)


def test_another_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, [*WORDS[1:], WORDS[0]])
    with pytest.raises(
        BadInput, match=r"critic\.model_path=.*gives \d+ of the .* another id, or none"
    ) as refused:
        check_train(config, 2)
    assert "\n" not in str(refused.value)


def test_fewer_words_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, WORDS[:-2])
    with pytest.raises(
        BadInput, match=r"critic\.model_path=.*: it has \d+ words and model\.path has \d+"
    ):
        check_train(config, 2)


def test_a_critic_with_weights_of_its_own_has_no_second_source(tmp_path: Path) -> None:
    overrides = ("critic.init=value_checkpoint", f"critic.init_path={tmp_path}")
    with pytest.raises(BadInput, match=r"model_path=.*with init=value_checkpoint"):
        tiny_config(tmp_path, WORDS, *overrides)

"""examples/aime_qwen2.5_32b: every config is valid and fits its GPUs, and what the paper states is
what they say."""

from pathlib import Path

import pytest

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.operations.plan.plan import default_world, make_plan

FOLDER = Path(__file__).parents[2] / "examples" / "aime_qwen2.5_32b"
TRAIN = sorted(
    path.stem for path in FOLDER.glob("*.yaml") if not path.stem.startswith(("evaluate", "plan"))
)
PLAN = sorted(path.stem for path in FOLDER.glob("plan*.yaml"))
EVALUATE = sorted(path.stem for path in FOLDER.glob("evaluate*.yaml"))


def _train(name: str) -> TrainConfig:
    return load_config(TrainConfig, FOLDER / f"{name}.yaml", [], PRESETS)


def test_there_are_configs() -> None:
    assert {
        "vapo",
        "vapo_fp8",
        "vapo_4nodes",
        "vapo_7b",
        "vapo_1.5b",
        "dapo",
        "grpo",
        "ppo",
    } <= set(TRAIN)
    assert len(EVALUATE) == 3


@pytest.mark.parametrize("name", TRAIN)
def test_the_longest_sample_fits_every_layout(name: str) -> None:
    config = _train(name)
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    sections = [config.actor, config.critic] if config.algorithm.uses_critic else [config.actor]
    for section in sections:
        assert section.longest_sample >= longest
        assert (
            config.cluster.ranks is not None
            and config.cluster.ranks % section.layout.model_size == 0
        )
    assert config.rollout.context_length is not None and config.rollout.context_length >= longest


@pytest.mark.parametrize("name", [*TRAIN, *PLAN])
def test_every_config_fits_its_gpus_by_the_shipped_sizes(name: str) -> None:
    config = load_config(PlanConfig, FOLDER / f"{name}.yaml", [], PRESETS)
    assert not Path(config.model.path).exists(), (
        "with local weights this would not test the shipped sizes"
    )
    plan = make_plan(config, default_world(config))
    assert plan.fits, plan.memory.problems


def test_vapo_is_the_papers() -> None:
    config = _train("vapo")
    assert (config.batch.prompts_per_step, config.batch.samples_per_prompt) == (512, 16)
    assert (config.algorithm.update.minibatch_size, config.algorithm.update.minibatch_unit) == (
        512,
        "samples",
    )
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (1e-6, 2e-6)
    assert config.algorithm.advantage.length_adaptive_alpha == 0.05
    assert config.algorithm.policy_loss.positive_nll.coef == 0.1
    assert config.value_pretraining.enabled and config.value_pretraining.most_steps == 50
    updates = (
        config.batch.prompts_per_step
        * config.batch.samples_per_prompt
        // config.algorithm.update.minibatch_size
    )
    assert abs(config.run.steps * updates - 5000) < updates


@pytest.mark.parametrize("name", [name for name in TRAIN if name not in ("vapo_7b", "vapo_1.5b")])
def test_comparison_rows_differ_by_algorithm_and_hardware_alone(name: str) -> None:
    vapo = _train("vapo")
    row = _train(name)
    assert (row.data, row.model, row.sampling, row.evaluation) == (
        vapo.data,
        vapo.model,
        vapo.sampling,
        vapo.evaluation,
    )
    responses = row.batch.prompts_per_step * row.batch.samples_per_prompt
    assert responses == vapo.batch.prompts_per_step * vapo.batch.samples_per_prompt
    if name.startswith("vapo"):
        assert (row.algorithm, row.batch, row.value_pretraining) == (
            vapo.algorithm,
            vapo.batch,
            vapo.value_pretraining,
        )


@pytest.mark.parametrize("name", EVALUATE)
def test_evaluation_asks_as_training_did(name: str) -> None:
    config = load_config(EvaluateConfig, FOLDER / f"{name}.yaml", [], PRESETS)
    by_name = {entry.name: entry for entry in config.data.eval}
    assert by_name["aime2024"].samples == by_name["aime2025"].samples == 32
    vapo = _train("vapo")
    if config.server is None:
        assert (
            config.data.prompt == vapo.data.prompt
            and config.sampling.max_new_tokens == vapo.sampling.max_new_tokens
        )
    if name == "evaluate":
        pinned = vapo.evaluation
        assert (
            (config.sampling.temperature, config.sampling.top_p)
            == (pinned.temperature, pinned.top_p)
            == (1.0, 0.7)
        )

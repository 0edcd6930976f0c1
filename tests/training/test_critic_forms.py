"""Forms of the critic in whole tiny runs: bounded, smaller than the policy; and a run's critic
probed."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import ENGINE, End, World, config_of, kill_at, left_behind, live, make_world, metrics
from tiny_runs import WORDS, write_config

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.megatron.probe import PROBE_FILE, read_probe
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.critic_lab.command import probe_critic
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, save_tiny_model, word_tokenizer

pytestmark = pytest.mark.full

ONE_RANK: dict[str, int] = {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, engine_of_runs: EngineAddress) -> World:
    return make_world(tmp_path_factory.mktemp("forms"), engine_of_runs)


def finished(shared: World, name: str, *overrides: str) -> tuple[TrainConfig, list[dict[str, Any]]]:
    """A run of two steps and its metrics."""
    config = config_of(shared, name, ONE_RANK, "run.steps=2", *overrides)
    assert live(shared, config, 1) == End(0, "")
    return config, metrics(Path(config.run.directory))


def test_values_of_a_bounded_critic_stay_in_their_range(shared: World) -> None:
    wild = (
        "critic.head_init_std=5",
        "value_pretraining.enabled=false",
        "algorithm.kl.placement=none",
    )
    wild = (
        *wild,
        "algorithm.kl.coef=0",
        "algorithm.kl.replace_reference_every=null",
        "run.steps=1",
    )
    _, free = finished(shared, "free", *wild)
    _, bounded = finished(
        shared,
        "bounded",
        *wild,
        *(f"algorithm.value_loss.{key}" for key in ("squash=tanh", "low=-1", "high=1")),
    )
    assert free[-1]["critic/value_std"] > 2
    assert 0.1 < bounded[-1]["critic/value_std"] <= 1 and abs(bounded[-1]["critic/value_mean"]) <= 1
    assert bounded[-1]["critic/grad_norm"] > 0


def test_a_probe_is_killed_and_goes_on_to_the_bit(shared: World) -> None:
    """One update of the policy a rollout, whose log-probs are still computed before it: values come
    of that pass."""
    form = (
        "critic.kind=probe",
        "critic.layout={}",
        "value_pretraining.enabled=false",
        "algorithm.update.minibatches=1",
    )
    form = (
        *form,
        "algorithm.update.minibatch_size=null",
        "algorithm.advantage.calibration=trust",
        "critic.head_init_std=0.1",
    )
    straight, expected = finished(shared, "probe_straight", *form)
    config = config_of(
        shared, "probe_killed", ONE_RANK, "run.steps=2", *form, "run.resume=auto",
    )  # fmt: skip
    assert live(shared, config, 1, partial(kill_at, "policy update", 2)).code == 75
    assert live(shared, config, 1) == End(0, "")
    run_dir = Path(config.run.directory)
    before = Path(straight.run.directory)
    assert (
        metrics(run_dir) == expected
        and expected[-1]["critic/updates"] == 1
        and expected[-1]["critic/value_std"] > 0
    )
    assert "critic/trust" in expected[-1] and not [
        name for name in expected[-1] if "critic/fault" in name
    ]
    assert left_behind(run_dir) == left_behind(before)
    assert read_probe(run_dir / "hf" / "final" / "critic" / PROBE_FILE).inner.in_features == 64
    state = max(run_dir.glob("checkpoints/step_*/" + PROBE_FILE)).read_bytes()
    assert state == max(before.glob("checkpoints/step_*/" + PROBE_FILE)).read_bytes()


def test_prompt_history_resumes_to_the_bit_after_a_kill(shared: World) -> None:
    form = (
        "algorithm.advantage.estimator=batch_baseline",
        "algorithm.advantage.tracker=true",
        "run.steps=4",
        "value_pretraining.enabled=false",
        "batch.samples_per_prompt=1",
        "batch.prompts_per_step=32",
        "algorithm.kl.placement=none",
        "algorithm.kl.coef=0",
        "algorithm.kl.replace_reference_every=null",
    )
    straight, expected = finished(shared, "tracked_straight", *form)
    config = config_of(
        shared, "tracked_killed", ONE_RANK, *form, "run.resume=auto",
    )  # fmt: skip
    assert live(shared, config, 1, partial(kill_at, "policy update", 8)).code == 75
    assert live(shared, config, 1) == End(0, "")
    run_dir = Path(config.run.directory)
    assert metrics(run_dir) == expected and expected[-1]["advantage/tracked"] > 0
    assert left_behind(run_dir) == left_behind(Path(straight.run.directory))


def test_a_smaller_critic_is_killed_and_goes_on_to_the_bit(shared: World) -> None:
    tokenizer = word_tokenizer(WORDS, 128, CHATML_TEMPLATE)
    small = shared.folder / "small"
    shape = TinyModel(
        vocab_size=len(tokenizer), layers=1, hidden_size=32, intermediate_size=48, max_positions=128
    )
    save_tiny_model(shape, tokenizer, small)
    form = f"critic.model_path={small}"
    straight, expected = finished(shared, "small_straight", form)
    config = config_of(
        shared, "small_killed", ONE_RANK, "run.steps=2", form, "run.resume=auto",
    )  # fmt: skip
    assert live(shared, config, 1, partial(kill_at, "policy update", 4)).code == 75
    assert live(shared, config, 1) == End(0, "")
    run_dir = Path(config.run.directory)
    assert metrics(run_dir) == expected
    assert left_behind(run_dir) == left_behind(Path(straight.run.directory))
    final = run_dir / "hf" / "final"
    assert [read_spec(final / part).num_layers for part in ("actor", "critic")] == [2, 1]
    assert read_spec(final / "critic").hidden_size == 32


def test_critic_of_a_run_is_probed_by_an_engine_from_its_states(
    shared: World,
) -> None:
    """The first word decides the grade: behind it all continuations of a state end alike, and half
    of states differ."""
    grade = (
        "reward.function=parity_grade:first_word",
        "reward.grade_truncated=true",
        "value_pretraining.enabled=false",
    )
    config, _ = finished(shared, "probed", *grade)
    user = config.model_dump(mode="json", exclude={"rollout", "data"})
    user["rollout"] = {**ENGINE, "max_running_requests": 32}
    probed = {"name": "probed", "path": str(shared.train), "samples": 1}
    user["data"] = {"train": str(shared.train), "eval": [probed], "max_prompt_tokens": 16}
    probes = (
        "prompts=8",
        "responses_per_prompt=4",
        "continuations=3",
        "quantiles=[0.5]",
        "bootstrap=100",
    )
    overrides = [f"critic_probes.{probe}" for probe in probes]
    probe_critic(
        load_config(
            ProbedRunConfig, write_config(shared.folder / "probe.yaml", user), overrides, PRESETS
        )
    )
    page = (Path(config.run.directory) / "critic_probes" / "report.md").read_text()
    figures = {
        name: float(value)
        for name, value in re.findall(r"^\| `(\w+)` \| (\S+) \[", page, re.MULTILINE)
    }
    assert figures["knowable"] > 0.8, "a response of one word has nothing before its half"
    assert abs(figures["explained_critic"]) < 0.5, "and the critic has learnt nothing"

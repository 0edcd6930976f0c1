"""Old log-probs from the update's own forward pass: used where that is exact, and then the same as
scored ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch, spread
from hf_models import write_model
from ranks import run_ranks
from trainables import make_trainable, policy_loss

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.batch import offsets
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.models import Models
from vapo_megatron.training.score import score, update_gives_logprobs
from vapo_megatron.training.updates import update_policy

FUNCTION = "examples.custom_functions.functions:reward_times_surprise"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=2)


def one_step(model_dir: Path, layout: LayoutConfig, how: str, algorithm: dict[str, Any]) -> Any:
    """Score and policy update of an iteration; the row, the phases and a sum over the weights after
    it."""
    asked_for = {"metrics_function": FUNCTION} if how == "score" else {}
    config = AlgorithmConfig.model_validate(
        {**algorithm, **asked_for, "update": {"minibatch_size": 6}}
    )
    actor = make_trainable(
        model_dir, "lm", layout=layout, max_tokens_per_microbatch=40, temperature=0.7
    )
    models = Models(actor)
    batch = spread(make_batch())
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        score(models, batch, config, recorder)
        batch.fill(selected=torch.ones(batch.samples, dtype=torch.bool))
        advantages = torch.randn(batch.response_tokens, generator=torch.Generator().manual_seed(3))
        bounds = offsets(batch.table.response_lengths)
        batch.local.advantages = advantages[
            bounds[batch.local_slice.start] : bounds[batch.local_slice.stop]
        ]
        update_policy(models, batch, config, "1/1", recorder)
        row = recorder.write(1)
    times = [name.removeprefix("time/") for name in row if name.startswith("time/")]
    kept = {name: value for name, value in row.items() if name.startswith(("actor/", "rollout/"))}
    return kept, times, float(actor.score(make_batch()).double().square().sum())


@pytest.mark.parametrize(
    "world_size,layout,algorithm",
    [
        pytest.param(1, LayoutConfig(), {}, marks=pytest.mark.full),
        pytest.param(
            4, LayoutConfig(tp=2, cp=2, sequence_parallel=True), {}, marks=pytest.mark.full
        ),
        (4, LayoutConfig(pp=2), {"policy_loss": {"kind": "gspo", "aggregation": "sequence_mean"}}),
        (2, LayoutConfig(), {"policy_loss": {"kind": "cispo"}}),
    ],
)
def test_one_pass_gives_what_two_give(
    model_dir: Path, world_size: int, layout: LayoutConfig, algorithm: dict[str, Any]
) -> None:
    one = run_ranks(world_size, one_step, model_dir, layout, "auto", algorithm)
    two = run_ranks(world_size, one_step, model_dir, layout, "score", algorithm)
    for (row, phases, total), (expected, expected_phases, expected_total) in zip(
        one, two, strict=True
    ):
        assert phases == ["update_policy"] and expected_phases == ["score_policy", "update_policy"]
        assert total == pytest.approx(expected_total, rel=1e-6)
        assert set(row) == set(expected) and row["actor/ratio_max"] == 1
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def outputs(model_dir: Path, layout: LayoutConfig) -> tuple[float, float]:
    """Largest difference of outputs kept by a step on some samples to a scoring pass, and to one at
    temperature 1."""
    actor = make_trainable(
        model_dir, "lm", layout=layout, max_tokens_per_microbatch=40, temperature=0.7
    )
    batch = make_batch()
    scored = actor.score(batch)
    untempered = actor.score(batch, temperature=1.0)
    result = actor.train_step(batch, [0, 2, 4], policy_loss(batch, None), keep_outputs=True)
    owner = torch.arange(batch.samples).repeat_interleave(batch.response_lengths)
    inside = torch.isin(owner, torch.tensor([0, 2, 4]))
    assert result.outputs is not None and not result.outputs[~inside].any()
    found = result.outputs[inside]
    return float((found - scored[inside]).abs().max()), float(
        (found - untempered[inside]).abs().max()
    )


@pytest.mark.parametrize(
    "world_size,layout", [(4, LayoutConfig(pp=2, cp=2)), (2, LayoutConfig(tp=2))]
)
def test_kept_outputs_are_from_before_step_at_its_temperature(
    model_dir: Path, world_size: int, layout: LayoutConfig
) -> None:
    for difference, to_untempered in run_ranks(world_size, outputs, model_dir, layout):
        assert difference < 1e-5 and to_untempered > 0.05


@pytest.mark.parametrize(
    "algorithm,fires",
    [
        ({}, True),
        ({"update": {"minibatch_size": 5}}, False),
        ({"update": {"minibatch_size": 3, "minibatch_unit": "groups"}}, False),
        ({"update": {"minibatch_size": 6, "minibatch_unit": "groups"}}, True),
        ({"update": {"epochs": 2}}, False),
        ({"update": {"critic_updates_per_policy_update": 2}}, True),
        ({"metrics_function": FUNCTION}, False),
        ({"importance_sampling": {"kind": "tis"}}, False),
        ({"kl": {"placement": "reward", "coef": 0.1}}, False),
        ({"kl": {"placement": "loss", "estimator": "k3", "coef": 0.1}}, True),
        ({"advantage": {"function": FUNCTION}}, False),
        ({"filter_function": FUNCTION}, False),
    ],
)
def test_it_fires_only_where_it_is_exact(algorithm: dict[str, Any], fires: bool) -> None:
    update = {"minibatch_size": 6} | algorithm.get("update", {})
    config = AlgorithmConfig.model_validate({**algorithm, "update": update})
    assert update_gives_logprobs(config, spread(make_batch())) is fires


def scored_in_one_update(model_dir: Path, reads_entropies: bool) -> bool:
    """Whether a step of one update scores its policy before."""
    actor = make_trainable(model_dir, "lm", max_tokens_per_microbatch=40)
    batch = spread(make_batch())
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        models = Models(actor, reads_entropies=reads_entropies)
        score(models, batch, AlgorithmConfig(), recorder)
    return batch.local.entropies is not None


@pytest.mark.parametrize("reads_entropies", [False, True])
def test_values_that_read_entropies_have_them_before_the_update(
    model_dir: Path, reads_entropies: bool
) -> None:
    (scored,) = run_ranks(1, scored_in_one_update, model_dir, reads_entropies)
    assert scored is reads_entropies


def skipped_pass(
    model_dir: Path, layout: LayoutConfig, within: float | None, apart: float, temperature: float
) -> Any:
    """Score and two policy updates on responses whose engine is so far from the trainer; the row
    and the weights."""
    config = AlgorithmConfig.model_validate(
        {"update": {"minibatch_size": 3, "rollout_logprobs_within": within}}
    )
    actor = make_trainable(
        model_dir, "lm", layout=layout, max_tokens_per_microbatch=40, temperature=temperature
    )
    whole = make_batch()
    whole.rollout_logprobs = actor.score(whole, temperature=1.0)[:, 0] + apart
    batch = spread(whole)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        score(Models(actor), batch, config, recorder)
        own = batch.local
        assert own.old_logprobs is not None
        from_engine = bool(torch.equal(own.old_logprobs, own.rollout_logprobs))
        batch.fill(selected=torch.ones(batch.samples, dtype=torch.bool))
        advantages = torch.randn(batch.response_tokens, generator=torch.Generator().manual_seed(3))
        bounds = offsets(batch.table.response_lengths)
        own.advantages = advantages[
            bounds[batch.local_slice.start] : bounds[batch.local_slice.stop]
        ]
        update_policy(Models(actor), batch, config, "1/1", recorder)
        row = recorder.write(1)
    return row, from_engine, float(actor.score(make_batch()).double().square().sum())


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(1, LayoutConfig(), marks=pytest.mark.full),
        (2, LayoutConfig()),
        pytest.param(2, LayoutConfig(tp=2), marks=pytest.mark.full),
    ],
)
def test_log_probs_of_engines_that_agree_spare_the_pass(
    model_dir: Path, world_size: int, layout: LayoutConfig
) -> None:
    scored = run_ranks(world_size, skipped_pass, model_dir, layout, None, 0.0, 1.0)
    spared = run_ranks(world_size, skipped_pass, model_dir, layout, 1e-4, 0.0, 1.0)
    for (row, from_engine, total), (expected, _, expected_total) in zip(
        spared, scored, strict=True
    ):
        assert (
            from_engine
            and row["actor/rollout_logprobs_used"] == 1
            and "actor/rollout_logprobs_used" not in expected
        )
        assert total == pytest.approx(expected_total, rel=1e-6), "the same updates"
        for name in ("actor/policy_loss", "actor/grad_norm", "actor/approx_kl", "actor/ratio_mean"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert row["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=0.2), (
            "of a part of the responses"
        )


@pytest.mark.parametrize(("apart", "temperature"), [(2e-4, 1.0), (0.0, 0.7), (float("nan"), 1.0)])
def test_engines_that_are_too_far_are_not_believed(
    model_dir: Path, apart: float, temperature: float
) -> None:
    """Off by twice the bound; of another temperature than the trainer's; no numbers at all."""
    ((row, from_engine, total),) = run_ranks(
        1, skipped_pass, model_dir, LayoutConfig(), 1e-4, apart, temperature
    )
    ((_, _, expected),) = run_ranks(
        1, skipped_pass, model_dir, LayoutConfig(), None, apart, temperature
    )
    assert not from_engine and row["actor/rollout_logprobs_used"] == 0 and total == expected


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ({"importance_sampling": {"kind": "tis"}}, "importance_sampling.kind=tis"),
        ({"advantage": {"off_policy": "vtrace"}}, "advantage.off_policy=vtrace"),
        ({"metrics_function": FUNCTION}, "metrics_function="),
    ],
)
def test_readers_of_trainer_log_probs_are_refused_beside_engines(
    algorithm: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"rollout_logprobs_within=0.001 with {named}"):
        AlgorithmConfig.model_validate({**algorithm, "update": {"rollout_logprobs_within": 1e-3}})

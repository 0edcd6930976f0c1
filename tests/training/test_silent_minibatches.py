"""A mini-batch that teaches a model nothing makes no optimizer step, on any rank: weights, moments
and schedule end as if it had not been there, and it is counted."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch, spread
from hf_models import write_model
from ranks import run_ranks
from trainables import make_trainable, weights_digest

from vapo_megatron.algorithms.gae import monte_carlo_returns
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.optimizer import optimizer_tensors
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training import updates
from vapo_megatron.training.models import Models
from vapo_megatron.training.shards import ShardedBatch

# What is done to the last of three mini-batches; the switches beside; the model; steps it makes,
# and what is counted.
GAE = {"advantage": {"estimator": "gae"}}
CASES: dict[str, tuple[str, dict[str, Any], str, int, dict[str, float]]] = {
    "nothing": ("none", {}, "actor", 3, {}),
    "policy, masked": ("masked", {}, "actor", 2, {"skipped_updates/empty": 1}),
    "policy, no advantage": ("level", {}, "actor", 2, {"skipped_updates/no_signal": 1}),
    "policy, old windows": ("old", {}, "actor", 2, {"skipped_updates/no_signal": 1}),
    "policy, none to imitate": (
        "level",
        {"policy_loss": {"positive_nll": {"coef": 0.1}}},
        "actor",
        2,
        {"skipped_updates/no_signal": 1},
    ),
    "policy, with entropy": ("level", {"policy_loss": {"entropy_coef": 0.01}}, "actor", 3, {}),
    "critic, masked": ("masked", GAE, "critic", 2, {"skipped_updates/empty": 1}),
    "critic, unfinished": (
        "cut",
        GAE | {"shaping": {"truncated": "window"}},
        "critic",
        2,
        {"skipped_updates/unfinished": 1},
    ),
    "critic, level": ("level", GAE, "critic", 3, {}),
}
MINIBATCHES = updates.minibatches


def rollout(change: str, samples: list[int]) -> ExperienceBatch:
    """Six responses, scored and judged, of which some are changed."""
    batch = make_batch()
    generator = torch.Generator().manual_seed(3)
    batch.old_logprobs = batch.rollout_logprobs.clone()
    batch.values, batch.advantages = (
        torch.randn(batch.response_tokens, generator=generator) for _ in range(2)
    )
    batch.returns = monte_carlo_returns(batch.rewards, batch.response_cu_seqlens, 1.0, None)
    batch.selected = torch.ones(batch.samples, dtype=torch.bool)
    batch.shaped_rewards = batch.rewards
    for sample in samples:
        tokens = slice(*batch.response_cu_seqlens[sample : sample + 2].tolist())
        if change == "masked":
            batch.selected[sample] = False
        elif change == "level":
            batch.advantages[tokens], batch.correct[sample] = 0, False
        elif change == "cut":
            batch.truncated[sample] = True
        elif change == "far":
            batch.old_logprobs[tokens] += 5
        elif change == "old":  # there are advantages, but not of tokens that are new
            starts = (
                batch.response_lengths - 1 if batch.window_starts is None else batch.window_starts
            )
            batch.advantages[tokens.stop - 1] = 0
            batch.window_starts = starts
    return batch


def last_minibatch(config: AlgorithmConfig, salt: int) -> list[int]:
    return list(MINIBATCHES(spread(make_batch()), config.update, 1, "1/1", salt))[-1]


def without_last(*args: Any, **named: Any) -> Iterator[list[int]]:
    yield from list(MINIBATCHES(*args, **named))[:-1]


def one(
    model_dir: Path, layout: dict[str, Any], case: str, leave_out: bool
) -> tuple[str, float, dict[str, float]]:
    """A digest of weights, moments and schedule after an update; steps made and what was
    counted."""
    change, switches, name, _, _ = CASES[case]
    tree = {"advantage": {"estimator": "grpo"}, "update": {"minibatch_size": 2}} | switches
    tree.setdefault("policy_loss", {"positive_nll": {"coef": 0.0}})
    config = AlgorithmConfig.model_validate(tree)
    batch: ShardedBatch = spread(
        rollout(change, last_minibatch(config, 1 if name == "critic" else 2))
    )
    optimizer = {"weight_decay": 0.1}
    actor = make_trainable(model_dir, "lm", layout=layout, optimizer=optimizer)
    critic = (
        make_trainable(model_dir, "value", layout=layout, optimizer=optimizer)
        if name == "critic"
        else None
    )
    models = Models(actor, critic)
    updates.minibatches = without_last if leave_out else MINIBATCHES
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        (updates.update_critic if critic else updates.update_policy)(
            models, batch, config, "1/1", recorder
        )
        row = recorder.write(1)
    model = critic or actor
    digest = hashlib.sha256(weights_digest(model).encode())
    for tensor in optimizer_tensors(model.optimizer):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    counted = models.updates.metrics()
    assert counted.pop("skipped_updates/total") == sum(counted.values())
    return f"{digest.hexdigest()} {model.updates}", row[f"{name}/updates"], counted


def with_and_without(model_dir: Path, layout: dict[str, Any], cases: list[str]) -> Any:
    return {
        case: [one(model_dir, layout, case, leave_out) for leave_out in (False, True)]
        for case in cases
    }


SOME = ["policy, masked", "policy, no advantage", "critic, unfinished"]


@pytest.mark.parametrize(
    ("count", "layout", "cases"),
    [
        (1, {}, list(CASES)),
        (2, {}, [*SOME, "nothing"]),
        pytest.param(2, {"tp": 2}, SOME, marks=pytest.mark.full),
    ],
)
def test_a_minibatch_that_teaches_nothing_makes_no_step(
    tmp_path: Path, count: int, layout: dict[str, Any], cases: list[str]
) -> None:
    model_dir = write_model(tmp_path, "qwen3", num_hidden_layers=1)
    for found in run_ranks(count, with_and_without, model_dir, layout, cases):
        for case in cases:
            (_, _, name, steps, skipped), ((digest, made, counted), (expected, _, _)) = (
                CASES[case],
                found[case],
            )
            assert (made, counted) == (steps, skipped), case
            assert (digest == expected) is (steps == 2), (
                f"{case}: the {name} differs from the one without the mini-batch"
            )

"""Samples on several ranks: each is at home on one, a model's rank gets those that it computes,
results return to their owners, and no number of ranks changes advantages, denominators or
metrics."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import spread, whole_of, with_observation
from ranks import run_ranks

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.balance import Cost, plan_microbatches
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.megatron.mesh import make_mesh
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.shards import ShardedBatch, partition_by_tokens
from vapo_megatron.training.updates import correct_for_rollout

GROUPS = 7
SIZE = 4


def rollout() -> ExperienceBatch:
    """Seven groups of four, of up to 500 tokens, longer ones last, scored; one response in five cut
    off."""
    random = np.random.default_rng(1)
    samples = []
    for group in range(GROUPS):
        prompt = Prompt(str(group), "", "", tuple(random.integers(0, 99, 1 + group).tolist()))
        for index in range(SIZE):
            n = int(random.integers(1, 20 + 80 * group))
            right = bool(random.random() < 0.5)
            sample = Sample(
                prompt,
                group,
                index,
                0,
                random.integers(0, 99, n, dtype=np.int32),
                None,
                "stop",
                0,
                0,
            )  # type: ignore[arg-type]
            sample.rollout_logprobs = -random.random(n, dtype=np.float32)
            sample.finish_reason = "length" if random.random() < 0.2 else "stop"
            sample.reward = 1.0 if right else -1.0
            sample.correct = right
            samples.append(
                with_observation(sample, n // 2, index) if index and group % 2 else sample
            )
    batch = from_samples(samples)
    generator = torch.Generator().manual_seed(2)

    def noise() -> torch.Tensor:
        return torch.randn(batch.response_tokens, generator=generator)

    batch.old_logprobs = batch.rollout_logprobs + 0.1 * noise()
    batch.ref_logprobs = batch.rollout_logprobs - 0.1
    batch.entropies = noise().abs()
    batch.values = 0.3 * noise()
    return batch


class Planner:
    """What ShardedBatch.part asks of a model."""

    name = "actor"
    replays = False
    shares_prompts = False

    def __init__(self, layout: LayoutConfig) -> None:
        self.mesh = make_mesh(layout)

    def plan(
        self,
        lengths: torch.Tensor,
        samples: Any,
        segments: torch.Tensor | None = None,
        shared: None = None,
    ) -> Any:
        cost = Cost(1.0, 0.01)
        return plan_microbatches(
            samples, lengths.numpy(), dp_size=self.mesh.dp_size, max_tokens=600, cost=cost
        )


def passes(layout: LayoutConfig) -> Any:
    """On every rank: errors of what comes to it and goes home, for all samples and for some; which
    it computed."""
    whole = rollout()
    model = Planner(layout)
    wrong = []
    batch = spread(rollout())
    assert all(
        torch.equal(t, whole.tensors()[name]) for name, t in whole_of(batch).tensors().items()
    )
    computed = []
    for samples in (range(whole.samples), [3, 4, 9, 17, 20, 27], [20, 3, 9, 27]):
        part = batch.model_input(model, samples, "values", "old_logprobs", ("advantages"))  # type: ignore[arg-type]
        mine = [samples[place] for place in part.local_indices.tolist()]
        computed.append(mine)
        expected = whole.select(mine)
        for name in (
            "tokens",
            "loss_mask",
            "rollout_logprobs",
            "values",
            "old_logprobs",
            "rewards",
            "cu_seqlens",
            "group_ids",
        ):
            wrong += [name] * (
                not torch.equal(part.batch.tensors()[name], expected.tensors()[name])
            )
        assert part.batch.advantages is None and part.batch.entropies is None
        assert part.share.of == len(samples) and list(part.share) == list(range(len(mine)))
        reports = model.mesh.is_output_rank and model.mesh.cp_rank == 0
        outputs = torch.stack((part.batch.values, part.batch.old_logprobs), 1)  # type: ignore[arg-type]
        home = batch.return_to_owner(part, outputs if reports else torch.full_like(outputs, 99.0))
        owned = batch.owned_samples(part)
        wrong += [("home")] * (not torch.equal(home[:, 0], owned.values))  # type: ignore[arg-type]
    first = batch.gather_on_rank0(5, "values")["values"]
    expected = whole.select(range(5 if dist.get_rank() == 0 else 0))
    wrong += ["first"] * (not torch.equal(first, expected.values))  # type: ignore[arg-type]
    mesh = model.mesh
    assert mesh.dp_rank_of(dist.get_rank()) == mesh.dp_rank
    assert (mesh.reporter(mesh.dp_rank) == dist.get_rank()) == (
        mesh.is_output_rank and mesh.cp_rank == 0
    )
    return wrong, mesh.dp_rank, computed


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, LayoutConfig()),
        (3, LayoutConfig()),
        pytest.param(4, LayoutConfig(pp=2), marks=pytest.mark.full),
        pytest.param(4, LayoutConfig(tp=2), marks=pytest.mark.full),
    ],
)
def test_each_rank_gets_what_it_computes_and_it_comes_home(
    ranks: int, layout: LayoutConfig
) -> None:
    by_dp: dict[int, Any] = {}
    for wrong, dp_rank, computed in run_ranks(ranks, passes, layout):
        assert not wrong
        assert by_dp.setdefault(dp_rank, computed) == computed
    for number, samples in enumerate((range(GROUPS * SIZE), [3, 4, 9, 17, 20, 27], [3, 9, 20, 27])):
        assert sorted(s for computed in by_dp.values() for s in computed[number]) == list(samples)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "vapo": {"advantage": {"length_adaptive_alpha": 0.3}},
    "calibrated": {"advantage": {"calibration": "trust", "length_adaptive_floor": 0.5}},
    "calibrated_masked": {"advantage": {"calibration": "values"}, "shaping": {"truncated": "mask"}},
    "tethered": {"advantage": {"calibration": "tether", "length_adaptive_floor": 0.5}},
    "tracked": {"advantage": {"estimator": "batch_baseline", "tracker": True}},
    "masked": {"shaping": {"truncated": "mask"}},
    "window": {"shaping": {"truncated": "window"}, "advantage": {"length_adaptive_alpha": 0.3}},
    "kl": {
        "kl": {"placement": "reward", "coef": 0.1},
        "advantage": {"whiten": "full", "gamma": 0.97},
    },
    "vtrace": {"advantage": {"off_policy": "vtrace", "whiten": "full"}},
    "reinforce_pp": {"advantage": {"estimator": "reinforce_pp", "whiten": "full"}},
    "grpo": {
        "advantage": {"estimator": "grpo"},
        "shaping": {"soft_overlong": {"max_length": 9, "cache_length": 5}},
    },
    "function": {
        "advantage": {"function": "examples.custom_functions.functions:reward_times_surprise"}
    },
    "filter": {"filter_function": "examples.custom_functions.functions:finished_and_not_too_short"},
}


def estimates(names: list[str]) -> Any:
    """On every rank: advantages, targets, weights and the row of each algorithm, joined over
    ranks."""
    found = {}
    for name in names:
        config = AlgorithmConfig.model_validate(ALGORITHMS[name])
        whole = rollout()
        whole.values = whole.values if config.uses_critic else None
        batch = spread(whole)
        with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
            history = ReturnHistory()
            # The step before
            if config.advantage.calibration != "none" or config.advantage.tracker:
                estimate_advantages(batch, config, recorder, history=history)
            estimate_advantages(batch, config, recorder, history=history)
            settings = config.importance_sampling.model_copy(update={"kind": "tis"})
            correct_for_rollout(batch, settings, recorder)
            row = recorder.write(1)
        row = {key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))}
        whole = whole_of(batch)
        tensors = {key: t.numpy() for key, t in whole.tensors().items()}
        found[name] = row, tensors
    return found


def check_estimates(run: Callable[..., list[Any]], many: Sequence[int]) -> None:
    """run: a function on so many ranks."""
    (one,) = run(1, estimates, list(ALGORITHMS))
    for ranks in many:
        for found in run(ranks, estimates, list(ALGORITHMS)):
            for name, (row, tensors) in one.items():
                assert found[name][0] == pytest.approx(row, rel=1e-6, abs=1e-9), (name, ranks)
                for key in ("advantages", "returns", "selected", "shaped_rewards"):
                    assert (key in tensors) == (key in found[name][1])
                    if key in tensors:
                        assert np.array_equal(found[name][1][key], tensors[key]), (name, ranks, key)


def test_no_number_of_ranks_changes_advantages_or_metrics() -> None:
    check_estimates(run_ranks, (2,))


def test_homes_hold_whole_groups_and_about_as_many_tokens_each() -> None:
    table = rollout().table()
    for ranks in (1, 2, 3, 5, 20):
        homes = partition_by_tokens(table, ranks).tolist()
        assert (
            homes[0] == 0
            and homes[-1] == table.samples
            and len(homes) == ranks + 1
            and homes == sorted(homes)
        )
        assert all(home % SIZE == 0 for home in homes)
        tokens = [int(table.lengths[a:b].sum()) for a, b in pairwise(homes)]
        of_group = [int(table.lengths[i : i + SIZE].sum()) for i in range(0, table.samples, SIZE)]
        assert max(tokens) <= sum(tokens) / ranks + max(of_group)


def test_what_goes_by_samples_is_in_the_table() -> None:
    by_samples = {f.name for f in fields(ExperienceBatch) if f.metadata["over"] == "samples"}
    assert by_samples | {"response_lengths"} == {f.name for f in fields(rollout().table())}
    batch = rollout()
    assert isinstance(spread(replace(batch)), ShardedBatch)

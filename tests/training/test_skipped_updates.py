"""An update that would harm a model is skipped on all ranks, without a trace; a healthy one is the
same to the bit."""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attempts import End, World, config_of, live, make_world, metrics
from batches import make_batch
from hf_models import write_model
from matrices import others_in_full
from ranks import run_ranks
from trainables import make_trainable, policy_loss, weights_digest

from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.megatron import trainable as trainable_module
from vapo_megatron.megatron.optimizer import optimizer_tensors
from vapo_megatron.training import skipped_updates, updates
from vapo_megatron.training.skipped_updates import SkippedUpdates

NAN = float("nan")
INF = float("inf")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


class PlainStep:
    """Megatron's own step, unguarded."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, accepts: Callable[[float], bool]) -> tuple[float, bool]:
        accepts(0.0)
        _, norm, _ = self._optimizer.step()
        return float(norm), True


def train(
    model_dir: Path,
    section: dict[str, Any],
    planted_at: int | None,
    value: float,
    guarded: bool,
    judged: bool,
) -> tuple[list[bool], str]:
    """Which of four updates were made, and a digest of weights, moments and schedule. planted_at:
    the update whose loss has `value` in one token of one sample, which one data-parallel rank
    holds. Left out where it is negative."""
    if not guarded:
        trainable_module.GuardedStep = PlainStep  # type: ignore[assignment,misc]
    model = make_trainable(model_dir, "lm", **section)
    batch = make_batch()
    judge = SkippedUpdates()
    if judged:
        model.accepts = judge.accepts
    made = []
    for number in range(4):
        if planted_at is not None and number == -planted_at:
            continue
        loss = policy_loss(batch, batch.rollout_logprobs)
        loss.advantages[:] = torch.randn(
            len(loss.advantages), generator=torch.Generator().manual_seed(number)
        )
        if number == planted_at:
            loss.advantages[3] = value
        made.append(model.train_step(batch, range(batch.samples), loss).updated)
    digest = hashlib.sha256(weights_digest(model).encode())
    for tensor in optimizer_tensors(model.optimizer):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(str((model.scheduler.num_steps, model.optimizer.param_groups[0]["lr"])).encode())
    return made, digest.hexdigest()


SECTIONS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"layout": {"tp": 1}}),
    (2, {"layout": {"tp": 2}}),
    (2, {"layout": {"tp": 1}, "optimizer": {"clip_grad": 0.0}}),
]
IN_TEST = [(SECTIONS[1], INF), (SECTIONS[2], NAN), (SECTIONS[3], NAN)]


@pytest.mark.parametrize(
    ("section_of_ranks", "value"), others_in_full(product(SECTIONS, (NAN, INF)), IN_TEST)
)
def test_a_skipped_update_leaves_no_trace(
    model_dir: Path, section_of_ranks: tuple[int, dict[str, Any]], value: float
) -> None:
    count, section = section_of_ranks
    skipped = run_ranks(count, train, model_dir, section, 2, value, True, True)
    without = run_ranks(count, train, model_dir, section, -2, value, True, True)
    assert [made for made, _ in skipped] == [[True, True, False, True]] * count
    assert [digest for _, digest in skipped] == [digest for _, digest in without]


def test_without_a_judge_it_ruins_the_weights(model_dir: Path) -> None:
    """The reason for the test above."""
    (made, digest), *_ = run_ranks(1, train, model_dir, {}, 2, NAN, True, False)
    assert made == [True] * 4
    assert digest != run_ranks(1, train, model_dir, {}, -2, NAN, True, True)[0][1]


@pytest.mark.parametrize(
    ("count", "section"), others_in_full(SECTIONS[:3], [SECTIONS[1], SECTIONS[2]])
)
def test_healthy_updates_are_those_of_megatrons_own_step(
    model_dir: Path, count: int, section: dict[str, Any]
) -> None:
    guarded = run_ranks(count, train, model_dir, section, None, 0.0, True, True)
    assert guarded == run_ranks(count, train, model_dir, section, None, 0.0, False, False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, engine_of_runs: EngineAddress) -> World:
    return make_world(tmp_path_factory.mktemp("skipped"), engine_of_runs)


def plant(calls: tuple[int, ...], victim: int) -> None:
    """NaN in the advantages of the policy's mini-batches with these numbers, on one rank alone."""
    original = updates.policy_loss
    count = 0

    def planted(*args: Any) -> Any:
        nonlocal count
        count += 1
        loss = original(*args)
        if count in calls and dist.get_rank() == victim:
            loss.advantages[:] = math.nan
        return loss

    updates.policy_loss = planted
    skipped_updates.MOST_IN_A_ROW = 2


OVERRIDES = ("run.resume=auto",)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.full
def test_a_run_skips_an_update_and_goes_on(shared: World, count: int) -> None:
    config = config_of(shared, f"one_skipped{count}", {}, *OVERRIDES)
    assert live(shared, config, count, partial(plant, (2,), count - 1)) == End(0, "")
    rows = {row["step"]: row for row in metrics(Path(config.run.directory)) if row["step"]}
    assert [rows[step]["skipped_updates/total"] for step in (1, 2, 3)] == [1, 0, 0]
    assert rows[1]["skipped_updates/nonfinite_loss"] == rows[1]["alarm/skipped_updates"] == 1
    assert [rows[step]["actor/updates"] for step in (1, 2, 3)] == [1, 2, 2]
    assert all(math.isfinite(row["actor/policy_loss"]) for row in rows.values())


@pytest.mark.full
def test_run_with_updates_skipped_in_a_row_ends_and_can_resume(shared: World) -> None:
    config = config_of(shared, "ends", {}, *OVERRIDES)
    run_dir = Path(config.run.directory)
    end = live(shared, config, 2, partial(plant, (3, 4), 1))  # both of step 2
    assert (
        end.code == 1
        and "2 skipped updates in a row at step 2" in end.said
        and "\n" not in end.said
    )
    assert live(shared, config, 2) == End(0, "")
    assert [row["step"] for row in metrics(run_dir) if row["step"]] == [1, 2, 3]

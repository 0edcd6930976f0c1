"""An update that would harm a model is skipped on all ranks, without a trace; a healthy one is the same to the bit."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attempts import End, World, config_of, live, metrics, world
from batches import make_batch, spread
from hf_models import write_model
from ranks import run_ranks
from trainables import make_trainable, policy_loss, weights_digest

from vapo_megatron.checkpoint.checkpoints import list_checkpoints
from vapo_megatron.config.robustness import SickUpdatesConfig
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.mcore import trainable as trainable_module
from vapo_megatron.mcore.optimizer import optimizer_tensors
from vapo_megatron.training import updates
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.sick_updates import RECORD_FILE, UNFINISHED, SickUpdates, first_prompt

NAN, INF = float("nan"), float("inf")


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
    model_dir: Path, section: dict[str, Any], sick_at: int | None, value: float, guarded: bool, judged: bool
) -> tuple[list[bool], str]:
    """Which of four updates were made, and a digest of weights, moments and schedule. sick_at: the update whose loss
    has `value` in one token of one sample, which one data-parallel rank holds. Left out where it is negative."""
    if not guarded:
        trainable_module.GuardedStep = PlainStep  # type: ignore[assignment,misc]
    model, batch = make_trainable(model_dir, "lm", **section), make_batch()
    judge = SickUpdates(SickUpdatesConfig())
    if judged:
        model.accepts = judge.accepts
    made = []
    for number in range(4):
        if sick_at is not None and number == -sick_at:
            continue
        loss = policy_loss(batch, batch.rollout_logprobs)
        loss.advantages[:] = torch.randn(len(loss.advantages), generator=torch.Generator().manual_seed(number))
        if number == sick_at:
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
    (2, {"layout": {"tp": 1}, "optimizer": {"distributed": False, "clip_grad": 0.0}}),
]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(("count", "section"), SECTIONS)
def test_a_sick_update_leaves_no_trace(model_dir: Path, count: int, section: dict[str, Any], value: float) -> None:
    sick = run_ranks(count, train, model_dir, section, 2, value, True, True)
    without = run_ranks(count, train, model_dir, section, -2, value, True, True)
    assert [made for made, _ in sick] == [[True, True, False, True]] * count
    assert [digest for _, digest in sick] == [digest for _, digest in without]


def test_without_a_judge_it_ruins_the_weights(model_dir: Path) -> None:
    """What the test above is there for."""
    (made, digest), *_ = run_ranks(1, train, model_dir, {}, 2, NAN, True, False)
    assert made == [True] * 4
    assert digest != run_ranks(1, train, model_dir, {}, -2, NAN, True, True)[0][1]


@pytest.mark.parametrize(("count", "section"), SECTIONS[:3])
def test_healthy_updates_are_those_of_megatrons_own_step(model_dir: Path, count: int, section: dict[str, Any]) -> None:
    guarded = run_ranks(count, train, model_dir, section, None, 0.0, True, True)
    assert guarded == run_ranks(count, train, model_dir, section, None, 0.0, False, False)


def judged(config: SickUpdatesConfig, rows: list[tuple[float, float]], state: dict[str, Any] | None = None) -> Any:
    judge = SickUpdates(config, state)
    return [judge.accepts("actor", norm, {"policy_loss": loss, "ratio_max": INF}) for norm, loss in rows], judge.state()


def spikes() -> tuple[Any, Any, Any]:
    config = SickUpdatesConfig(grad_norm_spike=10, loss_spike=10, fewest=4, window=8)
    rows = [
        (1.0, 0.1),
        (0.0, 0.0),
        (1.2, -0.1),
        (0.8, 0.1),
        (1.1, 0.1),
        (11.0, 0.1),
        (9.0, 0.1),
        (1.0, -2.0),
        (1.0, 0.1),
    ]
    # Not one of them is a number: the loss alone, the gradient alone, and the first cause counts.
    assert judged(SickUpdatesConfig(), [(1.0, NAN), (INF, 0.1), (NAN, INF)])[0] == [False] * 3
    whole, _ = judged(config, rows)
    first, state = judged(config, rows[:5])
    rest, _ = judged(config, rows[5:], json.loads(json.dumps(state)))
    return whole, first + rest, judged(SickUpdatesConfig(), rows)[0]


def test_spikes_are_told_by_the_runs_own_history_which_a_resumed_run_has() -> None:
    whole, resumed, default = run_ranks(1, spikes)[0]
    assert whole == [True] * 5 + [False, True, False, True]
    assert resumed == whole and default == [True] * 9


def batch_with(field: str, value: float) -> ShardedBatch:
    batch = make_batch()
    for name in ("old_logprobs", "values", "advantages"):
        setattr(batch, name, torch.zeros(batch.response_tokens))
    batch.selected = torch.ones(batch.samples, dtype=torch.bool)
    getattr(batch, field)[1] = value
    return spread(batch)


@pytest.mark.parametrize(
    ("field", "cause"),
    [
        ("rewards", "nonfinite_reward"),
        ("rollout_logprobs", "nonfinite_logprobs"),
        ("old_logprobs", "nonfinite_logprobs"),
        ("values", "nonfinite_values"),
    ],
)
def test_a_rollout_that_is_not_finite_is_not_trained_on(field: str, cause: str) -> None:
    judge = SickUpdates(SickUpdatesConfig(most_in_a_row=2))
    assert judge.is_sound(batch_with(field, 0.0)) and judge.metrics() == {"sick/skipped_updates": 0.0}
    assert not judge.is_sound(batch_with(field, NAN)) and not judge.exhausted
    assert not judge.is_sound(batch_with(field, -INF)) and judge.exhausted
    assert judge.metrics() == {"sick/skipped_updates": 2.0, f"sick/{cause}": 2.0}
    assert judge.is_sound(batch_with(field, 0.0)) and not judge.exhausted


def test_greedy_rewards_that_are_not_finite_are_told() -> None:
    judge, batch = SickUpdates(SickUpdatesConfig()), batch_with("rewards", 0.0)
    batch.fill(greedy_rewards=torch.full((batch.samples,), NAN))
    assert not judge.is_sound(batch) and judge.metrics()["sick/nonfinite_reward"] == 1


def test_no_signal_and_nothing_selected_are_skipped_and_do_no_harm() -> None:
    judge, some, none = SickUpdates(SickUpdatesConfig(most_in_a_row=1)), torch.tensor([True, False]), torch.zeros(2)
    assert judge.has_signal(some, some)
    assert not judge.has_signal(some, none)
    unsaid = SickUpdates(SickUpdatesConfig(without_signal=False))
    assert unsaid.has_signal(some, none) and not unsaid.has_signal(some, none, UNFINISHED)
    assert not judge.has_signal(none, none)
    assert judge.metrics() == {"sick/skipped_updates": 2.0, "sick/empty": 1.0, "sick/no_signal": 1.0}
    assert not judge.exhausted


def test_it_goes_back_to_a_checkpoint_a_bounded_number_of_times(tmp_path: Path) -> None:
    judge = SickUpdates(SickUpdatesConfig(most_in_a_row=1, restarts=2))
    with pytest.raises(RunFailed, match="no checkpoint to go back to"):
        judge.go_back(tmp_path, step=3, cursor=24)
    for name in ("step_000002", "step_000004"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        for cursor in (24, 40):
            with pytest.raises(TryAgain, match="with other prompts") as told:
                judge.go_back(tmp_path, step=5, cursor=cursor)
            assert told.value.exit_code == 75
            newest = list(list_checkpoints(tmp_path))[-1]
            assert first_prompt(tmp_path, newest, 16) == cursor and first_prompt(tmp_path, newest, 99) == 99
        with pytest.raises(RunFailed, match=f"as each of 3 times from .*{name}"):
            judge.go_back(tmp_path, step=5, cursor=56)
    assert first_prompt(tmp_path, next(iter(list_checkpoints(tmp_path))), 16) == 16


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("sick")) as found:
        yield found


def plant(calls: tuple[int, ...], victim: int) -> None:
    """NaN in the advantages of the policy's mini-batches with these numbers, on one rank alone."""
    original, count = updates.policy_loss, 0

    def planted(*args: Any) -> Any:
        nonlocal count
        count += 1
        loss = original(*args)
        if count in calls and dist.get_rank() == victim:
            loss.advantages[:] = math.nan
        return loss

    updates.policy_loss = planted


OVERRIDES = ("run.resume=auto", "robustness.updates.most_in_a_row=2", "robustness.updates.restarts=1")


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_skips_a_sick_update_and_goes_on(shared: World, count: int) -> None:
    config = config_of(shared, f"one_sick{count}", {}, *OVERRIDES)
    assert live(shared, config, count, partial(plant, (2,), count - 1)) == End(0, "")
    rows = {row["step"]: row for row in metrics(Path(config.run.directory)) if row["step"]}
    assert [rows[step]["sick/skipped_updates"] for step in (1, 2, 3)] == [1, 0, 0]
    assert rows[1]["sick/nonfinite_loss"] == rows[1]["alarm/skipped_updates"] == 1
    assert [rows[step]["actor/updates"] for step in (1, 2, 3)] == [1, 2, 2]
    assert all(math.isfinite(row["actor/policy_loss"]) for row in rows.values())


def test_a_run_goes_back_to_its_checkpoint_and_past_the_prompts(shared: World) -> None:
    config = config_of(shared, "goes_back", {}, *OVERRIDES)
    run_dir = Path(config.run.directory)
    end = live(shared, config, 2, partial(plant, (3, 4), 1))  # both of step 2
    assert end.code == 75 and "2 sick updates in a row at step 2" in end.said and "\n" not in end.said
    cursor = json.loads((run_dir / RECORD_FILE).read_text())["cursor"]
    assert cursor == 16, "two recorded rollouts and two steps, of four prompts each"
    assert live(shared, config, 2) == End(0, "")
    assert [row["step"] for row in metrics(run_dir) if row["step"]] == [1, 2, 3]
    samples = (run_dir / "samples" / "step_000002.jsonl").read_text().splitlines()
    assert len({json.loads(line)["prompt_id"] for line in samples}) == 4
    always = config_of(shared, "always_sick", {}, *OVERRIDES)
    sick = partial(plant, (3, 4), 0)
    assert live(shared, always, 1, sick).code == 75
    end = live(shared, always, 1, partial(plant, (1, 2), 0))
    assert end.code == 1 and "as each of 2 times from" in end.said

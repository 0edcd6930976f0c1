"""What the judge of updates refuses, by its numbers, and what a run that goes back leaves behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch, spread
from threads import on_threads

from vapo_megatron.checkpoint.checkpoints import list_checkpoints
from vapo_megatron.config.run import SkippedUpdatesConfig
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.training import skipped_updates
from vapo_megatron.training.shards import ShardedBatch, seat
from vapo_megatron.training.skipped_updates import CAUSES, RECORD_FILE, SkippedUpdates, first_prompt

NAN, INF = float("nan"), float("inf")


def judged(config: SkippedUpdatesConfig, rows: list[tuple[float, float]], state: dict[str, Any] | None = None) -> Any:
    judge = SkippedUpdates(config, state)
    return [judge.accepts("actor", norm, {"policy_loss": loss, "ratio_max": INF}) for norm, loss in rows], judge.state()


def remember(monkeypatch: pytest.MonkeyPatch, fewest: int, window: int = 50) -> None:
    """A short history, whose medians a test can say."""
    monkeypatch.setattr(skipped_updates, "_FEWEST", fewest)
    monkeypatch.setattr(skipped_updates, "_WINDOW", window)


def spikes() -> tuple[Any, Any, Any]:
    config = SkippedUpdatesConfig(grad_norm_spike=10)
    rows = [
        (1.0, 0.1),
        (0.0, 0.0),
        (1.2, -0.1),
        (0.8, 0.1),
        (1.1, 0.1),
        (11.0, 0.1),
        (9.0, 0.1),
        (99.0, -2.0),
        (1.0, 0.1),
    ]
    # Not one of them is a number: the loss alone, the gradient alone, and the first cause counts.
    assert judged(SkippedUpdatesConfig(), [(1.0, NAN), (INF, 0.1), (NAN, INF)])[0] == [False] * 3
    whole, _ = judged(config, rows)
    first, state = judged(config, rows[:5])
    rest, _ = judged(config, rows[5:], json.loads(json.dumps(state)))
    return whole, first + rest, judged(SkippedUpdatesConfig(), rows)[0]


def test_spikes_are_told_by_the_runs_own_history_which_a_resumed_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(monkeypatch, fewest=4, window=8)
    whole, resumed, default = on_threads(1, spikes)[0]
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
    judge = SkippedUpdates(SkippedUpdatesConfig(most_in_a_row=2))
    assert judge.is_sound(batch_with(field, 0.0)) and judge.metrics() == {"skipped_updates/total": 0.0}
    assert not judge.is_sound(batch_with(field, NAN)) and not judge.exhausted
    assert not judge.is_sound(batch_with(field, -INF)) and judge.exhausted
    assert judge.metrics() == {"skipped_updates/total": 2.0, f"skipped_updates/{cause}": 2.0}
    assert judge.is_sound(batch_with(field, 0.0)) and not judge.exhausted


def test_greedy_rewards_that_are_not_finite_are_told() -> None:
    judge, batch = SkippedUpdates(SkippedUpdatesConfig()), batch_with("rewards", 0.0)
    batch.fill(greedy_rewards=torch.full((batch.samples,), NAN))
    assert not judge.is_sound(batch) and judge.metrics()["skipped_updates/nonfinite_reward"] == 1


def test_no_signal_and_nothing_selected_are_skipped_and_do_no_harm() -> None:
    judge, some, none = (
        SkippedUpdates(SkippedUpdatesConfig(most_in_a_row=1)),
        torch.tensor([True, False]),
        torch.zeros(2),
    )
    assert judge.has_signal(some, some)
    assert not judge.has_signal(some, none)
    assert not judge.has_signal(none, none)
    assert not judge.has_signal(some, none)
    assert judge.metrics() == {
        "skipped_updates/total": 3.0,
        "skipped_updates/empty": 1.0,
        "skipped_updates/no_signal": 2.0,
    }
    assert not judge.exhausted


def test_it_goes_back_to_a_checkpoint_a_bounded_number_of_times(tmp_path: Path) -> None:
    judge = SkippedUpdates(SkippedUpdatesConfig(most_in_a_row=1))
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


def verdicts(judge: SkippedUpdates, rows: list[tuple[str, float, dict[str, float]]]) -> list[bool]:
    found: list[bool] = on_threads(1, lambda: [judge.accepts(*row) for row in rows])[0]
    return found


def norms(*sizes: float, model: str = "actor") -> list[tuple[str, float, dict[str, float]]]:
    return [(model, size, {}) for size in sizes]


def test_a_spike_is_beyond_the_factor_of_enough_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(monkeypatch, fewest=3, window=4)
    judge = SkippedUpdates(SkippedUpdatesConfig(grad_norm_spike=10))
    assert verdicts(judge, norms(1, 1, 99)) == [True] * 3, "two are too few to compare with"
    assert verdicts(judge, norms(10, 10.5)) == [True, True], "the median of 1, 1, 10, 99 is 5.5"
    assert judge.state()["norms"] == {"actor": [1, 99, 10, 10.5]}, "the last four"
    assert verdicts(judge, norms(102.6, 102.5)) == [False, True], "ten times 10.25 is not beyond it"
    assert judge.state()["norms"] == {"actor": [99, 10, 10.5, 102.5]}, "a spike is not usual"
    assert judge.metrics() == {"skipped_updates/total": 1, "skipped_updates/grad_norm_spike": 1}
    assert judge.metrics() == {"skipped_updates/total": 0}, "since the last call"


def test_updates_without_a_gradient_are_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(monkeypatch, fewest=3)
    judge = SkippedUpdates(SkippedUpdatesConfig(grad_norm_spike=10))
    assert verdicts(judge, norms(1, 0, 1, 11, 99)) == [True] * 4 + [False], "1, 1 and 11 are three"


def test_a_norm_is_compared_with_those_of_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(monkeypatch, fewest=2)
    judge = SkippedUpdates(SkippedUpdatesConfig(grad_norm_spike=2))
    assert verdicts(judge, [*norms(1.0, 1.0), *norms(50.0, 50.0, model="critic")]) == [True] * 4
    assert verdicts(judge, [*norms(2.1), *norms(2.1, model="critic")]) == [False, True]
    assert judge.state()["norms"] == {"actor": [1.0, 1.0], "critic": [50.0, 50.0, 2.1]}


@pytest.mark.parametrize(
    ("norm", "loss", "cause"),
    [
        (1.0, NAN, "nonfinite_loss"),
        (1.0, -INF, "nonfinite_loss"),
        (NAN, 1.0, "nonfinite_grad_norm"),
        (INF, INF, "nonfinite_loss"),
        (99.0, 1.0, "grad_norm_spike"),
    ],
)
def test_the_first_cause_counts(norm: float, loss: float, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(monkeypatch, fewest=2)
    judge = SkippedUpdates(SkippedUpdatesConfig(grad_norm_spike=10))
    row = ("actor", 1.0, {"policy_loss": 1.0})
    assert verdicts(judge, [row, row, ("actor", norm, {"policy_loss": loss})]) == [True, True, False]
    assert judge.metrics() == {"skipped_updates/total": 1, f"skipped_updates/{cause}": 1} and cause in CAUSES


def test_one_rank_that_refuses_is_enough() -> None:
    def judge() -> Any:
        mine = SkippedUpdates(SkippedUpdatesConfig())
        return mine.accepts("actor", NAN if seat()[0] == 1 else 1.0, {}), mine.metrics(), mine.state()

    refused = (
        False,
        {"skipped_updates/total": 1, "skipped_updates/nonfinite_grad_norm": 1},
        {"norms": {}, "in_row": {"actor": 1}},
    )
    assert on_threads(3, judge) == [refused] * 3


def test_updates_in_a_row_are_those_of_one_model_and_a_resumed_run_counts_on() -> None:
    judge = SkippedUpdates(SkippedUpdatesConfig(most_in_a_row=2))
    assert verdicts(judge, [*norms(NAN), *norms(NAN, model="critic"), *norms(1.0)]) == [False, False, True]
    assert not judge.exhausted and judge.state()["in_row"] == {"actor": 0, "critic": 1}
    again = SkippedUpdates(SkippedUpdatesConfig(most_in_a_row=2), json.loads(json.dumps(judge.state())))
    verdicts(again, norms(NAN))
    assert not again.exhausted
    verdicts(again, norms(NAN, model="critic"))
    assert again.exhausted
    for many in (3, None):
        patient = SkippedUpdates(SkippedUpdatesConfig(most_in_a_row=many))
        verdicts(patient, norms(NAN, NAN))
        assert not patient.exhausted


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rollout_is_unsound_on_every_rank_or_on_none(ranks: int) -> None:
    def sound(field: str | None) -> Any:
        batch = make_batch()
        for name in ("old_logprobs", "ref_logprobs", "values"):
            setattr(batch, name, torch.zeros(batch.response_tokens))
        if field is not None:
            getattr(batch, field)[-1] = INF
        judge = SkippedUpdates(SkippedUpdatesConfig())
        found = judge.is_sound(spread(batch))
        assert judge.state()["in_row"] == {"rollout": int(not found)}
        return found, {name for name, count in judge.metrics().items() if count}

    assert on_threads(ranks, sound, None) == [(True, set())] * ranks
    causes = {"rewards": "reward", "rollout_logprobs": "logprobs", "ref_logprobs": "logprobs", "values": "values"}
    for field, cause in causes.items():
        assert (
            on_threads(ranks, sound, field)
            == [(False, {"skipped_updates/total", f"skipped_updates/nonfinite_{cause}"})] * ranks
        )


def test_a_rollout_of_nothing_is_empty() -> None:
    batch: Any = type("Nothing", (), {})()
    none = make_batch()
    batch.own, batch.table, batch.response_tokens, batch.summed = none, none.table(), 0, lambda found: found
    judge = SkippedUpdates(SkippedUpdatesConfig())
    assert not judge.is_sound(batch) and judge.metrics() == {"skipped_updates/total": 1, "skipped_updates/empty": 1}
    batch.response_tokens = 1
    assert judge.is_sound(batch)


def test_what_a_run_that_goes_back_says_and_writes(tmp_path: Path) -> None:
    judge = SkippedUpdates(SkippedUpdatesConfig(most_in_a_row=3))
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    verdicts(judge, norms(NAN, model="critic"))
    said = f"{tmp_path}: 3 skipped updates in a row at step 5 (the last one: nonfinite_grad_norm of the critic)"
    with pytest.raises(TryAgain) as again:
        judge.go_back(tmp_path, step=5, cursor=24)
    assert str(again.value).startswith(f"{said}: start the same command again")
    record = json.loads((tmp_path / RECORD_FILE).read_text())
    cause = "nonfinite_grad_norm of the critic"
    assert record == {"checkpoint": "step_000002", "times": 1, "cursor": 24, "cause": cause}
    with pytest.raises(TryAgain):
        judge.go_back(tmp_path, step=5, cursor=24)
    with pytest.raises(RunFailed) as told:
        judge.go_back(tmp_path, step=5, cursor=24)
    assert str(told.value).startswith(f"{said}, as each of 3 times from ")
    assert json.loads((tmp_path / RECORD_FILE).read_text())["times"] == 2, "what fails leaves the record as it was"
    (tmp_path / RECORD_FILE).unlink()
    with pytest.raises(TryAgain, match=r"goes on from .* with the same data"):
        judge.go_back(tmp_path, step=5, cursor=None)  # fine-tuning: its order does not follow from a cursor
    assert json.loads((tmp_path / RECORD_FILE).read_text())["cursor"] == 0

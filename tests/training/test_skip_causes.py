"""What the judge of updates refuses, by its numbers, and when a run ends for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import make_batch, spread
from threads import on_threads

from vapo_megatron.errors import RunFailed
from vapo_megatron.training.exchange import rank_and_world
from vapo_megatron.training.shards import ShardedBatch
from vapo_megatron.training.skipped_updates import CAUSES, MOST_IN_A_ROW, SkippedUpdates

NAN = float("nan")
INF = float("inf")


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
    judge = SkippedUpdates()
    assert judge.is_sound(batch_with(field, 0.0)) and judge.metrics() == {
        "skipped_updates/total": 0.0
    }
    for _ in range(MOST_IN_A_ROW - 1):
        assert not judge.is_sound(batch_with(field, NAN)) and not judge.exhausted
    assert not judge.is_sound(batch_with(field, -INF)) and judge.exhausted
    assert judge.metrics() == {
        "skipped_updates/total": MOST_IN_A_ROW,
        f"skipped_updates/{cause}": MOST_IN_A_ROW,
    }
    assert judge.is_sound(batch_with(field, 0.0)) and not judge.exhausted


def test_greedy_rewards_that_are_not_finite_are_told() -> None:
    judge = SkippedUpdates()
    batch = batch_with("rewards", 0.0)
    batch.fill(greedy_rewards=torch.full((batch.samples,), NAN))
    assert not judge.is_sound(batch) and judge.metrics()["skipped_updates/nonfinite_reward"] == 1


def test_no_signal_and_nothing_selected_are_skipped_harmlessly() -> None:
    judge = SkippedUpdates()
    some = torch.tensor([True, False])
    none = torch.zeros(2)
    assert judge.has_signal(some, some)
    for _ in range(MOST_IN_A_ROW):
        assert not judge.has_signal(some, none)
        assert not judge.has_signal(none, none)
    assert not judge.has_signal(some, none)
    assert judge.metrics() == {
        "skipped_updates/total": 2 * MOST_IN_A_ROW + 1,
        "skipped_updates/empty": MOST_IN_A_ROW,
        "skipped_updates/no_signal": MOST_IN_A_ROW + 1,
    }
    assert not judge.exhausted


def verdicts(judge: SkippedUpdates, rows: list[tuple[str, float, dict[str, float]]]) -> list[bool]:
    found: list[bool] = on_threads(1, lambda: [judge.accepts(*row) for row in rows])[0]
    return found


def norms(*sizes: float, model: str = "actor") -> list[tuple[str, float, dict[str, float]]]:
    return [(model, size, {}) for size in sizes]


@pytest.mark.parametrize(
    ("norm", "loss", "cause"),
    [
        (1.0, NAN, "nonfinite_loss"),
        (1.0, -INF, "nonfinite_loss"),
        (NAN, 1.0, "nonfinite_grad_norm"),
        (INF, INF, "nonfinite_loss"),
    ],
)
def test_the_first_cause_counts(norm: float, loss: float, cause: str) -> None:
    judge = SkippedUpdates()
    row = ("actor", 1.0, {"policy_loss": 1.0})
    assert verdicts(judge, [row, row, ("actor", norm, {"policy_loss": loss})]) == [
        True,
        True,
        False,
    ]
    assert (
        judge.metrics() == {"skipped_updates/total": 1, f"skipped_updates/{cause}": 1}
        and cause in CAUSES
    )


def test_one_rank_that_refuses_is_enough() -> None:
    def judge() -> Any:
        mine = SkippedUpdates()
        return (
            mine.accepts("actor", NAN if rank_and_world()[0] == 1 else 1.0, {}),
            mine.metrics(),
            mine.state(),
        )

    refused = (
        False,
        {"skipped_updates/total": 1, "skipped_updates/nonfinite_grad_norm": 1},
        {"in_row": {"actor": 1}},
    )
    assert on_threads(3, judge) == [refused] * 3


def test_consecutive_skips_count_per_model_and_over_a_resume() -> None:
    judge = SkippedUpdates()
    almost = [NAN] * (MOST_IN_A_ROW - 1)
    rows = [*norms(*almost), *norms(*almost, model="critic"), *norms(1.0)]
    assert verdicts(judge, rows) == [*[False] * len(almost), *[False] * len(almost), True]
    assert not judge.exhausted and judge.state()["in_row"] == {"actor": 0, "critic": len(almost)}
    again = SkippedUpdates(json.loads(json.dumps(judge.state())))
    verdicts(again, norms(NAN))
    assert not again.exhausted
    verdicts(again, norms(NAN, model="critic"))
    assert again.exhausted


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rollout_is_unsound_on_every_rank_or_on_none(ranks: int) -> None:
    def sound(field: str | None) -> Any:
        batch = make_batch()
        for name in ("old_logprobs", "ref_logprobs", "values"):
            setattr(batch, name, torch.zeros(batch.response_tokens))
        if field is not None:
            getattr(batch, field)[-1] = INF
        judge = SkippedUpdates()
        found = judge.is_sound(spread(batch))
        assert judge.state()["in_row"] == {"rollout": int(not found)}
        return found, {name for name, count in judge.metrics().items() if count}

    assert on_threads(ranks, sound, None) == [(True, set())] * ranks
    causes = {
        "rewards": "reward",
        "rollout_logprobs": "logprobs",
        "ref_logprobs": "logprobs",
        "values": "values",
    }
    for field, cause in causes.items():
        assert (
            on_threads(ranks, sound, field)
            == [(False, {"skipped_updates/total", f"skipped_updates/nonfinite_{cause}"})] * ranks
        )


def test_a_rollout_of_nothing_is_empty() -> None:
    batch: Any = type("Nothing", (), {})()
    none = make_batch()
    batch.local = none
    batch.table = none.table()
    batch.response_tokens = 0
    batch.sum_over_ranks = lambda found: found
    judge = SkippedUpdates()
    assert not judge.is_sound(batch) and judge.metrics() == {
        "skipped_updates/total": 1,
        "skipped_updates/empty": 1,
    }
    batch.response_tokens = 1
    assert judge.is_sound(batch)


def test_a_run_whose_updates_are_skipped_again_and_again_ends(tmp_path: Path) -> None:
    judge = SkippedUpdates()
    verdicts(judge, norms(*[NAN] * MOST_IN_A_ROW, model="critic"))
    assert judge.exhausted
    with pytest.raises(RunFailed) as failed:
        judge.end(tmp_path, step=5)
    cause = (
        f"{MOST_IN_A_ROW} skipped updates in a row at step 5 (the last one: nonfinite_grad_norm of "
        f"the critic)"
    )
    assert str(failed.value).startswith(f"{tmp_path}: {cause}: docs/operations.md")
    assert failed.value.shared and failed.value.exit_code == 1

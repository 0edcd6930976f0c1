"""Value pretraining around a critic that only notes what it is asked for: which responses, when,
and what is said."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pretraining_attempts import PROMPT, Checkpoints, Kept, Stopped, Tokens, script
from switch_rollout import tokens_of
from test_shards_on_threads import Planner
from threads import on_threads
from torch import Tensor
from written_rollouts import CUT, END, RIGHT, write_rollouts

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import BatchConfig, CheckpointConfig, RunConfig
from vapo_megatron.config.value import ValuePretrainingConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import RunFailed
from vapo_megatron.megatron.token_loss import StepResult
from vapo_megatron.monitoring import names
from vapo_megatron.training import value_pretraining
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.training.state import RunState
from vapo_megatron.training.value_pretraining import pretrain_value, replay_order, split_prompts

SEED = 1  # of write_rollouts()
# Rollouts of four prompts, three responses each: 24, of which 21 replayed
TWO = {
    "iterations": 2,
    "minibatch_size": 5,
}
THREE_EPOCHS = TWO | {"replay_epochs": 3}


class Critic(Planner):
    """Says `head` of every state; its update number n has the loss 10 n and the gradient norm n."""

    name = "critic"

    def __init__(self, head: float, refuses: Sequence[int]) -> None:
        super().__init__(tp=1, replays=False)
        self.head = head
        self.refuses = refuses
        self.steps: list[list[Tokens]] = []
        self.measured: list[list[Tokens]] = []
        self.targets: list[Tensor] = []

    def score(self, batch: ExperienceBatch, read: Callable[[Tensor], Tensor], **_: Any) -> Tensor:
        self.measured.append([tokens_of(batch, s) for s in range(batch.samples)])
        return read(torch.full((batch.response_tokens, 1), self.head))[:, None]

    def train_step(self, batch: ExperienceBatch, share: Sequence[int], loss: Any) -> StepResult:
        assert list(share) == list(range(batch.samples))
        self.steps.append([tokens_of(batch, s) for s in share])
        self.targets.append(loss.targets)
        number = len(self.steps)
        return StepResult(
            float(number),
            number / 100,
            {"value_loss": 10.0 * number},
            updated=number not in self.refuses,
        )


def pretrain(
    run_dir: Path,
    settings: dict[str, Any],
    algorithm: dict[str, Any] | None = None,
    head: float = 0.0,
    refuses: Sequence[int] = (),
    stop_at: int | None = None,
) -> Any:
    """What critic, record, recorder, state and checkpoints have seen."""
    critic = Critic(head, refuses)
    rollouts = write_rollouts(script)
    checkpoints = Checkpoints(stop_at)
    config = ValuePretrainingConfig(**settings)
    whole = AlgorithmConfig.model_validate(algorithm or {})
    judge = SkippedUpdates()
    state = RunState(RunConfig(name=("run")), CheckpointConfig(), run_dir, checkpoints, judge)  # type: ignore[arg-type]
    phases: list[str] = []
    memory: Any = SimpleNamespace(enter=phases.append)
    sampled: list[int] = []
    with Kept(run_dir) as recorder, suppress(Stopped):
        recorder.samples = lambda step, samples, dropped: sampled.append(step)  # type: ignore[method-assign]
        size = BatchConfig(prompts_per_step=4, samples_per_prompt=3)
        pretrain_value(critic, memory, rollouts, config, whole, size, state, recorder, None)  # type: ignore[arg-type]
    asked = [request.prompt.cursor for request in rollouts.engines.requests]  # type: ignore[attr-defined]
    return SimpleNamespace(
        critic=critic,
        record=state.recorded,
        recorder=recorder,
        state=state,
        points=checkpoints.points,
        asked=asked,
        phases=phases,
        sampled=sampled,
        config=config,
    )


def run(*args: Any, **kwargs: Any) -> Any:
    return on_threads(1, lambda: pretrain(*args, **kwargs))[0]


def recorded(rollouts: int) -> list[Tokens]:
    return [(cursor, 7, *ids) for cursor in range(4 * rollouts) for ids in script(cursor)]


def reward(tokens: Tokens) -> float:
    """A response that was cut off is wrong."""
    return 1.0 if tokens[-2:] == (RIGHT, END) else -1.0


@pytest.mark.parametrize(
    ("settings", "rollouts", "sizes"),
    [
        (TWO, 2, [5, 5, 5, 5, 1]),
        (THREE_EPOCHS, 2, [5, 5, 5, 5, 1] * 3),
        ({"iterations": 4, "minibatch_size": 40}, 4, [40, 2]),
        ({"steps": 3, "minibatch_size": 5}, 2, [5, 5, 5]),
    ],
)
def test_what_is_replayed_and_measured(
    tmp_path: Path, settings: dict[str, Any], rollouts: int, sizes: list[int]
) -> None:
    seen = run(tmp_path, settings)
    written = recorded(rollouts)
    assert seen.asked == list(range(4 * rollouts)) and seen.phases == ["update_critic"]
    assert seen.sampled == [0] * rollouts, "the responses of no step"
    train, held_out = split_prompts(seen.record.prompt_ids, seen.record.table.group_ids, 4, SEED)
    expected = [[written[s] for s in step] for step in replay_order(train, seen.config, SEED)]
    assert seen.critic.steps == expected and [len(step) for step in expected] == sizes
    assert seen.critic.measured == [[written[s] for s in held_out]] * (len(sizes) + 1)
    for step, targets in zip(expected, seen.critic.targets, strict=True):
        assert targets.tolist() == [reward(t) for t in step for _ in t[PROMPT:]]


def test_each_row_counts_the_updates_since_the_previous_row(tmp_path: Path) -> None:
    with patch.object(value_pretraining, "_CHECKS", 2):
        seen = run(tmp_path, THREE_EPOCHS, refuses=[3, 15])
    rows = seen.recorder.rows
    assert list(rows) == [0, 7, 14, 15] and seen.recorder.replayed == [0, 35, 70, 75]
    assert (rows[7]["critic/value_loss"], rows[7]["critic/grad_norm"]) == pytest.approx(
        (250 / 6, 25 / 6)
    )
    assert rows[14]["critic/value_loss"] == 110 and rows[14]["critic/lr"] == pytest.approx(0.11)
    assert "critic/value_loss" not in rows[15], "the only one was refused"
    assert seen.recorder.progress["value_pretraining"] == (15, 15)


def test_every_check_but_the_last_is_a_safe_point(tmp_path: Path) -> None:
    recorded = [(1, 0, False, False), (2, 0, True, False)]
    every = [*recorded, *((2, number, False, False) for number in range(1, 6))]
    seen = run(tmp_path / "whole", TWO)
    assert seen.points == every and seen.state.pretraining.updates == 5
    stopped = run(tmp_path / "stopped", TWO, stop_at=4)
    assert (
        stopped.points == every[:4]
        and len(stopped.critic.steps) == 2
        and list(stopped.recorder.rows) == [0, 1, 2]
    )
    good = run(tmp_path / "good", TWO | {"stop_explained_variance": -9.0})
    assert (
        good.points == recorded
        and good.state.pretraining.updates == 1
        and list(good.recorder.rows) == [0, 1]
    )
    assert good.recorder.progress["value_pretraining"] == (5, 1)


@pytest.mark.parametrize(
    ("loo", "position", "said"), [(0.1, 0.4, "0.400"), (0.4, -0.1, "0.400"), (-1.0, -2.0, "0.000")]
)
def test_the_line_at_the_end(tmp_path: Path, loo: float, position: float, said: str) -> None:
    metrics = {
        names.EXPLAINED_VARIANCE: 0.25,
        names.BASELINE_LOO: loo,
        names.BASELINE_POSITION: position,
    }
    biases = dict(
        zip(
            (f"{names.VALUE_BIAS}{p}" for p in names.BIAS_POSITIONS),
            (0, 0.1, -0.3, 0.2, 0),
            strict=True,
        )
    )
    with patch.object(value_pretraining, "measure", lambda *_: metrics | biases):
        seen = run(tmp_path, TWO)
    assert seen.recorder.notes == [
        f"value pretraining: 5 updates, explained variance 0.250 (free baselines {said}), largest "
        "bias 0.300 on held-out responses"
    ]


def test_values_are_read_as_the_loss_says(tmp_path: Path) -> None:
    bounded = run(tmp_path / "bounded", TWO, {"value_loss": {"squash": "tanh"}}, head=99.0)
    assert bounded.recorder.rows[5]["critic/value_mean"] == pytest.approx(1)


def test_without_a_return_nothing_is_learnt_or_judged(tmp_path: Path) -> None:
    masked = {"shaping": {"truncated": "mask"}}
    seen = run(tmp_path / "one", {"iterations": 2, "minibatch_size": 1}, masked)
    assert len(seen.critic.steps) == 14, "of the 21 responses that are replayed a third was cut off"
    skipped = [row.get("skipped_updates/empty", 0) for row in seen.recorder.rows.values()]
    assert len(skipped) == 22 and sum(skipped) == 7, "each in the row of its time"
    cut = patch("test_pretraining_without_models.script", lambda cursor: [[10 + cursor, CUT]] * 3)
    with (
        cut,
        pytest.raises(
            RunFailed, match=r"none of the 3 held-out responses .*algorithm.shaping.truncated=mask"
        ),
    ):
        run(tmp_path / "none", TWO, masked)

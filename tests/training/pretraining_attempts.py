"""Value pretraining of a real critic on written responses, as the loop does it; stopped and gone on
with."""

import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from step_formulas import State
from switch_rollout import Watched, config_of, state_of, tokens_of
from written_rollouts import CUT, END, RIGHT, WRONG, write_rollouts

import vapo_megatron.training.loop
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.training.models import load_models
from vapo_megatron.training.state import RunState

P = "value_pretraining."
# Two rollouts of four prompts with three responses each: 24 responses, those to one prompt are held
# out.
BASE: dict[str, Any] = {P + "enabled": True, P + "iterations": 2, P + "minibatch_size": 5}
PROMPT = 2
Tokens = tuple[int, ...]


def script(cursor: int) -> Sequence[Sequence[int]]:
    """Responses of all lengths, no two alike; one of a group is cut off."""
    drawn = random.Random(cursor)
    body = [[drawn.randrange(10, 100) for _ in range(drawn.randrange(1, 16))] for _ in range(3)]
    ends = (END, END, CUT)
    return [[*ids, RIGHT if (cursor + i) % 2 else WRONG, ends[i]] for i, ids in enumerate(body)]


class Kept(Watched):
    """Keeps the critic's metrics by updates, and the responses that these were made on."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.rows: dict[int, dict[str, float]] = {}
        self.replayed: list[int] = []
        self.notes: list[str] = []
        self.console.note = self.notes.append  # type: ignore[method-assign]

    def write_pretraining(self, updates: int, samples: int) -> None:
        self.rows[updates] = dict(self._row)
        self.replayed.append(samples)
        super().write_pretraining(updates, samples)


class Stopped(Exception):
    """By the test, at a safe point."""


class Checkpoints:
    """Keeps how far each safe point is: rollouts, updates, whether it is due and the last."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at
        self.points = list[tuple[int, int, bool, bool]]()
        self.whole = None

    def safe_point(self, whole: Any, due: bool, last: bool, making_room: bool) -> None:
        done = whole.progress.pretraining
        assert not whole.progress.groups, "all is drawn again under a fixed policy"
        self.points.append((done.iterations, done.updates, due, done.finished))
        self.whole = whole
        if len(self.points) == self.stop_at:
            raise Stopped


@dataclass
class Seen:
    """Weights before and after, the responses of each optimizer step and of each measurement,
    metrics by updates."""

    begin: State
    end: State = field(default_factory=dict)
    steps: list[list[Tokens]] = field(default_factory=list)
    measured: list[list[Tokens]] = field(default_factory=list)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    finished: bool = False
    replayed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    points: list[tuple[int, int, bool, bool]] = field(default_factory=list)
    progress: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    onloaded: list[str] = field(default_factory=list)


def read_seen(path: Path) -> Any:
    """What another process has saved: a Seen, or the stops and a Seen."""
    with torch.serialization.safe_globals([Seen]):
        return torch.load(path, weights_only=True)


def pretrain(folder: Path, name: str, switches: dict[str, Any]) -> Seen:
    """On one rank: the loop up to its first iteration."""
    return attempt(folder, Path(tempfile.mkdtemp(prefix=name, dir=folder)), switches)[0]


def resumed(folder: Path, stop_at: int) -> tuple[Seen, Seen]:
    """Of a run that is stopped at a safe point, and of the one that resumes there."""
    run_dir = Path(tempfile.mkdtemp(prefix="resumed", dir=folder))
    first, whole = attempt(folder, run_dir, {}, stop_at)
    return first, attempt(folder, run_dir, {}, before=whole)[0]


def attempt(
    folder: Path,
    run_dir: Path,
    switches: dict[str, Any],
    stop_at: int | None = None,
    before: Any = None,
) -> tuple[Seen, Any]:
    """before: the last safe point of the attempt that this one resumes."""
    config = config_of(folder, BASE | switches)
    models = load_models(config, None)
    rollouts = write_rollouts(script)
    checkpoints = Checkpoints(stop_at)
    assert models.critic is not None and rollouts.prompts is not None
    critic, seen, rollouts.seed = models.critic, Seen(state_of(models.critic)), config.run.seed
    checkpoint: Any = None
    if before is not None:
        rollouts.prompts.cursor = before.progress.prompts["cursor"]
        manifest = SimpleNamespace(metrics={}, record=before.record)
        checkpoint = SimpleNamespace(
            progress=before.progress, manifest=manifest, read=lambda name: b"{}"
        )
    state = RunState(
        config.run, config.checkpoint, run_dir, checkpoints, models.updates, checkpoint
    )  # type: ignore[arg-type]
    state.steps = lambda rollouts: iter(())  # type: ignore[method-assign]
    train_step = critic.train_step
    score = critic.score
    engines = rollouts.engines

    def noted_step(batch: ExperienceBatch, samples: range, *args: Any) -> Any:
        seen.steps.append([tokens_of(batch, s) for s in samples])
        seen.onloaded += sorted(critic.offloader.onloaded)
        return train_step(batch, samples, *args)

    def noted_score(batch: ExperienceBatch, *args: Any, **kwargs: Any) -> Any:
        seen.measured.append([tokens_of(batch, s) for s in range(batch.samples)])
        return score(batch, *args, **kwargs)

    critic.train_step = noted_step
    critic.score = noted_score  # type: ignore[method-assign,assignment]
    engines.offload = lambda: seen.onloaded.append("engines go")  # type: ignore[method-assign]
    ignored = ("evaluate", "export_critic", "export_final", "sync_weights", "show_end")
    nothing = patch.multiple(
        "vapo_megatron.training.loop", **dict.fromkeys(ignored, lambda *args: None)
    )
    with Kept(run_dir) as recorder, nothing, suppress(Stopped):
        vapo_megatron.training.loop.train(config, models, rollouts, state, recorder)
    seen.end = state_of(critic)
    seen.rows = recorder.rows
    seen.finished = state.pretraining.finished
    seen.replayed = recorder.replayed
    seen.notes = recorder.notes
    seen.progress = recorder.progress
    seen.asked = [request.prompt.cursor for request in engines.requests]  # type: ignore[attr-defined]
    seen.points = checkpoints.points
    return seen, checkpoints.whole

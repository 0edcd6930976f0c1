"""Scoring where one model stands for two: the actor without adapters is the reference, a probe
reads its states."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread
from switch_rollout import Watched
from test_estimate_switches import algorithm_of
from test_step_switches import KL_LOSS, U
from test_steps_without_models import Table, numbered, numbers_of, tables
from threads import on_threads
from torch import Tensor

from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.training.models import Models
from vapo_megatron.training.score import score

ALONE = KL_LOSS | {U + "minibatch_size": 5}


class Adapted(Table):
    """Without its adapters it says a quarter less; its states are the numbers of their
    responses."""

    is_base = False

    @contextmanager
    def as_base(self) -> Iterator[None]:
        self.is_base = True
        yield
        self.is_base = False

    def score(
        self,
        batch: ExperienceBatch,
        on_done: Callable[[int], None],
        share: Sequence[int],
        read: Any = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        found = super().score(batch, on_done, share, read)
        if states is not None:
            assert not self.is_base
            states.append(states_of(batch))
        return found - 0.25 if self.is_base else found


class StateReader(Probe):
    """Its value of a token is what its state says."""

    def __init__(self) -> None:
        pass

    def score(
        self, batch: ExperienceBatch, on_done: Any, share: Any, read: Any = None, **_: Any
    ) -> Tensor:
        assert batch.hidden_states is not None and torch.equal(
            batch.hidden_states, states_of(batch)
        )
        on_done(len(share))
        return batch.hidden_states[:, :1]


def states_of(batch: ExperienceBatch) -> Tensor:
    numbers = torch.tensor(numbers_of(batch), dtype=torch.float32).repeat_interleave(
        batch.response_lengths
    )
    return torch.stack((numbers, -numbers), 1)


def scored_by_one(with_probe: bool) -> None:
    """On every rank."""
    config = algorithm_of(ALONE)
    old = tables(config)["actor"].before
    batch = spread(numbered(config))
    actor: Any = Adapted("actor", old)
    models = Models(actor, StateReader() if with_probe else None, has_base_as_reference=True)
    with Watched(Path("unused")) as recorder:
        score(models, batch, config, recorder)
    own = batch.local
    table = torch.cat([old[number] for number in numbers_of(batch.local)] or [old[0][:0]])
    assert own.old_logprobs is not None and own.ref_logprobs is not None
    assert torch.equal(own.old_logprobs, table[:, 0]) and torch.equal(
        own.ref_logprobs, table[:, 0] - 0.25
    )
    assert own.old_logprobs.is_contiguous() and own.ref_logprobs.is_contiguous()
    phases = {"score_reference", "score_policy"} | ({"score_values"} if with_probe else set())
    assert recorder.progress.keys() == phases
    assert {total for total, _ in recorder.progress.values()} == {batch.samples}
    if with_probe:
        assert own.values is not None and torch.equal(own.values, states_of(own)[:, 0])
        assert recorder.progress["score_values"] == (batch.samples, own.samples)
    else:
        assert own.hidden_states is None and own.values is None


@pytest.mark.parametrize("with_probe", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_actor_is_scored_twice_and_read_once(ranks: int, with_probe: bool) -> None:
    on_threads(ranks, scored_by_one, with_probe)

"""An engine alone with its log-probs of a step's responses is ended; what all have in common is nobody's fault."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vapo_megatron.data.batch import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.training.shards import ShardedBatch, cut
from vapo_megatron.training.sync import end_lying_engines

TOKENS = 100


def ended(apart: dict[str, float], responses: int = 4) -> dict[str, str]:
    """URLs of the engines that are ended, each of so many responses that are so far from the trainer; causes."""
    samples = []
    for url in apart:
        for _ in range(responses):
            prompt = Prompt(str(len(samples)), "", "", (1,))
            ids, logprobs = np.arange(TOKENS, dtype=np.int32), -np.ones(TOKENS, np.float32)
            sample = Sample(prompt, len(samples), 0, 0, ids, logprobs, "stop", 0, 0, reward=1.0, correct=True)
            sample.engine = url
            samples.append(sample)
    batch = from_samples(samples)
    gaps = np.repeat([apart[sample.engine] for sample in samples], TOKENS)
    batch.old_logprobs = batch.rollout_logprobs + batch.rollout_logprobs.new_tensor(
        gaps * np.resize([1, -1], len(gaps))
    )
    found: dict[str, str] = {}
    engines: Any = SimpleNamespace(limits=SimpleNamespace(mean=0.1), end=found.update)
    table = batch.table()
    end_lying_engines(engines, ShardedBatch(table, cut(table, 1), batch), [sample.engine for sample in samples])
    return found


@pytest.mark.parametrize(
    ("apart", "named"),
    [
        ({"a": 0.01, "b": 0.02, "c": 0.01}, []),
        ({"a": 0.01, "b": 3.0, "c": 0.02}, ["b"]),
        ({"a": 0.01, "b": 3.0}, ["b"]),
        ({"a": float("nan"), "b": 3.0, "c": 0.02}, []),  # the trainer's: no client takes such from an engine
        ({"a": 2.0, "b": 3.0, "c": 2.5}, []),  # stale weights, say: of all
        ({"a": 0.001, "b": 0.09, "c": 0.001}, []),  # less than is allowed
        ({"a": 3.0}, []),  # there is nobody to compare it with
        ({"": 3.0, "a": 0.01, "b": 0.01}, []),  # written by several
    ],
)
def test_the_engine_that_differs_as_no_other_does_is_ended(apart: dict[str, float], named: list[str]) -> None:
    found = ended(apart)
    assert sorted(found) == named
    if named == ["b"] and "c" in apart:
        assert found["b"].startswith("b: its log-probs of the step's responses are 3 from the trainer's on average")


def test_few_tokens_say_nothing_of_an_engine() -> None:
    assert ended({"a": 0.01, "b": 3.0, "c": 0.02}, responses=2) == {}

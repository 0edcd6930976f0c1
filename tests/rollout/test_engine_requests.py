"""What an engine is asked for, and the sample that its answer becomes."""

from typing import Any

import numpy as np
import pytest
import torch
from stub_clients import PROMPTS, SAMPLING, dispatcher

from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.sample import FinishReason, Sample
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.rollout.request import (
    GenerationRequest,
    GroupRequest,
    continued_response,
    empty_response,
    response_seed,
)
from vapo_megatron.weights.routed_experts import ExpertChoices

EXPERTS = ExpertChoices(layers=2, experts=4, per_token=2)


def beginning(cursor: int, engine: str = "") -> Sample:
    """Two tokens of a response to a prompt, written by an engine."""
    ids = np.array([7, 7], np.int32)
    logprobs = np.full(2, -1, np.float32)
    return Sample(PROMPTS[cursor], 0, 0, 0, ids, logprobs, "abort", 0, 0, engine=engine)


@pytest.mark.parametrize("top_k", [None, 5])
def test_an_engine_is_asked_for_what_sampling_says(top_k: int | None) -> None:
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, top_k=top_k, max_new_tokens=8)
    made, (client,) = dispatcher(0.0)
    client.experts = torch.zeros(2, 4, dtype=torch.uint8)
    group = GroupRequest(PROMPTS[3], 2, sampling, 8, 1, 0, EXPERTS)
    with made:
        samples = made.loop.run(made.generate(group))
    expected: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_new_tokens": 8,
        "stop_token_ids": [1],
    }
    if top_k is not None:
        expected["top_k"] = top_k
    assert client.params == [expected | {"sampling_seed": sample.seed} for sample in samples]
    assert client.experts_asked == [EXPERTS]
    assert all(sample.routed_experts is client.experts for sample in samples)


def test_each_prompt_has_its_own_limit_and_beginning() -> None:
    begun = [(), [beginning(1)]]
    request = GenerationRequest(PROMPTS[:2], 1, SAMPLING, 1, 0, EXPERTS, [8, 5], begun)
    made, (client,) = dispatcher(0.0)
    with made:
        first, second = made.collect(request)
    assert sorted(client.read) == [([0], 8), ([1, 7, 7], 3)]
    assert first.response_ids.tolist() == [0, 1]
    assert second.response_ids.tolist() == [7, 7, 1, 1]
    assert client.experts_asked == [EXPERTS, EXPERTS]


@pytest.mark.parametrize(
    ("before", "after"), [("http://engine0", "http://engine0"), ("http://other", "")]
)
def test_a_sample_names_its_engine_if_one_wrote_all_of_it(before: str, after: str) -> None:
    group = GroupRequest(PROMPTS[1], 1, SAMPLING, 8, 1, 0, begun=[beginning(1, before)])
    made, _ = dispatcher(0.0)
    with made:
        (sample,) = made.loop.run(made.generate(group))
    assert sample.engine == after


def test_a_sample_has_the_versions_that_wrote_it() -> None:
    """Not that of its request, which newer weights may overtake."""
    group = GroupRequest(PROMPTS[1], 1, SAMPLING, 8, 1, weight_version=4, goes_on=True)
    made, (client,) = dispatcher(0.0)
    client.oldest = 5
    client.version = 6
    with made:
        (sample,) = made.loop.run(made.generate(group))
    assert (sample.weight_version_oldest, sample.weight_version) == (5, 6)


@pytest.mark.parametrize(
    ("reason", "longest", "expected"),
    [("length", 4, "length"), ("length", 5, "abort"), ("stop", 5, "stop")],
)
def test_a_full_window_goes_on_where_even_one_token_is_left(
    reason: FinishReason, longest: int, expected: FinishReason
) -> None:
    group = GroupRequest(PROMPTS[0], 1, SAMPLING, longest, 1, 0, window=4)
    completion = Completion(np.arange(4, dtype=np.int32), np.zeros(4, np.float32), reason, 0, 0)
    sample = continued_response(empty_response(group, 0), completion, group, "http://engine0")
    assert sample.finish_reason == expected


def test_seeds_of_responses_are_those_of_every_version() -> None:
    """A resumed run, and one on another machine, draws the same responses."""
    keys = [(1, 0, 0), (1, 5, 3), (2**62 - 1, 10**9, 63)]
    assert [response_seed(*key) for key in keys] == [
        3_115_298_510_175_463_368,
        5_487_248_552_742_365_309,
        2_443_463_627_303_800_948,
    ]

"""Features of the prefix against loops, and that none of them knows what follows."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms.prefix_features import before, entropy, running, surprise
from vapo_megatron.algorithms.segments import to_tokens
from vapo_megatron.data.batch import offsets

LENGTHS = torch.tensor([1, 7, 0, 2, 12])
BOUNDS = offsets(LENGTHS)
Feature = Callable[[Tensor, Tensor], Tensor]


def logprobs() -> Tensor:
    chance = torch.Generator().manual_seed(1)
    drawn = -3 * torch.rand(int(BOUNDS[-1]), generator=chance)
    drawn[9] = -torch.inf
    return drawn


def test_features_are_those_of_a_loop() -> None:
    x = logprobs()
    found = surprise(x, BOUNDS)
    entropies = entropy(-x.clamp(min=-9), BOUNDS)
    for start, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        for t in range(start, end):
            earlier = [max(float(p), -30.0) for p in x[start:t]]
            assert float(found[0, t]) == pytest.approx(sum(earlier) / 5)
            assert float(found[1, t]) == pytest.approx(min(earlier, default=0) / 5)
            assert float(found[2, t]) == sum(p < math.log(0.2) for p in earlier)
            positive = [min(-float(p), 9.0) for p in x[start:t]]
            assert float(entropies[0, t]) == pytest.approx(sum(positive) / 5)
            assert float(entropies[1, t]) == pytest.approx(max(positive, default=0))


def test_a_response_has_the_same_features_in_any_batch() -> None:
    x = logprobs()
    alone = surprise(x[BOUNDS[4] :], offsets(LENGTHS[4:]))
    assert torch.equal(alone, surprise(x, BOUNDS)[:, BOUNDS[4] :])


def knows_what_follows(feature: Feature) -> bool:
    """Whether a feature of a state changes with the token drawn in it, with later ones, or with
    their number."""
    x, (start, end) = logprobs().clamp(min=-5), BOUNDS[-2:].tolist()
    whole = feature(x, BOUNDS)
    for t in range(start, end):
        cut = LENGTHS.clone()
        cut[-1] = t + 1 - start
        changed = x[: t + 1].clone()
        changed[t] -= 4.0
        if not torch.equal(feature(changed, offsets(cut)), whole[..., : t + 1]):
            return True
    return False


LEAKS: dict[str, Feature] = {
    "its own token": lambda x, bounds: x.double(),
    "the response's length": lambda x, bounds: to_tokens(bounds.diff(), bounds),
    "the share of the response": lambda x, bounds: (
        running(torch.ones_like(x), bounds, [lambda ones: ones.cumsum()])
        / to_tokens(bounds.diff(), bounds)
    ),
    "the mean log-prob of the response": lambda x, bounds: torch.cat(
        [part.mean().expand(len(part)) for part in x.split(bounds.diff().tolist())]
    ),
}


@pytest.mark.parametrize("feature", [surprise, entropy, before])
def test_no_feature_knows_what_follows(feature: Feature) -> None:
    assert not knows_what_follows(feature)


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_noticed(leak: str) -> None:
    assert knows_what_follows(LEAKS[leak])

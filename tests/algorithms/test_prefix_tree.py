"""Values of shared prefixes against a tree that is walked response by response."""

import time

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import siblings_mean
from vapo_megatron.algorithms.prefix_tree import (
    PrefixValues,
    prefix_hashes,
    prefix_values,
    tree_means,
)
from vapo_megatron.data.batch import offsets


def drawn(seed: int, group: int, responses: int, longest: int) -> tuple[Tensor, ...]:
    """Tokens of a vocabulary of two, bounds, group ids, returns and which of these are known."""
    chance = torch.Generator().manual_seed(seed)
    bounds = offsets(torch.randint(1, longest, (responses,), generator=chance))
    tokens = torch.randint(0, 2, (int(bounds[-1]),), generator=chance, dtype=torch.int32)
    returns = torch.randn(responses, generator=chance)
    known = torch.rand(responses, generator=chance) < 0.8
    return tokens, bounds, torch.arange(responses) // group, returns, known


def values_of(
    tokens: Tensor, bounds: Tensor, groups: Tensor, returns: Tensor, known: Tensor
) -> PrefixValues:
    siblings = torch.full((len(returns),), 0.25, dtype=torch.float64)
    siblings[known] = siblings_mean(returns[known], groups[known])
    hashes = prefix_hashes(tokens, bounds)
    return prefix_values(hashes, bounds, groups, returns, known, siblings)


def walked(
    tokens: Tensor, bounds: Tensor, groups: Tensor, returns: Tensor, known: Tensor
) -> tuple[list[float], list[int]]:
    """The recursion written out, siblings compared token by token."""
    siblings = torch.full((len(returns),), 0.25, dtype=torch.float64)
    siblings[known] = siblings_mean(returns[known], groups[known])
    texts = [part.tolist() for part in tokens.split(bounds.diff().tolist())]
    values = []
    shared = []
    for s, text in enumerate(texts):
        others = [o for o in range(len(texts)) if groups[o] == groups[s] and o != s and known[o]]
        value = float(siblings[s])
        states = 0
        for t in range(len(text)):
            same = [o for o in others if len(texts[o]) > t and texts[o][:t] == text[:t]]
            if same and t:
                value = (sum(float(returns[o]) for o in same) + value) / (len(same) + 1)
                states += 1
            values.append(value)
        shared.append(states)
    return values, shared


@pytest.mark.parametrize("group", [1, 2, 5, 8])
@pytest.mark.parametrize("longest", [3, 12])
def test_values_are_those_of_a_tree_that_is_walked(group: int, longest: int) -> None:
    for seed in range(6):
        rollout = drawn(seed, group, 40, longest)
        values, shared = walked(*rollout)
        tree = values_of(*rollout)
        assert tree.values.tolist() == pytest.approx(values, abs=1e-12)
        assert tree.shared.tolist() == shared
        assert (group == 1) == (not any(shared))


def test_an_unknown_response_has_values_and_is_no_sibling() -> None:
    tokens = torch.tensor([1, 2, 1, 2, 1, 2], dtype=torch.int32)
    bounds = offsets(torch.tensor([2, 2, 2]))
    groups = torch.zeros(3, dtype=torch.int64)
    returns = torch.tensor([1.0, -1.0, 5.0])
    known = torch.tensor([True, True, False])
    tree = values_of(tokens, bounds, groups, returns, known)
    assert tree.values.tolist() == pytest.approx([-1.0, -1.0, 1.0, 1.0, 0.25, 0.25 / 3])


@pytest.mark.parametrize("group", [1, 2, 5, 8])
def test_means_of_a_tree_include_the_response_itself(group: int) -> None:
    tokens, bounds, groups, returns, _ = drawn(4, group, 40, 12)
    texts = [part.tolist() for part in tokens.split(bounds.diff().tolist())]
    means = []
    for s, text in enumerate(texts):
        for t in range(len(text)):
            passing = [
                float(returns[o])
                for o in range(len(texts))
                if groups[o] == groups[s]
                and (t == 0 or (len(texts[o]) > t and texts[o][:t] == text[:t]))
            ]
            means.append(sum(passing) / len(passing))
    values = tree_means(prefix_hashes(tokens, bounds), bounds, groups, returns)
    assert values.tolist() == pytest.approx(means)


def test_groups_in_any_order_and_of_any_size_are_independent() -> None:
    """As on ranks that hold some groups each: to the bit."""
    tokens, bounds, _, returns, known = drawn(3, 1, 30, 12)
    groups = torch.randint(0, 7, (30,), generator=torch.Generator().manual_seed(1))
    whole = values_of(tokens, bounds, groups, returns, known)
    parts = tokens.split(bounds.diff().tolist())
    pieces = whole.values.split(bounds.diff().tolist())
    for group in groups.unique().tolist():
        members = (groups == group).nonzero().squeeze(1)
        alone = values_of(
            torch.cat([parts[s] for s in members]),
            offsets(bounds.diff()[members]),
            groups[members],
            returns[members],
            known[members],
        )
        assert torch.equal(alone.values, torch.cat([pieces[s] for s in members]))
        assert torch.equal(alone.shared, whole.shared[members])


def test_a_hash_knows_order_position_and_nothing_of_its_token() -> None:
    tokens = torch.tensor([4, 5, 6, 5, 4, 6, 4, 5, 9], dtype=torch.int32)
    first, second, third = prefix_hashes(tokens, offsets(torch.tensor([3, 3, 3]))).view(3, 3)
    assert torch.equal(first, third), "they differ in the last token alone"
    assert first[0] == second[0] == 0
    assert first[1] != second[1]
    assert first[2] != second[2], "the same tokens in another order"


@pytest.mark.parametrize("alike", [True, False])
def test_two_million_tokens_take_a_fraction_of_a_second(alike: bool) -> None:
    """The bound of the design is 0.3 s of an idle core; ten times as much says that it is not
    quadratic."""
    samples = 8192
    length = 281
    chance = torch.Generator().manual_seed(1)
    shape = (samples // 16 if alike else samples, length)
    tokens = torch.randint(0, 150_000, shape, generator=chance, dtype=torch.int32)
    tokens = tokens.repeat_interleave(16 if alike else 1, dim=0).flatten()
    bounds = torch.arange(samples + 1) * length
    groups = torch.arange(samples) // 16
    returns = torch.randn(samples)
    known = torch.ones(samples, dtype=torch.bool)
    begin = time.process_time()
    tree = values_of(tokens, bounds, groups, returns, known)
    assert time.process_time() - begin < 3
    assert int(tree.shared.sum()) == (samples * (length - 1) if alike else 0)

"""Values of shared prefixes: the mean return of the siblings with the same prefix.

The responses of a group form a tree. At a state that n siblings passed as well, their mean return
mu is shrunk towards the value of the state one token shorter, the last one towards the mean of all
siblings:

    v_0 = mean of the siblings        v_t = (n mu + v_(t-1)) / (n + 1)

Where no sibling wrote the same prefix, the value of the longest shared prefix is kept. A
response's own return is in none of its values. Prefix trees as values: TEMPO (arXiv 2509.18314);
states of an environment: GiGPO (2505.10978).

Prefixes are compared by hashes of 64 bits, in O(T + pairs log T). Between two branches the set of
siblings is constant, and the recursion is a geometric series.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.algorithms.baselines import grouped
from vapo_megatron.algorithms.segments import to_tokens

_SHRINKAGE = 1.0  # siblings that the shorter prefix is worth

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


class PrefixValues(NamedTuple):
    """Values of states by shared prefixes.

    Attributes:
        values: float64 [T].
        shared: int64 [S], how many states behind the first one of a response a sibling passed as
            well.
    """

    values: Tensor
    shared: Tensor


def prefix_hashes(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """A hash of the tokens before each token of its sequence: [N], int64 [S + 1] -> int64 [N]; 0 at
    the first.

    Sequences of N tokens in all, observations included: only equal prefixes have equal hashes, but
    for a chance of 2^-64 a pair.
    """
    starts = cu_seqlens[:-1].numpy()
    lengths = cu_seqlens.long().diff().numpy()
    place = np.arange(len(tokens), dtype=np.uint64)
    place -= np.repeat(starts, lengths).astype(np.uint64)
    place *= np.uint64(0x9E3779B97F4A7C15)
    place += tokens.numpy().astype(np.uint64)
    mixed = _mixed(place)
    # Sums modulo 2^64 are exact: a sequence's hashes do not depend on those before it.
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum(mixed, out=sums[1:])
    hashes = sums[:-1] - np.repeat(sums[starts], lengths)
    return torch.from_numpy(hashes.view(np.int64))


def _mixed(x: Hashes) -> Hashes:
    """The finaliser of SplitMix64 (Steele et al. 2014), in place."""
    shifted = np.empty_like(x)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(x, np.uint64(shift), out=shifted)
        x ^= shifted
        x *= np.uint64(factor)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


class _Stretch(NamedTuple):
    """States of some responses between two branches: the siblings that passed them are the same for
    each response.

    Attributes:
        owner: the responses, int64 [N].
        first: the place of the first state among all tokens, int64 [N].
        length: the number of states, int64 [N].
        siblings: how many siblings passed them.
        returns: the sum of their returns, float64 [N].
    """

    owner: Places
    first: Places
    length: Places
    siblings: int
    returns: Numbers

    def places(self) -> tuple[Places, Places]:
        """The place of each state, and its number in its stretch from 1: int64 [states]."""
        before = np.repeat(self.length.cumsum() - self.length, self.length)
        steps = np.arange(1, len(before) + 1) - before
        return np.repeat(self.first - 1, self.length) + steps, steps


def prefix_values(
    hashes: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor,
    returns: Tensor,
    known: Tensor,
    siblings: Tensor,
) -> PrefixValues:
    """The value of each state by the siblings that share its prefix.

    Args:
        hashes: int64 [T], of each response token's prefix, see prefix_hashes().
        cu_seqlens: int64 [S + 1], of the responses.
        group_ids: int64 [S].
        returns: [S].
        known: bool [S], the responses that have a return: the others are nobody's siblings.
        siblings: float64 [S], the mean return of each response's siblings, or what takes its place
            without any.
    """
    starts = cu_seqlens[:-1].numpy()
    lengths = cu_seqlens.long().diff().numpy()
    last = siblings.double().numpy().copy()
    shared = np.zeros(len(starts), dtype=np.int64)
    shrunk = []
    for stretch in _stretches(hashes, cu_seqlens, group_ids, returns, known):
        mean = stretch.returns / stretch.siblings
        apart = last[stretch.owner] - mean
        fade = _SHRINKAGE / (stretch.siblings + _SHRINKAGE)
        last[stretch.owner] = mean + fade**stretch.length * apart
        shared[stretch.owner] += stretch.length
        shrunk.append((stretch, mean, apart, fade))
    # Behind its last branch a response is alone, and its value stays.
    values = np.repeat(last, lengths)
    filled = lengths > 0
    values[starts[filled]] = siblings.double().numpy()[filled]
    for stretch, mean, apart, fade in shrunk:
        places, steps = stretch.places()
        faded = fade**steps * np.repeat(apart, stretch.length)
        values[places] = np.repeat(mean, stretch.length) + faded
    return PrefixValues(torch.from_numpy(values), torch.from_numpy(shared))


def tree_means(hashes: Tensor, cu_seqlens: Tensor, group_ids: Tensor, returns: Tensor) -> Tensor:
    """TEMPO's V(s): the mean return of all responses of the group that pass a state, its own
    included: float64 [T].

    Arguments as in prefix_values().
    """
    everyone = torch.ones(len(returns), dtype=torch.bool)
    rewards = returns.double()
    values = to_tokens(rewards, cu_seqlens).numpy()
    _, sizes, sums = grouped(returns, group_ids)
    filled = cu_seqlens.diff() > 0
    values[cu_seqlens[:-1][filled].numpy()] = (sums / sizes)[filled].numpy()
    for stretch in _stretches(hashes, cu_seqlens, group_ids, returns, everyone):
        total = stretch.returns + rewards.numpy()[stretch.owner]
        places, _ = stretch.places()
        values[places] = np.repeat(total / (stretch.siblings + 1), stretch.length)
    return torch.from_numpy(values)


def _stretches(
    hashes: Tensor, cu_seqlens: Tensor, group_ids: Tensor, returns: Tensor, known: Tensor
) -> Iterator[_Stretch]:
    """The stretches of all responses behind their first states, each response's in order."""
    bounds = cu_seqlens.long().numpy()
    _, owner, counts = np.unique(group_ids.numpy(), return_inverse=True, return_counts=True)
    by_group = np.argsort(owner, kind="stable")
    first = np.cumsum(counts) - counts
    for size in np.unique(counts[counts > 1]):
        places = first[counts == size][:, None] + np.arange(size)
        members = by_group[places]
        depths, siblings = _siblings(hashes.numpy(), bounds, members, known.numpy())
        sums = returns.double().numpy()[siblings][:, ::-1].cumsum(1)[:, ::-1]
        yield from _between_branches(members.ravel(), bounds, depths, sums)


def _siblings(
    hashes: Places, bounds: Places, members: Places, known: NDArray[np.bool_]
) -> tuple[Places, Places]:
    """How far each sibling shares a response's prefix, in tokens, ascending, and the siblings in
    that order.

    members: [groups, n]. Returns two [groups n, n - 1]. A sibling without a return shares -1
        tokens.
    """
    groups, n = members.shape
    common = np.empty((groups, n, n), dtype=np.int64)
    left, right = np.triu_indices(n, 1)
    pairs = members[:, left].ravel(), members[:, right].ravel()
    depths = _common_tokens(hashes, bounds, *pairs).reshape(groups, -1)
    common[:, left, right] = depths
    common[:, right, left] = depths
    apart = ~np.eye(n, dtype=bool)
    siblings = np.broadcast_to(members[:, None], common.shape)[:, apart].reshape(-1, n - 1)
    depths = common[:, apart].reshape(-1, n - 1)
    depths[~known[siblings]] = -1
    order = np.argsort(depths, axis=1, kind="stable")
    return np.take_along_axis(depths, order, 1), np.take_along_axis(siblings, order, 1)


def _common_tokens(hashes: Places, bounds: Places, left: Places, right: Places) -> Places:
    """The number of tokens that the responses of each pair begin with alike, up to the last state
    of the shorter."""
    lengths = np.diff(bounds)
    low = np.zeros(len(left), dtype=np.int64)
    high = np.maximum(np.minimum(lengths[left], lengths[right]) - 1, 0)
    while (low < high).any():
        middle = (low + high + 1) // 2
        # "clip": an empty response at the end has no state.
        at_left = hashes.take(bounds[left] + middle, mode="clip")
        at_right = hashes.take(bounds[right] + middle, mode="clip")
        same = at_left == at_right
        low = np.where(same, middle, low)
        high = np.where(same, high, middle - 1)
    return low


def _between_branches(
    responses: Places, bounds: Places, depths: Places, sums: Numbers
) -> Iterator[_Stretch]:
    """depths: as of _siblings(); sums: float64 [responses, n - 1], returns of a sibling and of
    those behind it."""
    passed = np.zeros(len(responses), dtype=np.int64)
    siblings = depths.shape[1]
    for branch in range(siblings):
        length = depths[:, branch] - passed
        longer = np.flatnonzero(length > 0)
        owner = responses[longer]
        first = bounds[owner] + passed[longer] + 1
        yield _Stretch(owner, first, length[longer], siblings - branch, sums[longer, branch])
        passed = np.maximum(passed, depths[:, branch])

"""How good values are, against loops over tokens in plain floats."""

import math
import random
import statistics
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms import baselines
from vapo_megatron.algorithms import critic_metrics as cm
from vapo_megatron.algorithms.segments import to_tokens

LENGTHS = [5, 1, 0, 7, 3, 12, 2, 4, 9]
GROUPS = [4, 4, 4, 7, 7, 9, 9, 9, 2]  # the last one is alone


class Case:
    """A batch with observations, tokens that count nowhere, as lists and as tensors."""

    def __init__(self, seed: int = 0, masked: bool = True) -> None:
        rng = random.Random(seed)
        self.bounds = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
        total = self.bounds[-1]
        self.owner = [s for s, length in enumerate(LENGTHS) for _ in range(length)]
        rewards = [rng.choice([-1.0, 1.0]) for _ in LENGTHS]
        self.rewards = rewards
        self.returns = [rewards[s] for s in self.owner]
        self.values = [rng.gauss(0.3 * r, 0.5) for r in self.returns]
        self.mask = [int(not masked or rng.random() < 0.7) for _ in range(total)]
        self.kept = [t for t in range(total) if self.mask[t]]
        self.cu = torch.tensor(self.bounds, dtype=torch.int32)

    def position(self, token: int) -> int:
        return sum(self.mask[self.bounds[self.owner[token]] : token])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values, returns and bounds of the tokens that are kept."""
        kept = torch.tensor(self.kept)
        values = torch.tensor(self.values)[kept]
        returns = torch.tensor(self.returns)[kept]
        return values, returns, torch.searchsorted(kept, self.cu.long())

    def figures(self, quantiles: Sequence[float] = ()) -> cm.Figures:
        return cm.Figures.read(cm.figures_of(*self.tensors(), quantiles))


def explained(values: list[float], returns: list[float]) -> float:
    residual = statistics.pvariance([r - v for r, v in zip(returns, values, strict=True)])
    return 1 - residual / statistics.pvariance(returns)


def leave_one_out_loop(rewards: list[float], groups: list[int]) -> list[float]:
    found = []
    for i in range(len(rewards)):
        others = [r for j, r in enumerate(rewards) if j != i and groups[j] == groups[i]]
        others = others or [r for j, r in enumerate(rewards) if j != i]
        found.append(sum(others) / len(others) if others else 0.0)
    return found


def position_bin_loop(case: Case, bins: int) -> dict[int, int]:
    place = {t: case.position(t) for t in range(len(case.owner))}
    return {
        t: min(bins - 1, sum(place[u] < place[t] for u in case.kept) * bins // len(case.kept))
        for t in case.kept
    }


def by_position_loop(case: Case, bins: int) -> dict[int, float]:
    bin_of = position_bin_loop(case, bins)
    found = {}
    for t in case.kept:
        others = [u for u in case.kept if GROUPS[case.owner[u]] != GROUPS[case.owner[t]]]
        same = [u for u in others if bin_of[u] == bin_of[t]] or others
        found[t] = sum(case.returns[u] for u in same) / len(same)
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bins", [1, 3, 32])
def test_table_by_position_leaves_out_the_group_it_is_read_for(masked: bool, bins: int) -> None:
    case = Case(1, masked)
    _, returns, cu = case.tensors()
    lengths = cu.diff()
    bin_of = baselines.bins_of_positions(lengths, bins)[baselines.positions(cu)]
    assert torch.equal(bin_of, baselines.even_bins(baselines.positions(cu), bins))
    group = torch.unique(torch.tensor(GROUPS), return_inverse=True)[1].repeat_interleave(lengths)
    sums = baselines.sums_by_group(returns, bin_of, group, bins, 4)
    found = baselines.means_of_other_groups(sums)[bin_of, group].tolist()
    assert found == pytest.approx(list(by_position_loop(case, bins).values()), abs=1e-12)
    assert bin_of.tolist() == list(position_bin_loop(case, bins).values())


def test_without_a_token_every_position_is_in_the_first_bin() -> None:
    for lengths in ([], [0, 0]):
        found = baselines.bins_of_positions(torch.tensor(lengths, dtype=torch.int64), 4)
        assert found.tolist() == [0] and found.dtype == torch.int64


def test_bins_are_even_and_none_is_empty_handed() -> None:
    assert baselines.even_bins(torch.zeros(0, dtype=torch.int64), 3).tolist() == []
    assert baselines.even_bins(torch.tensor([3, 0, 1, 2]), 2).tolist() == [1, 0, 0, 1]
    # Where no other group has the bin, the mean of all that others have.
    sums = baselines.sums_by_group(
        torch.tensor([5, 7]), torch.tensor([0, 1]), torch.tensor([0, 1]), 2, 2
    )
    assert sums.dtype == torch.float64
    assert baselines.means_of_other_groups(sums).tolist() == [[7, 5], [7, 5]]


@pytest.mark.parametrize("groups", [GROUPS, [0] * 9, list(range(9))])
def test_leave_one_out(groups: list[int]) -> None:
    rewards = Case(3).rewards
    found = baselines.leave_one_out(torch.tensor(rewards), torch.tensor(groups))
    assert found.tolist() == pytest.approx(leave_one_out_loop(rewards, groups), abs=1e-12)
    assert baselines.leave_one_out(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]
    assert baselines.leave_one_out(torch.tensor([5.0, 3.0]), torch.tensor([0, 1])).tolist() == [
        3.0,
        5.0,
    ]


def beside_baselines(values: Tensor, returns: Tensor, cu: Tensor, groups: Tensor) -> cm.Explained:
    known = torch.ones(len(groups), dtype=torch.bool)
    position = cm.explained_by_position(
        returns,
        cu,
        slice(0, len(groups)),
        cu.long().diff(),
        groups,
        known,
        lambda x: x,
        lambda x: x,
    )
    return cm.explained_beside_baselines(
        cm.Figures.read(cm.figures_of(values, returns, cu)), groups, position
    )


@pytest.mark.parametrize("masked", [False, True])
def test_baselines_are_measured_on_the_tokens_of_the_critic(masked: bool) -> None:
    case = Case(4, masked)
    found = beside_baselines(*case.tensors(), torch.tensor(GROUPS))
    actual = [case.returns[t] for t in case.kept]
    present = [s for s in range(len(LENGTHS)) if any(case.owner[t] == s for t in case.kept)]
    siblings = leave_one_out_loop([case.rewards[s] for s in present], [GROUPS[s] for s in present])
    of = dict(zip(present, siblings, strict=True))
    table = by_position_loop(case, 32)
    expected = [
        explained([case.values[t] for t in case.kept], actual),
        explained([of[case.owner[t]] for t in case.kept], actual),
        explained([table[t] for t in case.kept], actual),
    ]
    assert [float(x) for x in found[:3]] == pytest.approx(expected, abs=1e-6)
    assert float(found.gain) == pytest.approx(expected[0] - max(0, *expected[1:]), abs=1e-6)


def by_position(case: Case, groups: list[int], known: list[bool]) -> float:
    _, returns, cu = case.tensors()
    of = torch.tensor(groups)
    kept = torch.tensor(known)
    everything = slice(0, len(groups))
    return float(
        cm.explained_by_position(
            returns, cu, everything, cu.diff(), of, kept, lambda x: x, lambda x: x
        )
    )


def test_table_of_a_single_group_uses_its_other_responses() -> None:
    case = Case(4)
    everyone = [True] * len(GROUPS)
    assert by_position(case, [5] * 9, everyone) == by_position(case, list(range(9)), everyone) != 0
    assert by_position(case, [5, 5, 5, 5, 5, 6, 6, 6, 6], everyone) != by_position(
        case, list(range(9)), everyone
    )


def test_responses_without_a_return_count_nowhere() -> None:
    """The longest, too, whose last positions are in no bin of the others."""
    case = Case(4)
    known = [length not in (12, 1) for length in LENGTHS]
    values, returns, cu = case.tensors()
    assert int(cu.diff().argmax()) == LENGTHS.index(12)
    kept = to_tokens(torch.tensor(known), cu)
    bounds = torch.tensor([0, *cu.diff()[torch.tensor(known)]]).cumsum(0)
    only = [g for g, k in zip(GROUPS, known, strict=True) if k]
    alone = beside_baselines(values[kept], returns[kept], bounds, torch.tensor(only))
    assert by_position(case, GROUPS, known) == pytest.approx(float(alone.position))


def test_nothing_is_explained_where_there_is_nothing() -> None:
    nothing = torch.zeros(0)
    none = torch.zeros(0, dtype=torch.int64)
    assert [
        float(x)
        for x in beside_baselines(nothing, nothing, torch.zeros(1, dtype=torch.int64), none)
    ] == [0] * 4
    assert float(cm.sign_agreement(torch.zeros(0, 2), none, nothing)) == 0


def test_a_baseline_explains_nothing_of_what_is_random() -> None:
    """A table that had seen its own response would: with 2 responses a bin it would explain
    half."""
    torch.manual_seed(0)
    cu = torch.arange(0, 4001, 10, dtype=torch.int32)
    returns = torch.randint(0, 2, (400,)).float().repeat_interleave(10)
    groups = torch.arange(400) // 2
    found = beside_baselines(torch.zeros(4000), returns, cu, groups)
    assert float(found.position) < 0.01 and float(found.leave_one_out) < 0.1
    assert float(found.critic) == 0


@pytest.mark.parametrize("masked", [False, True])
def test_calibration_is_least_squares(masked: bool) -> None:
    case = Case(5, masked)
    pairs = [(case.values[t], case.returns[t]) for t in case.kept]
    slope, intercept = statistics.linear_regression(*zip(*pairs, strict=True))
    found = cm.calibration(case.figures())
    assert (float(found[0]), float(found[1])) == pytest.approx((slope, intercept), abs=1e-6)


def test_calibration_says_how_far_values_are_stretched() -> None:
    returns = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    known = torch.tensor([-0.5, 0.5, -0.5, 0.5])

    def line(values: Tensor, returns: Tensor) -> list[float]:
        figures = cm.Figures.read(
            cm.figures_of(values, returns, torch.tensor([0, len(values) // 2, len(values)]))
        )
        return [float(x) for x in cm.calibration(figures)]

    assert line(known, returns) == [2.0, 0.0]
    assert line(3 * returns + 1, returns)[0] == pytest.approx(1 / 3)
    assert line(torch.full((4,), 0.1), returns + 1) == [0.0, 1.0]
    assert line(known[:0], returns[:0]) == [0.0, 0.0]


@pytest.mark.parametrize("masked", [False, True])
def test_bias_by_position_and_outcome(masked: bool) -> None:
    case = Case(6, masked)
    correct = torch.tensor([r > 0 for r in case.rewards])
    quantiles = (0, 0.3, 0.5, 1.0)
    by_response = [[t for t in case.kept if case.owner[t] == s] for s in range(len(LENGTHS))]
    by_response = [tokens for tokens in by_response if tokens]
    expected = [
        statistics.fmean(
            case.values[tokens[math.floor(q * (len(tokens) - 1))]] - case.returns[tokens[0]]
            for tokens in by_response
        )
        for q in quantiles
    ]
    assert cm.bias_by_position(case.figures(quantiles)).tolist() == pytest.approx(
        expected, abs=1e-6
    )
    for good, found in zip((True, False), cm.bias_by_outcome(case.figures(), correct), strict=True):
        errors = [
            case.values[t] - case.returns[t] for t in case.kept if (case.returns[t] > 0) == good
        ]
        assert float(found) == pytest.approx(statistics.fmean(errors), abs=1e-6)
    assert bool(cm.bias_by_outcome(case.figures(), torch.ones(len(LENGTHS)))[1].isnan())


@pytest.mark.parametrize("masked", [False, True])
def test_sign_agreement(masked: bool) -> None:
    case = Case(7, masked)
    values, _, cu = case.tensors()
    signs = [math.copysign(1, case.values[t]) for t in case.kept]
    expected = statistics.correlation(signs, [case.returns[t] for t in case.kept])
    outcomes = torch.tensor(case.rewards)

    def agreement(advantages: Tensor) -> float:
        return float(cm.sign_agreement(cm.signs_of(advantages, cu), cu.diff(), outcomes))

    assert agreement(values) == pytest.approx(expected, abs=1e-9)
    assert agreement(values.abs()) == 0.0


def test_figures_of_a_response_do_not_depend_on_those_beside_it() -> None:
    case = Case(8)
    values, returns, cu = case.tensors()
    whole = cm.figures_of(values, returns, cu, (0.3, 1.0))
    for at, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        bounds = torch.tensor([0, end - start])
        alone = cm.figures_of(values[start:end], returns[start:end], bounds, (0.3, 1.0))
        assert torch.equal(alone[0], whole[at])


@pytest.mark.parametrize("lengths", [[4, 1, 0, 7, 2], [1]])
def test_sums_over_responses_are_those_over_tokens(lengths: list[int]) -> None:
    """Returns that change within a response, as discounted ones do."""
    generator = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, sum(lengths), generator=generator).unbind()
    cu = torch.tensor([0, *lengths]).cumsum(0)
    found = cm.Figures.read(cm.figures_of(values, returns, cu))
    for x, means, spreads in (
        (values, found.values, found.values_spread),
        (returns, found.returns, found.returns_spread),
        (returns - values, found.returns - found.values, found.errors_spread),
    ):
        mean, variance = cm.pooled(found.tokens, means, spreads)
        assert float(mean) == pytest.approx(float(x.mean()), abs=1e-6)
        assert float(variance) == pytest.approx(float(x.var(correction=0)), abs=1e-6)
    if len(lengths) > 1:
        line = statistics.linear_regression(values.tolist(), returns.tolist())
        assert [float(x) for x in cm.calibration(found)] == pytest.approx(
            [line.slope, line.intercept], abs=1e-6
        )


def test_correlation() -> None:
    x = torch.tensor([1.0, 2.0, 5.0, 3.0])
    y = torch.tensor([10.0, 9.0, 4.0, 7.5])
    assert float(cm.correlation(x, y)) == pytest.approx(
        statistics.correlation(x.tolist(), y.tolist())
    )
    for pair in ((x, torch.ones(4)), (torch.ones(4), y), (x[:1], y[:1]), (x[:0], y[:0])):
        found = cm.correlation(*pair)
        assert float(found) == 0 and found.dtype == torch.float64


def explained_of(values: Tensor, returns: Tensor) -> float:
    cu_seqlens = torch.tensor([0, len(values) // 2, len(values)])
    return float(cm.explained(cm.Figures.read(cm.figures_of(values, returns, cu_seqlens))))


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_of(returns + 7, returns) == 1.0
    assert explained_of(torch.zeros(3), returns) == 0.0
    assert explained_of(-returns, returns) == pytest.approx(-3.0)
    values = torch.tensor([0.5, 0.5, 1.0])
    residual = statistics.pvariance((returns - values).tolist())
    expected = 1 - residual / statistics.pvariance(returns.tolist())
    assert explained_of(values, returns) == pytest.approx(expected)


def test_explained_variance_without_variance_is_zero() -> None:
    assert explained_of(torch.randn(4), torch.ones(4)) == 0.0
    assert explained_of(torch.randn(4)[:0], torch.ones(4)[:0]) == 0.0
    cu = torch.tensor([0, 1, 4])
    groups = torch.tensor([0, 1])
    assert [
        float(x) for x in beside_baselines(torch.randn(4), torch.full((4,), 0.1), cu, groups)
    ] == [0.0] * 4


def test_bias_by_position() -> None:
    # Lengths 5, 0, 1, 2; positions floor(q (l - 1)) = 0,1,2,3,3 / - / 0,... / 0,0,0,0,0.
    cu_seqlens = torch.tensor([0, 5, 5, 6, 8], dtype=torch.int32)
    values = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0, 1.0, 5.0, 6.0])

    def bias(*quantiles: float) -> Tensor:
        return cm.bias_by_position(
            cm.Figures.read(cm.figures_of(values, torch.ones(8), cu_seqlens, quantiles))
        )

    got = bias(0, 0.25, 0.5, 0.75, 0.95)
    assert got.tolist() == pytest.approx([(v - 1 + 0 + 4) / 3 for v in (10, 20, 30, 40, 40)])
    alone = cm.figures_of(values[:5], torch.ones(5), cu_seqlens[:2], (0,))
    assert cm.bias_by_position(cm.Figures.read(alone)).tolist() == [9]
    last = bias(1.0)
    assert last.tolist() == pytest.approx([(49 + 0 + 5) / 3])


def test_bias_by_position_of_nothing() -> None:
    nothing = cm.figures_of(torch.zeros(0), torch.zeros(0), torch.tensor([0, 0]), (0, 0.5))
    assert cm.bias_by_position(cm.Figures.read(nothing)).tolist() == [0.0] * 2

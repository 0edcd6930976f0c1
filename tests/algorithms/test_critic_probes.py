"""On a walk whose values are known by counting, probes are unbiased, and their intervals cover
it."""

import math
import random
import statistics
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms.baselines import leave_one_out
from vapo_megatron.algorithms.critic_probes import (
    MEANING,
    Interval,
    Moments,
    Probes,
    bootstrap_weights,
    conclusion_of,
    figures,
    position_table,
    with_intervals,
)

ENDS = 8
PLACES = (0.0, 0.25, 0.5, 0.75)
CONTINUATIONS = 4
RESPONSES = 4
STATES = torch.arange(ENDS + 1, dtype=torch.float64)
# A fair walk that ends at 0 with -1 and at 8 with 1: of all ways from s, s of 8 end at 8.
TRUTH = 2 * STATES / ENDS - 1
WOBBLE = torch.tensor([0.0, 0.3, -0.2, 0.1, -0.3, 0.2, -0.1, 0.25, 0.0], dtype=torch.float64)
CRITIC = 0.6 * TRUTH + 0.1 + WOBBLE


class Walks(NamedTuple):
    """Probes, and the state that each stands in."""

    probes: Probes
    states: Tensor


def walk(starts: Tensor, chance: random.Random) -> list[list[int]]:
    """The states of a walk from each start, the end state included."""
    paths = []
    for start in starts.tolist():
        path = [int(start)]
        while 0 < path[-1] < ENDS:
            path.append(path[-1] + (1 if chance.random() < 0.5 else -1))
        paths.append(path)
    return paths


def probe(seed: int, prompts: int, critic: Tensor = CRITIC, spread: bool = True) -> Walks:
    """Responses to prompts that begin in some state, continued at four places each. spread: prompts
    differ."""
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)
    starts = (
        torch.randint(1, ENDS, (prompts,), generator=generator)
        if spread
        else torch.full((prompts,), 4)
    )
    owners = torch.arange(prompts).repeat_interleave(RESPONSES)
    paths = walk(starts[owners], chance)
    outcomes = torch.tensor([1.0 if path[-1] == ENDS else -1.0 for path in paths])
    siblings = leave_one_out(outcomes, owners)
    positions = torch.tensor([[int(q * (len(path) - 1)) for q in PLACES] for path in paths])
    states = torch.tensor(
        [[path[p] for p in row] for path, row in zip(paths, positions.tolist(), strict=True)]
    )
    states = states.flatten()
    places = torch.arange(len(PLACES)).repeat(len(paths))
    tails = walk(states.repeat_interleave(CONTINUATIONS), chance)
    rewards = torch.tensor([1.0 if tail[-1] == ENDS else -1.0 for tail in tails])
    probes = Probes(
        critic[states],
        rewards.view(-1, CONTINUATIONS),
        siblings.repeat_interleave(len(PLACES)),
        owners.repeat_interleave(len(PLACES)),
        positions.flatten(),
        places,
    )
    return Walks(probes, states)


@cache
def walks(seed: int, prompts: int = 16) -> Walks:
    return probe(seed, prompts)


def exact(found: Walks) -> dict[str, float]:
    """The figures with the true value of each state in place of what probes make of it: no
    continuation, no noise."""
    truth = TRUTH[found.states]
    known = found.probes._replace(returns=torch.stack((truth, truth), 1))
    return {name: float(value) for name, value in figures(known, torch.ones(1, len(truth))).items()}


FIGURES = (
    "bias",
    "bias_0",
    "bias_3",
    "calibration_slope",
    "correlation",
    "explained_critic",
    "explained_group",
)


def test_figures_are_those_of_the_true_values() -> None:
    """Over many seeds the mean difference is within its standard error (three of them); a ratio has
    a small one."""
    seeds = range(60)
    differences: dict[str, list[float]] = {name: [] for name in (*FIGURES, "value_error")}
    for seed in seeds:
        found = walks(seed)
        known = exact(walks(seed))
        measured = figures(found.probes, torch.ones(1, len(found.states)))
        for name, each in differences.items():
            each.append(float(measured[name]) - known[name])
    for name, each in differences.items():
        x = torch.tensor(each, dtype=torch.float64)
        error = float(x.std() / len(x) ** 0.5)
        assert abs(float(x.mean())) < 3 * error + 0.005, (
            f"{name}: off by {float(x.mean()):.4f}, error {error:.4f}"
        )


def test_noise_that_is_not_taken_out_would_be_seen() -> None:
    """The same figures with the means of continuations taken for true values are far from them."""
    found = probe(1, 200)
    naive = found.probes._replace(returns=found.probes.truth[:, None].expand(-1, 2))
    wrong = {name: float(x) for name, x in figures(naive, torch.ones(1, len(found.states))).items()}
    right = {
        name: float(x)
        for name, x in figures(found.probes, torch.ones(1, len(found.states))).items()
    }
    known = exact(found)
    for name in ("correlation", "explained_critic"):
        assert abs(right[name] - known[name]) < 0.04 < known[name] - wrong[name]


def test_intervals_cover() -> None:
    population = exact(probe(12345, 1500))
    names = ("bias", "calibration_slope", "correlation", "explained_critic")
    inside = dict.fromkeys(names, 0)
    seeds = range(60)
    for seed in seeds:
        found = walks(seed)
        intervals = with_intervals(
            lambda w, f=found: figures(f.probes, w), found.probes.prompts, 300, seed
        )  # type: ignore[misc]
        for name in names:
            inside[name] += intervals[name].low <= population[name] <= intervals[name].high
    assert all(count >= 0.83 * len(seeds) for count in inside.values()), inside


def judged(found: Walks, seed: int = 0) -> str:
    intervals = with_intervals(lambda w: figures(found.probes, w), found.probes.prompts, 300, seed)
    return conclusion_of(intervals, []).choice


def test_the_conclusion_names_what_is_worth_its_place() -> None:
    assert judged(probe(5, 64, critic=TRUTH)) == "critic"
    assert judged(probe(5, 64, critic=torch.zeros(ENDS + 1, dtype=torch.float64))) == "group"
    found = probe(5, 64)
    noise = torch.where(
        torch.rand(found.probes.returns.shape, generator=torch.Generator().manual_seed(1)) < 0.5,
        1,
        -1,
    )
    blind = found.probes._replace(
        returns=noise.double(), siblings=torch.zeros_like(found.probes.siblings)
    )
    assert judged(found._replace(probes=blind)) in ("nothing", "undecided")


@pytest.mark.parametrize(
    ("factor", "fault"),
    [(1.0, []), (0.5, ["temperature"]), (2.5, ["temperature"]), (-1.0, ["sign"])],
)
def test_values_that_something_scales_are_named(factor: float, fault: list[str]) -> None:
    found = probe(7, 96, critic=TRUTH)
    scaled = found.probes._replace(values=found.probes.values * factor)
    intervals = with_intervals(lambda w: figures(scaled, w), scaled.prompts, 300, 0)
    assert conclusion_of(intervals, []).faults == fault


def test_moments_are_those_of_repeated_states() -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    weights = torch.tensor([[2, 0, 1], [1, 1, 1]])
    repeated = torch.tensor([1.0, 1.0, 4.0], dtype=torch.float64)
    found = Moments(weights).covariance(x, x)
    assert torch.allclose(
        found, torch.stack((repeated.var(correction=0), x.double().var(correction=0)))
    )


def some_probes(states: int = 14, prompts: int = 6) -> Probes:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(states, generator=generator, dtype=torch.float64) + 0.3
    of_prompt = torch.arange(states) % prompts
    truth = 0.6 * values + 0.5 * torch.randn(states, generator=generator, dtype=torch.float64)
    returns = truth[:, None] + 0.3 * torch.randn(
        states, 3, generator=generator, dtype=torch.float64
    )
    siblings = truth + 0.4 * torch.randn(states, generator=generator, dtype=torch.float64)
    return Probes(
        values,
        returns,
        siblings,
        of_prompt,
        torch.arange(states) * 3 % 11,
        torch.arange(states) % 3,
    )


def test_every_figure_is_what_it_says() -> None:
    probes = some_probes()
    weights = torch.ones(2, 14, dtype=torch.int64)
    weights[1, ::3], weights[1, 1::4] = 2, 0
    found = figures(probes, weights)
    for row in range(2):
        drawn = [i for i in range(14) for _ in range(int(weights[row, i]))]

        def mean(x: Tensor, drawn: list[int] = drawn) -> float:
            return statistics.fmean(x[drawn].tolist())

        def variance(x: Tensor, drawn: list[int] = drawn) -> float:
            return statistics.pvariance(x[drawn].tolist())

        values = probes.values
        truth = probes.returns.mean(1)
        chance = mean(torch.tensor([statistics.variance(r) / 3 for r in probes.returns.tolist()]))
        whole = variance(truth) - chance
        spread = variance(values)
        both = mean((values - mean(values)) * (truth - mean(truth)))

        def explains(predicted: Tensor, whole: float = whole, chance: float = chance) -> float:
            return 1 - (variance(truth - predicted) - chance) / whole  # noqa: B023

        critic, group, position = map(explains, (values, probes.siblings, position_table(probes)))
        expected = {
            "knowable": whole / statistics.pvariance(probes.returns[drawn].flatten().tolist()),
            "correlation": both / math.sqrt(spread * whole),
            "calibration_slope": both / spread,
            "calibration_intercept": mean(truth) - both / spread * mean(values),
            "bias": mean(values - truth),
            "value_error": math.sqrt(max(0, mean((values - truth) ** 2) - chance)),
            "explained_critic": critic,
            "explained_group": group,
            "explained_position": position,
            "gain": critic - max(0, group, position),
        }
        for place in range(3):
            there = [i for i in drawn if i % 3 == place]
            expected[f"bias_{place}"] = statistics.fmean((values - truth)[there].tolist())
        assert {name: float(x[row]) for name, x in found.items()} == pytest.approx(expected)


def test_figures_of_values_or_returns_that_are_all_equal() -> None:
    probes = some_probes()
    flat = figures(probes._replace(values=torch.full((14,), 0.1)), torch.ones(1, 14))
    assert [float(flat[name]) for name in ("correlation", "calibration_slope")] == [0, 0]
    assert float(flat["explained_critic"]) == pytest.approx(0, abs=1e-9)
    still = figures(probes._replace(returns=torch.zeros(14, 3)), torch.ones(1, 14))
    assert [float(still[name]) for name in ("knowable", "correlation")] == [0, 0]
    assert still["explained_critic"].isnan().all()


def test_the_table_by_position_knows_other_prompts_alone() -> None:
    few = some_probes()
    for i, found in enumerate(position_table(few).tolist()):
        others = few.prompts != few.prompts[i]
        assert found == pytest.approx(float(few.truth[others].mean())), "so few states are one bin"
    many = some_probes(states=70)
    late = many.positions * 2 >= 11
    for i, found in enumerate(position_table(many).tolist()):
        others = (many.prompts != many.prompts[i]) & (late == late[i])
        assert found == pytest.approx(float(many.truth[others].mean()))


# Every figure that a conclusion rests on, each with its bounds; what a critic that is worth its
# place has.
SOUND = {
    "knowable": (0.3, 0.4),
    "explained_critic": (0.6, 0.7),
    "explained_group": (0.4, 0.5),
    "explained_position": (0.1, 0.2),
    "gain": (0.1, 0.2),
    "calibration_slope": (0.9, 1.1),
    "correlation": (0.8, 0.9),
}


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({}, "critic"),
        ({"gain": (0.0, 0.1)}, "undecided"),
        ({"gain": (-0.1, -0.001)}, "group"),
        ({"gain": (-0.019, 0.019)}, "group"),  # neither is better by anything worth having
        ({"gain": (-0.1, 0.019)}, "undecided"),  # of four prompts: it holds 0, and nearly anything
        ({"gain": (-0.019, 0.02)}, "undecided"),
        ({"gain": (-0.1, 0.1), "explained_critic": (-0.5, 0.0)}, "group"),
        ({"gain": (-0.1, 0.1), "explained_critic": (-0.5, 0.01)}, "undecided"),
        ({"knowable": (0.0, 0.049)}, "nothing"),
        ({"knowable": (-0.1, 0.05)}, "undecided"),
        ({"knowable": (0.001, 0.049)}, "critic"),
    ],
)
def test_bounds_decide(changes: dict[str, tuple[float, float]], choice: str) -> None:
    given = {name: Interval(sum(ends) / 2, *ends) for name, ends in (SOUND | changes).items()}
    found = conclusion_of(given, ["shift"])
    assert (
        found.choice == choice and found.faults == ["shift"] and found.text == MEANING[found.choice]
    )
    assert all(
        any(str(x) in reason for reason in found.reasons)
        for name, x in given.items()
        if name not in ("calibration_slope", "correlation")
    )


@pytest.mark.parametrize(
    ("slope", "correlation", "faults"),
    [
        ((-0.4, -0.01), (-0.5, -0.01), ["sign"]),
        ((-0.4, 0.0), (-0.5, 0.0), []),
        ((0.1, 0.5), (-0.5, -0.01), []),
        ((-0.5, -0.01), (0.75, 0.9), ["temperature"]),
        ((0.5, 0.79), (0.71, 0.9), ["temperature"]),
        ((0.5, 0.8), (0.71, 0.9), []),
        ((1.26, 2.0), (0.71, 0.9), ["temperature"]),
        ((1.25, 2.0), (0.71, 0.9), []),
        ((0.5, 0.7), (0.7, 0.9), []),
    ],
)
def test_a_slope_is_a_fault_where_values_order_states(
    slope: tuple[float, float], correlation: tuple[float, float], faults: list[str]
) -> None:
    ends = SOUND | {"calibration_slope": slope, "correlation": correlation}
    given = {name: Interval(sum(pair) / 2, *pair) for name, pair in ends.items()}
    assert conclusion_of(given, []).faults == faults
    assert conclusion_of(given, faults).faults == faults, "none is named twice"


def test_draws_are_the_seeds() -> None:
    prompts = torch.tensor([0, 1, 1, 2])
    again = [bootstrap_weights(prompts, 50, seed) for seed in (1, 1, 2)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])
    assert again[0].dtype == torch.int64 and torch.equal(again[0][:, 1], again[0][:, 2])
    assert (again[0][:, [0, 1, 3]].sum(1) == 3).all(), "as many prompts as there are"

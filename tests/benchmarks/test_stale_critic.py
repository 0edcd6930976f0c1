"""The study of old responses measures correctly: values are counted right, and estimates meet
them."""

from itertools import pairwise

import pytest
import torch

from benchmarks.stale_critic import (
    WAYS,
    block_bounds,
    by_blocks,
    estimate,
    interval,
    log_ratios,
    squared_bias_and_variance,
)
from benchmarks.token_mdp import LONGEST, STATES, TokenMdp
from vapo_megatron.algorithms.importance import corrected_gae
from vapo_megatron.algorithms.segments import segment_sum


def test_counted_values_are_the_mean_rewards_of_what_is_drawn() -> None:
    mdp = TokenMdp(0)
    policy = mdp.first_policy()
    found = mdp.draw(policy, 20_000)
    assert int(found.cu_seqlens.diff().max()) == LONGEST and found.rewards.abs().max() == 1
    firsts = found.cu_seqlens[:-1]
    rewards = segment_sum(found.rewards, found.cu_seqlens).double()
    truth = mdp.values(policy)[0]
    for state in range(STATES):
        of_state = rewards[found.states[firsts] == state]
        assert (
            abs(float(of_state.mean() - truth[state]))
            < 4 * float(of_state.std()) / of_state.numel() ** 0.5
        )


def test_a_step_has_the_size_asked_for_and_improves_the_policy() -> None:
    mdp = TokenMdp(1)
    policy = mdp.first_policy()
    better = mdp.improved(policy, 1e-3)
    found = mdp.draw(policy, 5000)
    assert float(-log_ratios(found, better, policy).double().mean()) == pytest.approx(1e-3, rel=0.3)
    assert mdp.values(better)[0].mean() > mdp.values(policy)[0].mean()


def test_uncut_weights_give_targets_whose_mean_is_the_new_value() -> None:
    mdp = TokenMdp(2)
    old = mdp.first_policy()
    new = mdp.improved(mdp.improved(old, 2e-3), 2e-3)
    critic = mdp.values(old)
    truth = mdp.values(new)
    biases = {}
    for name in ("uncorrected, lambda 1", "V-trace, cut at 1", "not cut"):
        halves = []
        for _ in range(2):
            found = mdp.draw(old, 20_000)
            _, targets, accepted = estimate(found, log_ratios(found, new, old), critic, WAYS[name])
            assert accepted.all()
            halves.append((targets, found.cells))
        biases[name], _ = squared_bias_and_variance(halves, truth.flatten())
    assert abs(biases["not cut"]) < 0.1 * biases["uncorrected, lambda 1"]
    assert 0.05 < biases["V-trace, cut at 1"] / biases["uncorrected, lambda 1"] < 0.8


def test_expectations_follow_the_recursion_counted_over_words() -> None:
    """D(s) = sum_a mu(a|s) (rho delta + c E[D(s')]) by places and states, beside the mean of packed
    samples."""
    mdp = TokenMdp(3)
    old = mdp.first_policy()
    new = mdp.improved(old, 5e-3)
    critic = 0.5 * mdp.values(old)
    weights = (new.log_softmax(-1) - old.log_softmax(-1)).exp().clamp(max=1)
    chances = old.softmax(-1)
    stays = 1 - 1 / 24
    d = torch.zeros(STATES, dtype=torch.float64)
    for place in range(LONGEST - 1, -1, -1):
        if place == LONGEST - 1:
            following = torch.full((STATES,), -1.0, dtype=torch.float64)
            later = d
        else:
            following = critic[place + 1]
            later = d
        mean = (mdp.reward * (1 - stays) + stays * following)[mdp.following]
        d = (
            chances * weights * (mean - critic[place][:, None] + stays * later[mdp.following])
        ).sum(-1)
    found = mdp.draw(old, 40_000)
    w = log_ratios(found, new, old).exp().clamp(max=1)
    values = critic.flatten()[found.cells].float()
    _, targets = corrected_gae(found.rewards, values, found.cu_seqlens, 1.0, 1.0, w, w)
    at_start = (targets - values)[found.cu_seqlens[:-1]].double()
    states = found.states[found.cu_seqlens[:-1]]
    for state in range(STATES):
        of_state = at_start[states == state]
        assert (
            abs(float(of_state.mean() - d[state]))
            < 4 * float(of_state.std()) / of_state.numel() ** 0.5
        )


def test_the_measure_of_bias_is_not_fooled_by_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.zeros(200, dtype=torch.float64)
    cells = torch.arange(200).repeat(5)
    halves = [(0.3 + torch.randn(1000, generator=generator), cells) for _ in range(2)]
    bias, variance = squared_bias_and_variance(halves, truth)
    assert bias == pytest.approx(0.09, abs=0.06) and variance == pytest.approx(1.0, abs=0.15)


def test_an_interval_is_students_for_any_number_of_seeds() -> None:
    middle, low, high = interval([float(seed) for seed in range(11)], "kept")
    assert (middle - low, high - middle) == pytest.approx([2.2281] * 2, rel=1e-4)


def test_a_block_weighs_as_the_product_of_its_ratios_cut_at_one() -> None:
    def bounds(*lengths: int) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0)

    lengths = [7, 0, 4, 1]
    blocks = block_bounds(bounds(*lengths), 3)
    assert blocks.tolist() == [0, 3, 6, 7, 10, 11, 12]
    assert block_bounds(bounds(0, 0), 3).tolist() == [0]
    assert block_bounds(bounds(2, 0, 1), 1).tolist() == [0, 1, 2, 3]
    log_ratio = 0.5 * torch.randn(12, generator=torch.Generator().manual_seed(0))
    w = by_blocks(3)(log_ratio, bounds(*lengths))
    spans = [slice(a, b) for a, b in pairwise(blocks.tolist())]
    products = [float(log_ratio[span].sum().exp().clamp(max=1)) for span in spans]
    assert [float(w[span].prod()) for span in spans] == pytest.approx(products)

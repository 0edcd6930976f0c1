"""GAE against a float64 loop over every token, and what must hold of it whatever the numbers."""

import pytest
import torch
from torch import Tensor

from vapo_megatron.algorithms.advantages import reinforce_pp
from vapo_megatron.algorithms.gae import (
    bootstrap_of_truncated,
    decoupled_gae,
    length_adaptive_lambda,
    monte_carlo_returns,
    segmented_gae,
)
from vapo_megatron.algorithms.segments import extent, place_terminal

LENGTHS = [0, 1, 5, 16, 17, 300, 0, 2500, 33, 0]


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def tokens(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), generator=generator), torch.randn(
        sum(lengths), generator=generator
    )


def loop(
    rewards: Tensor,
    values: Tensor,
    lengths: list[int],
    lam: list[float],
    gamma: float,
    boot: Tensor,
) -> Tensor:
    """The textbook's loop, one token at a time, in float64 (Python floats)."""
    r = rewards.tolist()
    v = values.tolist()
    out = [0.0] * rewards.numel()
    end = 0
    for response, length in enumerate(lengths):
        start = end
        end = end + length
        advantage = 0.0
        next_value = float(boot[response])
        for t in range(end - 1, start - 1, -1):
            advantage = r[t] + gamma * next_value - v[t] + gamma * lam[response] * advantage
            next_value, out[t] = v[t], advantage
    return torch.tensor(out, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest entry: a sum's rounding goes with its largest terms."""
    assert (actual.double() - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def lambdas(kind: str) -> Tensor:
    adaptive = length_adaptive_lambda(torch.tensor(LENGTHS), 0.05)
    random = torch.rand(len(LENGTHS), generator=torch.Generator().manual_seed(1))
    constant = {"zero": 0.0, "tiny": 1e-3, "half": 0.5, "vanilla": 0.95, "one": 1.0}
    if kind in constant:
        return torch.full((len(LENGTHS),), constant[kind])
    return {"adaptive": adaptive, "random": random}[kind]


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
@pytest.mark.parametrize("kind", ["zero", "tiny", "half", "vanilla", "one", "random", "adaptive"])
def test_equals_the_loop_over_tokens(kind: str, gamma: float) -> None:
    rewards, values = tokens(LENGTHS)
    lam = lambdas(kind)
    boot = torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(2))
    expected = loop(rewards, values, LENGTHS, lam.tolist(), gamma, boot)

    advantages = segmented_gae(rewards, values, bounds(LENGTHS), lam, gamma, boot)
    assert advantages.dtype == torch.float32
    assert_close(advantages, expected)

    policy, targets = decoupled_gae(rewards, values, bounds(LENGTHS), lam, 1.0, gamma, boot)
    assert torch.equal(policy, advantages)
    critic = loop(rewards, values, LENGTHS, [1.0] * len(LENGTHS), gamma, boot)
    assert_close(targets, critic + values)


def test_worked_example() -> None:
    # V = 1, 2, 4, reward 8 at the end, gamma 1/2, lambda 1/2:
    # delta = 0 + 1 - 1, 0 + 2 - 2, 8 - 4 = 0, 0, 4 and A = 4/16, 4/4, 4.
    rewards = torch.tensor([0.0, 0.0, 8.0])
    values = torch.tensor([1.0, 2.0, 4.0])
    policy, targets = decoupled_gae(rewards, values, torch.tensor([0, 3]), 0.5, 1.0, gamma=0.5)
    assert policy.tolist() == [0.25, 1.0, 4.0]
    assert targets.tolist() == [2.0, 4.0, 8.0]


@pytest.mark.parametrize("length", [1, 7, 16, 17, 1024, 20_000])
def test_lambda_one_gamma_one_is_return_minus_value(length: int) -> None:
    _, values = tokens([length, 3])
    rewards = torch.zeros_like(values)
    rewards[length - 1], rewards[-1] = 1.0, -1.0
    advantages, targets = decoupled_gae(rewards, values, bounds([length, 3]), 1.0, 1.0)
    returns = torch.tensor([1.0] * length + [-1.0] * 3)
    assert (advantages - (returns - values)).abs().max() < 2e-5
    assert (targets - returns).abs().max() < 2e-5


def test_lambda_zero_is_the_one_step_error_exactly() -> None:
    rewards, values = tokens([40, 3])
    following = values.roll(-1)
    following[[39, 42]] = 0
    assert torch.equal(
        segmented_gae(rewards, values, bounds([40, 3]), 0.0), rewards - values + following
    )


def test_responses_do_not_reach_into_each_other() -> None:
    order = [7, 5, 3, 8, 1, 4, 2]
    lam = lambdas("random")
    rewards, values = tokens(LENGTHS)
    advantages = segmented_gae(rewards, values, bounds(LENGTHS), lam, 0.99).split(LENGTHS)
    r = rewards.split(LENGTHS)
    v = values.split(LENGTHS)
    shuffled = segmented_gae(
        torch.cat([r[i] for i in order]),
        torch.cat([v[i] for i in order]),
        bounds([LENGTHS[i] for i in order], torch.int64),
        lam[order],
        0.99,
    )
    for i, got in zip(order, shuffled.split([LENGTHS[i] for i in order]), strict=True):
        assert_close(got, advantages[i].double())
        assert_close(
            segmented_gae(r[i], v[i], bounds([LENGTHS[i]]), lam[i : i + 1], 0.99),
            advantages[i].double(),
        )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [20_000], [1] * 2000, [5000, 0, 1, 5000]])
def test_any_shape_of_batch(lengths: list[int]) -> None:
    rewards, values = tokens(lengths)
    expected = loop(rewards, values, lengths, [0.95] * len(lengths), 1.0, torch.zeros(len(lengths)))
    advantages = segmented_gae(rewards, values, bounds(lengths), 0.95)
    if expected.numel():
        assert_close(advantages, expected)
    assert advantages.shape == expected.shape


@pytest.mark.parametrize(("mean", "gamma"), [(5, 1.0), (300, 0.99), (5000, 1.0)])
def test_response_has_the_same_advantages_in_any_part_of_a_batch(mean: int, gamma: float) -> None:
    generator = torch.Generator().manual_seed(mean)
    lengths = torch.randint(1, 2 * mean, (41,), generator=generator)
    lengths[7] = 20 * mean
    cu_seqlens = bounds(lengths.tolist())
    total = int(lengths.sum())
    rewards, values = torch.randn(2, total, generator=generator).unbind()
    lam = torch.rand(41, generator=generator)
    whole = decoupled_gae(rewards, values, cu_seqlens, lam, 0.95, gamma)
    for first, end in ((0, 41), (3, 9), (7, 8), (20, 41)):
        part = slice(int(cu_seqlens[first]), int(cu_seqlens[end]))
        inside = cu_seqlens[first : end + 1] - cu_seqlens[first]
        found = decoupled_gae(
            rewards[part], values[part], inside, lam[first:end], 0.95, gamma, of=lengths
        )
        assert all(torch.equal(x, y[part]) for x, y in zip(found, whole, strict=True))
        alone = segmented_gae(
            rewards[part], values[part], inside, lam[first:end], gamma, of=lengths
        )
        assert torch.equal(alone, whole[0][part])
        outcomes = rewards[cu_seqlens[1:] - 1]
        penalized = reinforce_pp(outcomes[first:end], values[part], inside, gamma, lengths)
        ends = place_terminal(outcomes, cu_seqlens, total) - values
        to_go = segmented_gae(ends, torch.zeros_like(ends), cu_seqlens, 1.0, gamma)
        assert torch.equal(penalized, to_go[part]), "the recurrence is the same, to the bit"


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
@pytest.mark.parametrize("lengths", [LENGTHS, [1], []])
def test_monte_carlo_returns_are_the_targets_of_lambda_1(lengths: list[int], gamma: float) -> None:
    outcomes = torch.randn(len(lengths), generator=torch.Generator().manual_seed(4))
    cu_seqlens = bounds(lengths, torch.int64)
    rewards = place_terminal(outcomes, cu_seqlens, sum(lengths))
    _, expected = decoupled_gae(rewards, torch.zeros(sum(lengths)), cu_seqlens, 1.0, 1.0, gamma)
    found = monte_carlo_returns(outcomes, cu_seqlens, gamma, None)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5 if gamma < 1 else 0, atol=0)


def test_the_extent_of_each_response() -> None:
    lengths = [1, 0, 4, 2]
    x = tokens(lengths)[0] - 3
    cu_seqlens = bounds(lengths)
    found = extent(x, cu_seqlens)
    assert found.dtype == torch.float64
    for row, part in zip(found, x.double().split(lengths), strict=True):
        if len(part):
            expected = [part.mean(), part.var(correction=0) * len(part), part.min(), part.max()]
            assert row.tolist() == pytest.approx([float(value) for value in expected])
        else:
            assert row.tolist() == [0, 0, torch.inf, -torch.inf]


def test_inputs_are_left_alone_and_no_gradient_flows() -> None:
    rewards, values = tokens([30])
    before = rewards.clone(), values.clone()
    policy, targets = decoupled_gae(rewards, values.requires_grad_(), bounds([30]), 0.9, 1.0)
    assert torch.equal(rewards, before[0]) and torch.equal(values, before[1])
    assert not policy.requires_grad and not targets.requires_grad


def test_bfloat16_values_are_computed_in_float32() -> None:
    rewards, values = tokens([700])
    low = values.bfloat16()
    advantages = segmented_gae(rewards, low, bounds([700]), 0.99)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, segmented_gae(rewards, low.float(), bounds([700]), 0.99))
    all_low = rewards.bfloat16(), low, torch.tensor([0.3]).bfloat16()
    advantages = segmented_gae(*all_low[:2], bounds([700]), 0.99, 0.97, all_low[2])
    again = segmented_gae(
        *(x.float() for x in all_low[:2]), bounds([700]), 0.99, 0.97, all_low[2].float()
    )
    assert advantages.dtype == torch.float32 and torch.equal(advantages, again)


def test_coarse_matrix_products_do_not_touch_advantages() -> None:
    rewards, values = tokens([3000, 400])
    exact = segmented_gae(rewards.double(), values.double(), bounds([3000, 400]), 0.999)
    assert exact.dtype == torch.float64
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert_close(segmented_gae(rewards, values, bounds([3000, 400]), 0.999), exact)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(4)}, "rewards and values must be"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "must run from 0 to 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, "must not decrease"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "int32 or int64"),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, "int32 or int64"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "int32 or int64"),
        ({"lam": 1.5}, "lambda must be in"),
        ({"lam": torch.tensor([0.5, -0.1])}, "lambda must be in"),
        ({"gamma": 1.01}, "gamma must be in"),
        ({"bootstrap_values": torch.ones(3)}, "bootstrap_values must be"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    fitting = {
        "rewards": torch.zeros(5),
        "values": torch.zeros(5),
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "lam": 0.9,
    }
    with pytest.raises(ValueError, match=message):
        segmented_gae(**(fitting | change))


def test_length_adaptive_lambda() -> None:
    # 0.05 * l = 0, 0.5, 1, 2, 50, 1000
    lam = length_adaptive_lambda(torch.tensor([0, 10, 20, 40, 1000, 20_000]), 0.05)
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.98, 0.999]))
    assert lam.dtype == torch.float32
    assert length_adaptive_lambda(
        torch.tensor([10, 1000]), 0.05, floor=0.3
    ).tolist() == pytest.approx([0.3, 0.98])
    assert length_adaptive_lambda(torch.tensor([10, 1000]), 0.05, floor=1.0).tolist() == [1, 1]


def test_only_truncated_responses_bootstrap() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = bootstrap_of_truncated(
        values, torch.tensor([True, False, True, True]), torch.tensor([0, 2, 3, 3, 6])
    )
    assert found.tolist() == [2.0, 0.0, 0.0, 6.0]

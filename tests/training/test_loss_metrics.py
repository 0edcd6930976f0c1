"""Each loss and its metrics on one rank's positions, beside the formulas written out in float64: in
the middle of an iteration, where the policy is no longer the one of the rollout or of the old
log-probs."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from switch_formulas import cut, surrogate
from torch import Tensor

from vapo_megatron.algorithms.policy_loss import PolicyTerms
from vapo_megatron.algorithms.registry import POLICY_LOSSES
from vapo_megatron.config.policy import KlConfig, PolicyLossConfig
from vapo_megatron.config.value import ValueLossConfig
from vapo_megatron.training.losses import NegativeLogLikelihood, PolicyLoss, ValueLoss, values_of

LENGTHS = [9, 1, 14]
TOKENS = sum(LENGTHS)
OWNER = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
# Positions of a model's outputs: two of a prompt before each response, and padding; not all tokens
# are here.
INDEX = torch.tensor([-1, -1, *range(9), -1, -1, 9, -1, -1, *range(10, 20), -1])
HERE = INDEX[INDEX >= 0]


class Local:
    """LocalTokens of one rank."""

    def gather(self, values: Tensor) -> Tensor:
        assert values.shape == (TOKENS,)
        return torch.where(INDEX >= 0, values[INDEX.clamp(min=0)], 0)

    def sequence_mean(self, x: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for sample in range(len(LENGTHS)):
            members = (INDEX >= 0) & (OWNER[INDEX.clamp(min=0)] == sample)
            found[members] = x[members].detach().mean()
        return found


def noise(seed: int, scale: float = 1.0, count: int = TOKENS) -> Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


NEW = -2 + noise(1, 0.5)
ENTROPIES = noise(2).abs()
CHOSEN = torch.ones(TOKENS)
CHOSEN[4:7] = 0


def loss_of(settings: dict[str, Any], kl: dict[str, Any], **changed: Any) -> PolicyLoss:
    """Three tokens carry no loss; they are those where the ratio is largest."""
    old = NEW + noise(3, 0.2)
    old[4:7] -= 3
    fields: dict[str, Any] = {
        "old_logprobs": old,
        "rollout_logprobs": NEW + noise(4, 0.2),
        "ref_logprobs": NEW + noise(5, 0.2),
        "advantages": noise(6),
        "importance": noise(8).exp(),
        "weights": CHOSEN * noise(9).exp(),
        "nll_weights": CHOSEN * noise(10).exp(),
        "mean_weights": CHOSEN / CHOSEN.sum(),
    }
    return PolicyLoss(
        PolicyLossConfig.model_validate(settings), KlConfig.model_validate(kl), **(fields | changed)
    )


def outputs() -> Tensor:
    """Anything where no response token is."""
    found = noise(11, 5.0, 2 * len(INDEX)).reshape(-1, 2)
    found[INDEX >= 0] = torch.stack((NEW, ENTROPIES), 1)[HERE]
    return found.requires_grad_()


def expected(loss: PolicyLoss, new: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The loss with its gradient to new [T] float64, and the metrics; of the tokens that are
    here."""
    config = loss.config
    kl = loss.kl

    def of(values: Tensor) -> Tensor:
        return values.double()[HERE]

    here = new[HERE]
    entropies = of(ENTROPIES)
    advantages = of(loss.advantages)
    old = here.detach() if loss.old_logprobs is None else of(loss.old_logprobs)
    rollout, ref, weights, mean = (
        of(x) for x in (loss.rollout_logprobs, loss.ref_logprobs, loss.weights, loss.mean_weights)
    )
    members = [OWNER[HERE] == sample for sample in range(len(LENGTHS))]
    settings: Any = SimpleNamespace(policy_loss=config)
    surrogates = torch.zeros_like(here)
    clipped = {"low": torch.zeros_like(mean), "high": torch.zeros_like(mean)}
    if config.dual_clip is not None:
        clipped["dual"] = torch.zeros_like(mean)
    for part in members:
        terms = (old[part], rollout[part], advantages[part])
        surrogates = surrogates.masked_scatter(part, surrogate(settings, here[part], *terms))
        bounds = cut(settings, here[part].detach(), *terms)
        for name, tokens in zip(("low", "high", "dual"), bounds, strict=True):
            if tokens is not None:
                clipped[name] = clipped[name].masked_scatter(part, tokens.double())
    terms = {
        "policy_loss": (weights * of(loss.importance) * surrogates).sum(),
        "nll_loss": -(of(loss.nll_weights) * here).sum(),
        "kl_loss": (weights * ((ref - here).exp() - (ref - here) - 1)).sum(),
    }
    if kl.estimator == "k2":
        terms["kl_loss"] = (weights * (here - ref) ** 2 / 2).sum()
    coefficients = {
        "policy_loss": 1.0,
        "nll_loss": config.positive_nll.coef,
        "kl_loss": kl.coef if kl.placement == "loss" else 0.0,
    }
    total = sum(
        (coefficients[name] * term for name, term in terms.items()), torch.zeros(()).double()
    )
    total = total - config.entropy_coef * (weights * entropies).sum()
    log_ratio = torch.where(mean > 0, (here - old).detach(), 0)
    metrics = {
        "update_entropy": (mean * entropies).sum(),
        "ratio_mean": (mean * log_ratio.exp()).sum(),
        "ratio_max": log_ratio.exp().max(),
        "approx_kl": (mean * (log_ratio.exp() - 1 - log_ratio)).sum(),
    }
    for name, tokens in clipped.items():
        metrics[f"clip_fraction_{name}"] = (mean * tokens).sum()
    reported = {"policy_loss", "nll_loss"} | {name for name, c in coefficients.items() if c}
    metrics |= {name: term.detach() for name, term in terms.items() if name in reported}
    return total, {name: float(value) for name, value in metrics.items()}


TIGHT = {"clip_low": 0.1, "clip_high": 0.15}
AGGREGATION = {True: {"aggregation": "sequence_mean"}, False: {"aggregation": "token_mean"}}
K3, K2 = ({"placement": "loss", "estimator": name, "coef": 0.7} for name in ("k3", "k2"))
# Bounds that act on some tokens of each side; TIGHT where a loss is not named.
BOUNDS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.01, "clip_high": 0.3},
    "gspo": {"clip_low": 0.01, "clip_high": 0.02},
    "cispo": {"clip_low": 0.3, "clip_high": 0.1},
    "dppo": {"clip_low": 0.01, "clip_high": 0.02},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: ({"kind": name} | AGGREGATION[traits.per_sequence] | BOUNDS.get(name, TIGHT), {})
    for name, traits in POLICY_LOSSES.traits.items()
}
CASES |= {
    "dual_clip": (TIGHT | {"dual_clip": 1.2}, {}),
    "all": (TIGHT | {"entropy_coef": 0.3, "positive_nll": {"coef": 0.6}}, K3),
    "k2": (TIGHT, K2),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_policy_loss_and_its_metrics_are_those_of_the_formula(name: str, first: bool) -> None:
    """first: old log-probs come from this very pass."""
    settings, kl = CASES[name]
    loss = loss_of(settings, kl, **({"old_logprobs": None} if first else {}))
    given = outputs()
    found, metrics = loss(given, Local())
    new = NEW.double().requires_grad_()
    wanted, wanted_metrics = expected(loss, new)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-5)
    assert metrics == pytest.approx(wanted_metrics, rel=1e-4, abs=1e-6)
    assert set(metrics) == {*loss.sums, *loss.maxima} and not any(
        x.requires_grad for x in metrics.values()
    )
    (gradient,) = torch.autograd.grad(found, given)
    (wanted_gradient,) = torch.autograd.grad(wanted, new)
    torch.testing.assert_close(
        gradient[INDEX >= 0, 0].double(), wanted_gradient[HERE], rtol=1e-4, atol=1e-6
    )
    entropy = -loss.config.entropy_coef * loss.weights[HERE]
    torch.testing.assert_close(gradient[INDEX >= 0, 1], entropy, rtol=1e-5, atol=1e-7)
    assert not gradient[INDEX < 0].any()
    some = torch.ones(1).double()
    bounds = cut(SimpleNamespace(policy_loss=loss.config), some, some, some, some)
    if not first:
        for side, tokens in zip(("low", "high"), bounds, strict=False):
            assert (metrics[f"clip_fraction_{side}"] > 0) == (tokens is not None), side


TARGETS = noise(20, 0.4).clamp(-0.9, 0.9)
OLD = noise(21, 0.4)
WEIGHTS = CHOSEN * noise(22).exp()
RANGE = {"low": -1.5, "high": 2.5}
VALUE_CASES: dict[str, dict[str, Any]] = {
    "mse": {},
    "clipped": {"kind": "clipped", "clip": 0.1},
    "tanh": {"squash": "tanh", **RANGE},
    "arctan": {"squash": "arctan", **RANGE},
    "clipped_arctan": {"kind": "clipped", "clip": 0.1, "squash": "arctan", **RANGE},
    "hl_gauss": {"kind": "hl_gauss", "bins": 21, **RANGE},
}


def values_as_written(config: ValueLossConfig, head: Tensor) -> Tensor:
    middle = (config.low + config.high) / 2
    half = (config.high - config.low) / 2
    if config.kind == "hl_gauss":
        edges = edges_of(config)
        return head.softmax(-1) @ ((edges[1:] + edges[:-1]) / 2)
    if config.squash == "tanh":
        return middle + half * torch.tanh(head[:, 0] / half)
    if config.squash != "none":
        return middle + 2 * half * torch.arctan(head[:, 0]) / math.pi
    return head[:, 0]


def edges_of(config: ValueLossConfig) -> Tensor:
    width = (config.high - config.low) / (config.bins - 2 * 3)
    return config.low + width * (torch.arange(config.bins + 1).double() - 3)


@pytest.mark.parametrize("name", VALUE_CASES)
def test_a_value_loss_is_that_of_the_formula(name: str) -> None:
    config = ValueLossConfig.model_validate(VALUE_CASES[name])
    head = noise(23, 1.0, TOKENS * config.outputs).reshape(TOKENS, -1)
    given = noise(24, 5.0, len(INDEX) * config.outputs).reshape(len(INDEX), -1)
    given[INDEX >= 0] = head[HERE]
    given.requires_grad_()
    found, metrics = ValueLoss(config, TARGETS, OLD, WEIGHTS)(given, Local())
    exact = head.double()[HERE].requires_grad_()
    values, targets, old, weights = (
        values_as_written(config, exact), *(x.double()[HERE] for x in (TARGETS, OLD, WEIGHTS))
    )  # fmt: skip
    per_token = (values - targets) ** 2 / 2
    if config.kind == "clipped":
        near = old + (values - old).clamp(-config.clip, config.clip)
        per_token = torch.maximum(per_token, (near - targets) ** 2 / 2)
    if config.kind == "hl_gauss":
        edges = edges_of(config)
        normal = torch.distributions.Normal(targets[:, None], 0.75 * float(edges[1] - edges[0]))
        mass = normal.cdf(edges[None]).diff(dim=-1)
        per_token = -(mass / mass.sum(-1, keepdim=True) * exact.log_softmax(-1)).sum(-1)
    wanted = (weights * per_token).sum()
    assert {key: float(value) for key, value in metrics.items()} == {
        "value_loss": pytest.approx(float(wanted.detach()), rel=1e-4)
    }
    assert (
        float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
        and not metrics["value_loss"].requires_grad
    )
    (gradient,), (wanted_gradient,) = (
        torch.autograd.grad(found, given),
        torch.autograd.grad(wanted, exact),
    )
    torch.testing.assert_close(gradient[INDEX >= 0].double(), wanted_gradient, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        values_of(head, config)[HERE].double(), values.detach(), rtol=1e-4, atol=1e-5
    )


def test_token_mean_equals_the_loss_of_fine_tuning() -> None:
    loss, metrics = NegativeLogLikelihood(WEIGHTS)(outputs(), Local())
    assert float(loss.detach()) == pytest.approx(-float((WEIGHTS * NEW)[HERE].sum()), rel=1e-5)
    assert float(metrics["nll_loss"]) == float(loss.detach()) and loss.requires_grad
    assert float(metrics["entropy"]) == pytest.approx(
        float((WEIGHTS * ENTROPIES)[HERE].sum()), rel=1e-5
    )
    assert not any(value.requires_grad for value in metrics.values()) and set(metrics) == {
        *NegativeLogLikelihood.sums
    }


def by_old_logprobs(terms: PolicyTerms) -> Tensor:
    """0 divides the log-probs and entropies of positions where no response token is."""
    return -terms.advantages * (terms.logprobs + terms.entropies) / terms.old_logprobs


def test_what_a_function_makes_of_other_positions_is_not_read() -> None:
    named = {"kind": "function", "function": "test_loss_metrics:by_old_logprobs"}
    loss = loss_of(named, {}, importance=torch.ones(TOKENS))
    found = outputs()
    total, _ = loss(found, Local())
    (gradient,) = torch.autograd.grad(total, found)
    assert loss.old_logprobs is not None
    share = -loss.weights * loss.advantages / loss.old_logprobs
    by_logprob, by_entropy = (
        torch.zeros(TOKENS).index_add_(0, HERE, x) for x in gradient[INDEX >= 0].t()
    )
    only_here = torch.zeros(TOKENS).index_fill_(0, HERE, 1.0)
    torch.testing.assert_close(by_entropy, share * only_here)
    coef = loss.config.positive_nll.coef
    torch.testing.assert_close(by_logprob, (share - coef * loss.nll_weights) * only_here)
    assert not gradient[INDEX < 0].any()

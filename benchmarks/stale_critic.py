"""What the age of responses does to advantages, value targets and the critic, with and without
corrections.

    python -m benchmarks.stale_critic [--seeds 8] [--kl 1e-4 4e-4] [--image FILE.png] [--json
    FILE.json]

A policy drifts by gradient steps of a given size on a token MDP whose values are counted. Responses
of the policy of `age` steps ago teach the critic of today's. Prints, for every age and way to
correct: bias and standard deviation of value targets and advantages where the critic knows the old
    policy exactly, and the error of a critic that has
learnt from responses of that age for many steps. Intervals are 95 % over seeds (Student's t).
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.stats
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.token_mdp import LONGEST, STATES, WORDS, Responses, TokenMdp
from vapo_megatron.algorithms.gae import length_adaptive_lambda
from vapo_megatron.algorithms.importance import corrected_gae, mis, tis
from vapo_megatron.algorithms.segments import segment_mean, segment_sum, to_tokens
from vapo_megatron.files import atomic_write

AGES = (0, 1, 2, 4, 8, 16)
ALPHA = 1.5  # SAO's, of length-adaptive lambda_policy

Weights = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to learn from old responses.

    Attributes:
        weigh: log ratios [T] and cu_seqlens to the weights rho = c, [T].
        lam_critic: lambda of the value targets.
        accept: log ratios [T] and cu_seqlens to the tokens that are learnt from, bool [T].
    """

    weigh: Weights
    lam_critic: float = 1.0
    accept: Weights = lambda log_ratio, _: torch.ones_like(log_ratio, dtype=torch.bool)


def uncorrected(log_ratio: Tensor, _: Tensor) -> Tensor:
    return torch.ones_like(log_ratio)


def truncated(cap: float) -> Weights:
    return lambda log_ratio, _: tis(log_ratio, cap)


def block_bounds(cu_seqlens: Tensor, size: int) -> Tensor:
    """cu_seqlens of blocks of `size` tokens, the last of a response shorter: int [S + 1] -> int64
    [B + 1]."""
    bounds = cu_seqlens.long()
    starts = torch.arange(int(bounds[-1]))
    starts = starts[(starts - to_tokens(bounds[:-1], bounds)) % size == 0]
    return torch.cat([starts, bounds[-1:]])


def by_blocks(size: int) -> Weights:
    """The product of the weights of a block of n tokens is min(1, product of its ratios)."""

    def weigh(log_ratio: Tensor, cu_seqlens: Tensor) -> Tensor:
        blocks = block_bounds(cu_seqlens, size)
        return tis(to_tokens(segment_mean(log_ratio, blocks), blocks), 1.0)

    return weigh


def near_responses(log_ratio: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Responses whose whole ratio is within a factor of two."""
    return mis(to_tokens(segment_sum(log_ratio, cu_seqlens), cu_seqlens), 0.5, 2.0) > 0


def near_tokens(log_ratio: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Responses without a token whose ratio is off by more than a factor of two."""
    outside = mis(log_ratio, 0.5, 2.0) == 0
    return to_tokens(segment_sum(outside.long(), cu_seqlens) == 0, cu_seqlens)


WAYS = {
    "uncorrected, lambda 1": Way(uncorrected),
    "uncorrected, lambda 0.95": Way(uncorrected, 0.95),
    "V-trace, cut at 1": Way(truncated(1.0)),
    "V-trace, cut at 1, lambda 0.95": Way(truncated(1.0), 0.95),
    "V-trace, cut at 2": Way(truncated(2.0)),
    "blocks of 8, cut at 1": Way(by_blocks(8)),
    "not cut": Way(truncated(1e6)),
    "IcePop 0.5-2": Way(lambda log_ratio, _: mis(log_ratio, 0.5, 2.0)),
    "responses within 0.5-2": Way(uncorrected, accept=near_responses),
    "V-trace, no token outside 0.5-2": Way(truncated(1.0), accept=near_tokens),
}


def log_ratios(found: Responses, policy: Tensor, behaviour: Tensor) -> Tensor:
    """log pi - log mu of every token, float32 [T]."""
    difference = policy.log_softmax(-1) - behaviour.log_softmax(-1)
    return difference[found.states, found.words].float()


def estimate(
    found: Responses, log_ratio: Tensor, critic: Tensor, way: Way
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, value targets and the tokens that are learnt from, [T] each; critic is a table
    [LONGEST, STATES]."""
    lam = length_adaptive_lambda(found.cu_seqlens.diff(), ALPHA)
    values, weights = critic.flatten()[found.cells].float(), way.weigh(log_ratio, found.cu_seqlens)
    both = corrected_gae(
        found.rewards, values, found.cu_seqlens, lam, way.lam_critic, weights, weights
    )
    return *both, way.accept(log_ratio, found.cu_seqlens)


def cell_means(x: Tensor, cells: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean of x in each of `count` cells, and how many are in it."""
    counts = torch.bincount(cells, minlength=count).double()
    return torch.bincount(cells, x.double(), minlength=count) / counts.clamp(min=1), counts


def squared_bias_and_variance(
    halves: list[tuple[Tensor, Tensor]], truth: Tensor
) -> tuple[float, float]:
    """Of estimates of a table, from two independent halves of (estimates, cells), averaged over
    tokens.

    The product of both halves' errors has the squared bias for its mean, however few samples a cell
    has.
    """
    (first, n), (second, m) = (cell_means(x, cells, truth.numel()) for x, cells in halves)
    seen = (n > 0) & (m > 0)
    if not bool(seen.any()):
        return float("nan"), float("nan")
    weights = torch.where(seen, n + m, 0)
    bias = float((weights * (first - truth) * (second - truth)).sum() / weights.sum())
    errors = [((x.double() - truth[cells]).square() * seen[cells]) for x, cells in halves]
    counted = [float(seen[cells].sum()) for _, cells in halves]
    return bias, float(sum(error.sum() for error in errors)) / sum(counted) - bias


def at_age(
    mdp: TokenMdp, policies: list[Tensor], age: int, responses: int
) -> dict[str, dict[str, float]]:
    """Bias and variance of each way, by its name; the drift itself under the name "drift"."""
    policy, behaviour = policies[-1], policies[-1 - age]
    q, truth = mdp.q_values(policy), mdp.values(policy)
    critic = mdp.values(behaviour)
    halves = [mdp.draw(behaviour, responses // 2) for _ in range(2)]
    ratios = [log_ratios(half, policy, behaviour) for half in halves]
    rows = {"drift": drift(halves[0], ratios[0], critic, truth)}
    for name, way in WAYS.items():
        targets, advantages, kept = [], [], []
        for half, log_ratio in zip(halves, ratios, strict=True):
            found, target, accepted = estimate(half, log_ratio, critic, way)
            cells = half.cells[accepted]
            targets.append((target[accepted], cells))
            advantages.append((found[accepted], cells * WORDS + half.words[accepted]))
            kept.append(float(accepted.float().mean()))
        of_values = squared_bias_and_variance(targets, truth.flatten())
        of_advantages = squared_bias_and_variance(advantages, (q - truth[..., None]).flatten())
        keys = ("target bias", "target std", "advantage bias", "advantage std", "kept")
        rows[name] = dict(zip(keys, (*of_values, *of_advantages, sum(kept) / 2), strict=True))
    return rows


def drift(found: Responses, log_ratio: Tensor, critic: Tensor, truth: Tensor) -> dict[str, float]:
    """How far the policies are from each other, as a run would see it, and the error of the old
    policy's values."""
    whole = segment_sum(log_ratio, found.cu_seqlens)
    return {
        "KL per token": -float(log_ratio.mean()),
        "outside 0.8-1.28": float((mis(log_ratio, 0.8, 1.28) == 0).float().mean()),
        "std of a response's log ratio": float(whole.std()),
        "trace lost per token": -float(tis(log_ratio, 1.0).log().mean()),
        "V of old policy off by": float(
            (critic - truth).flatten()[found.cells].square().mean().sqrt()
        ),
        "length": float(found.cu_seqlens.diff().float().mean()),
    }


def tracked(mdp: TokenMdp, policies: list[Tensor], steps: int, responses: int) -> Tensor:
    """Mean squared error of critics that start exact and have learnt for `steps` steps, over the
    last quarter.

    float64 [AGES, WAYS]. All ways see the same responses; a step is one batch of every way at every
    age.
    """
    first, ways = len(policies) - steps, list(WAYS.values())
    critics = mdp.values(policies[first - 1]).expand(len(AGES), len(ways), -1, -1).clone()
    errors = torch.zeros(len(AGES), len(ways), dtype=torch.float64)
    lam = torch.tensor([way.lam_critic for way in ways]).repeat_interleave(len(AGES) * responses)
    for now in range(first, len(policies)):
        drawn = mdp.draw(torch.stack([policies[now - age] for age in AGES]), responses)
        ages = to_tokens(torch.arange(len(AGES)).repeat_interleave(responses), drawn.cu_seqlens)
        behaviour = torch.stack([policies[now - age].log_softmax(-1) for age in AGES])
        words = drawn.states * WORDS + drawn.words
        log_ratio = (policies[now].log_softmax(-1) - behaviour).flatten(1)[ages, words].float()
        values = critics.flatten(2)[ages, :, drawn.cells].t().float()
        weights = torch.stack([way.weigh(log_ratio, drawn.cu_seqlens) for way in ways])
        tokens, count = drawn.words.numel(), len(ways)
        bounds = torch.cat([drawn.cu_seqlens[:-1] + way * tokens for way in range(count)])
        bounds = torch.nn.functional.pad(bounds, (0, 1), value=count * tokens)
        w = weights.flatten()
        _, targets = corrected_gae(
            drawn.rewards.repeat(count), values.flatten(), bounds, lam, lam, w, w
        )
        accepted = torch.stack([way.accept(log_ratio, drawn.cu_seqlens) for way in ways]).flatten()
        tables = (ages * count + torch.arange(count)[:, None]) * (LONGEST * STATES) + drawn.cells
        means, counts = cell_means(targets[accepted], tables.flatten()[accepted], critics.numel())
        rate = counts / (counts + 32)
        critics = critics + (rate * (means - critics.flatten())).view_as(critics)
        if now >= len(policies) - steps // 4:
            difference = (critics - mdp.values(policies[now])).flatten(2)
            errors += difference[..., mdp.draw(policies[now], 512).cells].square().mean(-1) / (
                steps // 4
            )
    return errors


def one_seed(
    seed: int, kl: float, arguments: argparse.Namespace
) -> dict[int, dict[str, dict[str, float]]]:
    """Everything that is measured of one task, by age and way."""
    mdp = TokenMdp(seed)
    policies = [mdp.first_policy()]
    while len(policies) < 1 + max(AGES) + arguments.steps:
        policies.append(mdp.improved(policies[-1], kl))
    rows = {}
    for age in AGES:
        # The same random numbers for every age.
        mdp.random.manual_seed(seed)
        rows[age] = at_age(mdp, policies[: 1 + max(AGES)], age, arguments.responses)
    errors = tracked(mdp, policies, arguments.steps, arguments.batch)
    for age, of_age in zip(AGES, errors.tolist(), strict=True):
        for name, error in zip(WAYS, of_age, strict=True):
            rows[age][name]["critic error"] = error
            rows[age][name]["critic error by uncorrected"] = 0.5 * float(np.log(error / of_age[0]))
    return rows


SQUARED = {"target bias", "target std", "advantage bias", "advantage std", "critic error"}
LOGARITHMS = {"critic error by uncorrected"}


def interval(samples: list[float], key: str) -> list[float]:
    """Mean and its 95 % bounds over seeds; of squares, roots of all three, of logarithms,
    exponentials."""
    x = np.array([sample for sample in samples if np.isfinite(sample)])
    half = (
        scipy.stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))
        if len(x) > 1
        else 0.0
    )
    bounds = np.array([x.mean(), x.mean() - half, x.mean() + half])
    if key in SQUARED:
        bounds = np.sqrt(bounds.clip(0))
    return [float(bound) for bound in (np.exp(bounds) if key in LOGARITHMS else bounds)]


def summary(
    seeds: list[dict[int, dict[str, dict[str, float]]]],
) -> dict[int, dict[str, dict[str, list[float]]]]:
    """Per age, way and figure: mean, lower and upper bound."""
    return {
        age: {
            name: {key: interval([seed[age][name][key] for seed in seeds], key) for key in figures}
            for name, figures in seeds[0][age].items()
        }
        for age in seeds[0]
    }


def show(console: Console, kl: float, found: dict[int, dict[str, dict[str, list[float]]]]) -> None:
    """Print the drift, and one table per figure: ways by ages."""
    figures = {"drift": found[0]["drift"], **{key: {} for key in found[0][next(iter(WAYS))]}}
    for title, rows in figures.items():
        table = Table(title=f"{title}, {kl:g} nats per token and step")
        for heading in ("", *(f"age {age}" for age in found)):
            table.add_column(heading, justify="right" if heading else "left")
        for name in rows or WAYS:
            cells = [
                found[age]["drift"][name] if rows else found[age][name][title] for age in found
            ]
            table.add_row(name, *(f"{mid:.3f} ({low:.3f}-{high:.3f})" for mid, low, high in cells))
        console.print(table)


def draw(found: dict[float, dict[int, dict[str, dict[str, list[float]]]]], file: Path) -> None:
    """Figures over ages, one row per size of the steps."""
    keys = ("target bias", "target std", "advantage bias", "critic error")
    figure = Figure(figsize=(4 * len(keys), 3.4 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), len(keys), squeeze=False)
    for row, (kl, ages) in zip(axes, found.items(), strict=True):
        for axis, key in zip(row, keys, strict=True):
            for index, name in enumerate(WAYS):
                middle, low, high = np.array([ages[age][name][key] for age in ages]).T
                style = {"color": f"C{index}", "marker": "o", "markersize": 3, "linewidth": 1.2}
                axis.plot(range(len(ages)), middle, label=name, **style)
                axis.fill_between(
                    range(len(ages)), low, high, color=f"C{index}", alpha=0.12, linewidth=0
                )
            top = max(ages[age][name][key][0] for age in ages for name in WAYS if name != "not cut")
            axis.set_ylim(0, 1.1 * top)
            axis.set_xticks(range(len(ages)), [str(age) for age in ages])
            axis.set(title=f"{key}, {kl:g} nats per token and step", xlabel="age in policy updates")
            axis.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--kl",
        type=float,
        nargs="+",
        default=[1e-4, 4e-4],
        help="nats per token of a policy update",
    )
    parser.add_argument(
        "--responses", type=int, default=4096, help="that bias and deviation are measured on"
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="policy updates that a critic follows"
    )
    parser.add_argument("--batch", type=int, default=256, help="responses of each of them")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {
        kl: summary([one_seed(seed, kl, arguments) for seed in range(arguments.seeds)])
        for kl in arguments.kl
    }
    console = Console(width=190)
    for kl, ages in found.items():
        show(console, kl, ages)
    if arguments.image is not None:
        draw(found, arguments.image)
    if arguments.json is not None:
        with atomic_write(arguments.json) as out:
            json.dump(
                {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "found": found},
                out,
                indent=1,
            )


if __name__ == "__main__":
    main()

"""GAE over packed responses against the usual loop over a padded batch, in one run.

    python -m benchmarks.gae [--responses 512] [--longest 4096] [--largest 64000000] [--device cpu]
    [--json FILE]

A row for each distribution of lengths: medians over rounds of the loop, of segmented_gae and of
copying the arrays that it reads and writes, and the largest difference relative to the largest
advantage. Below them decoupled_gae (both lambdas) over more and more tokens; growth is the exponent
of its time against tokens; 1 means linear.

Results are new tensors: on 2026-12-01 more than half of segmented_gae's time at "all longest" was
12,456 page faults a call, which are expensive on that virtual machine; with MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=100000000000 in the environment it took 13 ms instead of 30.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Figure, growth, in_turns, parser, publish, ratio_figure
from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda, segmented_gae

Lengths = Callable[[int, int, torch.Generator], Tensor]

DISTRIBUTIONS: dict[str, Lengths] = {
    "all longest": lambda count, longest, _: torch.full((count,), longest),
    "uniform": lambda count, longest, random: torch.randint(
        1, longest + 1, (count,), generator=random
    ),
    "log-normal": lambda count, longest, random: (
        ((torch.randn(count, generator=random) * 0.6).exp() * longest / 5).long().clamp(1, longest)
    ),
}


def padded_loop(rewards: Tensor, values: Tensor, mask: Tensor, lam: Tensor, gamma: float) -> Tensor:
    """The loop that PPO trainers have, over [S, L], with one lambda a response and padding stepped
    over."""
    following = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(following)
    columns = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = (delta + gamma * lam * advantage) * mask[:, t]
        following = values[:, t] * mask[:, t]
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1)


def batch(
    lengths: Tensor, device: torch.device, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards [T] with 0 or 1 at each end, values [T], cu_seqlens, length-adaptive lambda [S]."""
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.rand(int(cu_seqlens[-1]), generator=random)
    rewards = torch.zeros_like(values)
    rewards[cu_seqlens[1:] - 1] = torch.randint(2, lengths.shape, generator=random).float()
    lam = length_adaptive_lambda(lengths, alpha=0.05)
    return rewards.to(device), values.to(device), cu_seqlens.to(device), lam.to(device)


def fill(copies: Sequence[Tensor], rewards: Tensor) -> None:
    """Write the rewards into each of the copies."""
    for copy in copies:
        copy.copy_(rewards)


def compare(
    given: argparse.Namespace, device: torch.device
) -> tuple[list[dict[str, Any]], list[Figure]]:
    """One row a distribution of lengths, and how many times as long the loop takes."""
    rows, figures = [], []
    for name, draw in DISTRIBUTIONS.items():
        random = torch.Generator().manual_seed(0)
        lengths = draw(given.responses, given.longest, random)
        rewards, values, cu_seqlens, lam = batch(lengths, device, random)
        inside = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
        padded_rewards, padded_values = (
            torch.zeros(inside.shape, device=device).masked_scatter_(inside, x)
            for x in (rewards, values)
        )
        copies = [torch.empty_like(rewards) for _ in range(3)]
        by_loop = partial(padded_loop, padded_rewards, padded_values, inside.float(), lam, 1.0)
        by_segments = partial(segmented_gae, rewards, values, cu_seqlens, lam)
        expected = by_loop()[inside]
        error = (by_segments() - expected).abs().max() / expected.abs().max()
        steps: list[Callable[[], object]] = [by_loop, by_segments, partial(fill, copies, rewards)]
        loop, ours, copy = in_turns(steps, given.repeats)
        milliseconds = {"loop ms": loop, "segmented_gae ms": ours, "copy ms": copy}
        medians = {heading: float(np.median(took)) * 1e3 for heading, took in milliseconds.items()}
        rows.append(
            {
                "lengths": name,
                "tokens": rewards.numel(),
                **medians,
                "error": float(error),
                "growth": "",
            }
        )
        figures.append(ratio_figure(f"{name} lengths, padded loop over segmented_gae", loop, ours))
    return rows, figures


def grown(given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """decoupled_gae over four sizes, each twice the one before."""
    sizes, seconds, rows = [given.largest // factor for factor in (8, 4, 2, 1)], [], []
    for size in sizes:
        random = torch.Generator().manual_seed(0)
        arrays = batch(torch.full((size // given.longest,), given.longest), device, random)
        seconds.append(float(np.median(in_turns([partial(decoupled_gae, *arrays, 1.0)], 3)[0])))
        row = {
            "lengths": "decoupled_gae",
            "tokens": arrays[0].numel(),
            "loop ms": "",
            "segmented_gae ms": "",
        }
        rows.append(row | {"copy ms": "", "error": "", "growth": ""})
        rows[-1]["segmented_gae ms"] = seconds[-1] * 1e3
    rows[-1]["growth"] = growth(sizes, seconds)
    return rows


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--responses", type=int, default=512)
    arguments.add_argument("--longest", type=int, default=4096)
    arguments.add_argument(
        "--largest", type=int, default=64_000_000, help="tokens of the largest batch"
    )
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    device = torch.device(given.device)
    rows, figures = compare(given, device)
    title = f"{given.responses} responses of up to {given.longest} tokens, {device}"
    publish(title, rows + grown(given, device), given.json, figures)


if __name__ == "__main__":
    main()

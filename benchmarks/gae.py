"""GAE over packed responses against the usual loop over a padded batch, in one run.

    python benchmarks/gae.py [--responses 512] [--longest 16384] [--threads 1] [--device cpu]

Prints a table for several length distributions: milliseconds (best of several), how many times faster, largest
difference relative to the largest advantage. Then time and tokens for batches of growing length.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda, segmented_gae

Lengths = Callable[[int, int, torch.Generator], Tensor]

DISTRIBUTIONS: dict[str, Lengths] = {
    "all longest": lambda count, longest, _: torch.full((count,), longest),
    "uniform": lambda count, longest, random: torch.randint(1, longest + 1, (count,), generator=random),
    "log-normal": lambda count, longest, random: (
        ((torch.randn(count, generator=random) * 0.6).exp() * longest / 5).long().clamp(1, longest)
    ),
}


def padded_loop(rewards: Tensor, values: Tensor, mask: Tensor, lam: Tensor, gamma: float) -> Tensor:
    """The loop that PPO trainers have, over [S, L], with one lambda a response and padding stepped over."""
    following = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(following)
    columns = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = (delta + gamma * lam * advantage) * mask[:, t]
        following = values[:, t] * mask[:, t]
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1)


def best_seconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Least wall-clock seconds of `repeats` calls, after one that does not count."""
    best = float("inf")
    for repeat in range(repeats + 1):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best


def batch(lengths: Tensor, device: torch.device, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rewards [T] with 0 or 1 at each end, values [T], cu_seqlens, length-adaptive lambda [S]."""
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.rand(int(cu_seqlens[-1]), generator=random)
    rewards = torch.zeros_like(values)
    rewards[cu_seqlens[1:] - 1] = torch.randint(2, lengths.shape, generator=random).float()
    lam = length_adaptive_lambda(lengths, alpha=0.05)
    return rewards.to(device), values.to(device), cu_seqlens.to(device), lam.to(device)


def compare(arguments: argparse.Namespace, device: torch.device) -> Table:
    """One row a distribution of lengths."""
    table = Table(title=f"{arguments.responses} responses of up to {arguments.longest} tokens, {device}")
    for heading in ("lengths", "tokens", "loop ms", "segmented_gae ms", "ratio", "decoupled_gae ms", "ratio", "error"):
        table.add_column(heading, justify="right")
    for name, draw in DISTRIBUTIONS.items():
        random = torch.Generator().manual_seed(0)
        lengths = draw(arguments.responses, arguments.longest, random)
        rewards, values, cu_seqlens, lam = batch(lengths, device, random)
        inside = (torch.arange(int(lengths.max())) < lengths[:, None]).to(device)
        padded = [torch.zeros(inside.shape, device=device).masked_scatter_(inside, x) for x in (rewards, values)]
        one = torch.ones_like(lam)

        loop = partial(padded_loop, *padded, inside.float())

        expected = loop(lam, 1.0)[inside]
        error = (segmented_gae(rewards, values, cu_seqlens, lam) - expected).abs().max() / expected.abs().max()
        loop_time = best_seconds(lambda: loop(lam, 1.0), device, 2)  # noqa: B023
        both_time = best_seconds(lambda: (loop(lam, 1.0), loop(one, 1.0) + padded[1]), device, 2)  # noqa: B023
        packed = best_seconds(lambda: segmented_gae(rewards, values, cu_seqlens, lam), device, 15)  # noqa: B023
        both = best_seconds(lambda: decoupled_gae(rewards, values, cu_seqlens, lam, 1.0), device, 15)  # noqa: B023
        table.add_row(
            name,
            f"{rewards.numel():,}",
            f"{loop_time * 1e3:.0f}",
            f"{packed * 1e3:.1f}",
            f"{loop_time / packed:.0f}x",
            f"{both * 1e3:.1f}",
            f"{both_time / both:.0f}x",
            f"{float(error):.1e}",
        )
    return table


def scaling(arguments: argparse.Namespace, device: torch.device) -> Table:
    """Nanoseconds a token as the batch grows."""
    table = Table(title="decoupled_gae as tokens grow")
    for heading in ("responses", "length", "tokens", "ms", "ns/token"):
        table.add_column(heading, justify="right")
    for responses, length in ((512, 128), (512, 1024), (512, 4096), (512, 16384), (64, 16384), (16384, 512)):
        random = torch.Generator().manual_seed(0)
        rewards, values, cu_seqlens, lam = batch(torch.full((responses,), length), device, random)
        seconds = best_seconds(lambda: decoupled_gae(rewards, values, cu_seqlens, lam, 1.0), device, 9)  # noqa: B023
        cells = (responses, length, f"{rewards.numel():,}", f"{seconds * 1e3:.1f}")
        table.add_row(*map(str, cells), f"{seconds * 1e9 / rewards.numel():.1f}")
    return table


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    console = Console(width=120)
    console.print(f"torch {torch.__version__}, {arguments.threads} threads")
    console.print(compare(arguments, device))
    console.print(scaling(arguments, device))


if __name__ == "__main__":
    main()

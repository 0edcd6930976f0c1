"""Credit that can be checked: a game in which one of six turns decides, with advantages that are
known by counting.

Each turn chooses good or bad with equal chances. Turn 3 decides: the reward is 1 with probability
0.9 after good and 0.1 after bad, whatever the others chose. So the exact advantage is +0.4 or -0.4
on that turn, and 0 on all others.

    python examples/agents/pivotal_turn.py
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vapo_megatron.algorithms.advantages import grpo, rloo
from vapo_megatron.algorithms.gae import segmented_gae, turn_gae

TURNS, PIVOT, GROUP, GROUPS, BATCHES, LAMBDA = 6, 3, 8, 128, 30, 0.95
EPISODES = GROUP * GROUPS


def critic(kind: str, exact: Tensor, generator: torch.Generator) -> Tensor:
    """Values [tokens]: the exact ones with a little noise, half of their signal with more, or noise
    alone."""
    noise = torch.randn(exact.shape, generator=generator)
    if kind == "good":
        return exact + 0.05 * noise
    return 0.5 + 0.5 * (exact - 0.5) + 0.1 * noise if kind == "weak" else 0.5 + 0.3 * noise


def play(generator: torch.Generator) -> dict[str, tuple[float, float]]:
    """Correlation with the exact advantage over all turns, and bias on the pivotal turn, of each
    estimator."""
    good = torch.rand(EPISODES, TURNS, generator=generator) < 0.5
    chance = torch.where(good[:, PIVOT], 0.9, 0.1)
    rewards = (torch.rand(EPISODES, generator=generator) < chance).float()
    exact = torch.zeros(EPISODES, TURNS)
    exact[:, PIVOT] = chance - 0.5
    states = torch.where(torch.arange(TURNS) > PIVOT, chance[:, None], 0.5)
    lengths = torch.randint(4, 40, (EPISODES, TURNS), generator=generator).flatten()
    turns = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    responses = torch.arange(0, EPISODES * TURNS + 1, TURNS)
    bounds, token_values = turns[responses], states.flatten().repeat_interleave(lengths)
    token_rewards = torch.zeros(int(turns[-1]))
    token_rewards[bounds[1:] - 1] = rewards
    groups = torch.arange(GROUPS).repeat_interleave(GROUP)
    whole: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo, "rloo": rloo}
    found = {
        name: estimate(rewards, groups)[:, None].expand(-1, TURNS)
        for name, estimate in whole.items()
    }
    for kind in ("good", "weak", "useless"):
        values = critic(kind, token_values, generator)
        tokens = segmented_gae(token_rewards, values, bounds, LAMBDA)
        sums = torch.zeros(len(lengths)).index_add_(
            0, torch.arange(len(lengths)).repeat_interleave(lengths), tokens
        )
        found[f"token GAE at {LAMBDA}, {kind} critic"] = (sums / lengths).view(EPISODES, TURNS)
        for lam in (LAMBDA, 0.5):
            by_turn, _ = turn_gae(token_rewards, values, turns, responses, lam, 1.0)
            found[f"turn GAE at {lam}, {kind} critic"] = by_turn[turns[:-1]].view(EPISODES, TURNS)
    return {name: measure(estimate, exact) for name, estimate in found.items()}


def measure(estimate: Tensor, exact: Tensor) -> tuple[float, float]:
    """Correlation over all turns; mean of (estimate - exact), towards the exact one's sign, on the
    pivotal turn."""
    correlation = float(torch.corrcoef(torch.stack((estimate.flatten(), exact.flatten())))[0, 1])
    error = (estimate - exact)[:, PIVOT] * exact[:, PIVOT].sign()
    return correlation, float(error.mean())


def main() -> None:
    """Print the table, with 95 % intervals over the batches."""
    generator = torch.Generator().manual_seed(0)
    batches = [play(generator) for _ in range(BATCHES)]
    print(
        "| advantage | correlation with the exact one | bias on the pivotal turn |\n|---|---|---|"
    )
    for name in batches[0]:
        cells = []
        for place in (0, 1):
            figures = torch.tensor([batch[name][place] for batch in batches])
            cells.append(
                f"{figures.mean():.3f} ± {1.96 * float(figures.std()) / math.sqrt(BATCHES):.3f}"
            )
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()

"""The reward decay that lambda_critic < 1 causes over long delays, with nothing in it but the algorithms themselves.

One token decides: the good one is rewarded with +1 nine times in ten, the bad one one time in ten, else -1. T - 1
filler tokens without any choice follow before the reward comes. The critic is a table with an entry for each state, so
nothing but the value targets can be at fault: with lambda_critic < 1 the reward enters the target of the first token
with weight lambda_critic^T (VC-PPO, arXiv 2503.01491), and has to travel back through the table update by update; with
lambda_critic = 1 the target is the return itself. Advantages and targets come from `decoupled_gae`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda
from vapo_megatron.algorithms.segments import place_terminal

RESPONSES = 32  # of a seed, each iteration
CRITIC_STEP = 0.2  # share of the way to its mean target that a table entry moves in an iteration
POLICY_STEP = 0.5  # of the logit of the good token, along the policy gradient
START_LOGIT = -1.4  # the good token is chosen one time in five
SUCCESS = (0.1, 0.9)  # of the bad and of the good token
LEARNT = 0.9  # chance of the good token from which on it counts as learnt


@dataclass(frozen=True)
class Setting:
    """Lambdas of an experiment; the policy's may follow the length (alpha = 0.05, as in VAPO)."""

    name: str
    lambda_policy: float | Literal["length_adaptive"]
    lambda_critic: float


SETTINGS = (
    Setting("0.95 for both (PPO)", 0.95, 0.95),
    Setting("critic 0.99, policy 0.95", 0.95, 0.99),
    Setting("critic 1, policy 0.95 (VC-PPO)", 0.95, 1.0),
    Setting("critic 1, policy length-adaptive (VAPO)", "length_adaptive", 1.0),
)


@dataclass
class Course:
    """What happened at one setting and delay: chance [seed][iteration] of the good token, value error by position.

    value_error holds the mean |V - V*| over seeds at each token of a response that begins with the good token, after
    `measured_at` iterations; V* is the expected return 2 * 0.9 - 1 = 0.8.
    """

    setting: str
    tokens: int
    chance: list[list[float]] = field(default_factory=list)
    value_error: list[float] = field(default_factory=list)
    measured_at: int = 0

    def learnt_after(self) -> list[int | None]:
        """Of each seed, iterations until the good token is learnt; None where it never was."""
        return [next((i for i, p in enumerate(seed) if p >= LEARNT), None) for seed in self.chance]


def measure_decay(
    delays: Sequence[int] = (25, 50, 100, 200, 400), seeds: int = 5, iterations: int = 160, measured_at: int = 30
) -> list[Course]:
    """Every setting at every delay."""
    return [learn(setting, tokens, seeds, iterations, measured_at) for setting in SETTINGS for tokens in delays]


def learn(setting: Setting, tokens: int, seeds: int, iterations: int, measured_at: int) -> Course:
    """Policy gradient on the first token and temporal-difference learning of the table, all seeds side by side."""
    generator = torch.Generator().manual_seed(tokens)
    course = Course(setting.name, tokens, [[] for _ in range(seeds)], measured_at=measured_at)
    responses = seeds * RESPONSES
    owner = torch.arange(seeds).repeat_interleave(RESPONSES)
    bounds = torch.arange(responses + 1) * tokens
    if setting.lambda_policy == "length_adaptive":
        lam = length_adaptive_lambda(torch.full((responses,), tokens), alpha=0.05)
    else:
        lam = torch.full((responses,), setting.lambda_policy)
    logit = torch.full((seeds,), START_LOGIT)
    table = torch.zeros(seeds * 2 * tokens)  # of seed s after first token a, before token t: at (2 s + a) T + t
    for iteration in range(iterations):
        chance = logit.sigmoid()
        for seed, p in enumerate(chance.tolist()):
            course.chance[seed].append(p)
        if iteration == measured_at:
            good = table.view(seeds, 2, tokens)[:, 1]
            course.value_error = (good - (2 * SUCCESS[1] - 1)).abs().mean(0).tolist()[1:]
        choice = (torch.rand(responses, generator=generator) < chance[owner]).long()
        success = torch.rand(responses, generator=generator) < torch.tensor(SUCCESS)[choice]
        # The state before the first token is one whatever is chosen: entry 0 of the bad branch.
        states = ((2 * owner + choice) * tokens)[:, None] + torch.arange(tokens)
        states[:, 0] = 2 * owner * tokens
        advantages, targets = decoupled_gae(
            place_terminal(torch.where(success, 1.0, -1.0), bounds, responses * tokens),
            table[states].flatten(),
            bounds,
            lam,
            setting.lambda_critic,
        )
        first = advantages.view(responses, tokens)[:, 0]
        gradient = torch.zeros(seeds).index_add_(0, owner, first * (choice - chance[owner])) / RESPONSES
        logit = logit + POLICY_STEP * gradient
        visited = states.flatten()
        counts = torch.zeros_like(table).index_add_(0, visited, torch.ones(len(visited)))
        means = torch.zeros_like(table).index_add_(0, visited, targets) / counts.clamp(min=1)
        table = torch.where(counts > 0, table + CRITIC_STEP * (means - table), table)
    return course


def summary(courses: Sequence[Course]) -> list[dict[str, Any]]:
    """A row for each setting and delay: iterations until learnt (median, least, most), seeds that never learnt."""
    rows = []
    for course in courses:
        found = sorted(count for count in course.learnt_after() if count is not None)
        never = len(course.chance) - len(found)
        rows.append(
            {
                "setting": course.setting,
                "tokens": course.tokens,
                "median": found[len(found) // 2] if never < len(course.chance) / 2 else None,
                "least": found[0] if found else None,
                "most": found[-1] if found and not never else None,
                "never": never,
                "final_chance": sum(seed[-1] for seed in course.chance) / len(course.chance),
                "value_error_first": course.value_error[0] if course.value_error else None,
            }
        )
    return rows

"""A task of tokens small enough for every value to be counted: what estimates from samples are
measured against.

In each of STATES states some words stay, others lead to another state, by a table. After every word
the response ends with chance 1 / MEAN_LENGTH, whatever the word, with reward 1 in half of the
states and -1 in the others. A response of LONGEST tokens that has not ended is worth -1. The policy
is a table of logits, states by words; a value is one of a place in the response and a state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

STATES, WORDS, MEAN_LENGTH, LONGEST = 12, 5, 24, 64


@dataclass(frozen=True)
class Responses:
    """S packed responses of T tokens.

    Attributes:
        cu_seqlens: int64 [S + 1].
        places: int64 [T], tokens before this one.
        states: int64 [T], the state before it.
        words: int64 [T].
        rewards: float32 [T].
    """

    cu_seqlens: Tensor
    places: Tensor
    states: Tensor
    words: Tensor
    rewards: Tensor

    @property
    def cells(self) -> Tensor:
        """int64 [T], the entry of a flat table of values that each token reads."""
        return self.places * STATES + self.states


class TokenMdp:
    """Transitions and rewards drawn from a seed; everything else follows from them."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        moves = torch.rand(STATES, WORDS, generator=self.random) < 0.35
        elsewhere = torch.randint(STATES, (STATES, WORDS), generator=self.random)
        self.following = torch.where(moves, elsewhere, torch.arange(STATES)[:, None])
        # A ring through all states: none of them keeps a response for good.
        self.following[:, 0] = torch.arange(1, STATES + 1) % STATES
        self.reward = torch.where(
            torch.randperm(STATES, generator=self.random) < STATES // 2, 1.0, -1.0
        ).double()

    def first_policy(self) -> Tensor:
        """Logits, float64 [STATES, WORDS]."""
        return torch.randn(STATES, WORDS, generator=self.random, dtype=torch.float64)

    def q_values(self, logits: Tensor) -> Tensor:
        """Expected reward of each word, float64 [LONGEST, STATES, WORDS]."""
        chances, q = logits.softmax(-1), torch.empty(LONGEST, STATES, WORDS, dtype=torch.float64)
        later = torch.full((STATES,), -1.0, dtype=torch.float64)
        for place in range(LONGEST - 1, -1, -1):
            q[place] = (self.reward / MEAN_LENGTH + later * (1 - 1 / MEAN_LENGTH))[self.following]
            later = (chances * q[place]).sum(-1)
        return q

    def values(self, logits: Tensor) -> Tensor:
        """Expected reward of each place and state, float64 [LONGEST, STATES]."""
        return (self.q_values(logits) * logits.softmax(-1)).sum(-1)

    def draw(self, logits: Tensor, responses: int) -> Responses:
        """Responses of a policy to first states that are all equally likely.

        Logits [P, STATES, WORDS] of several policies give `responses` of each, one policy after
        another, that begin in the same states and end at the same places.
        """
        policies = logits.view(-1, STATES, WORDS)
        sums = policies.softmax(-1).cumsum(-1).flatten(0, 1)
        copies = len(policies)
        rows = torch.arange(copies).repeat_interleave(responses) * STATES
        state = torch.randint(STATES, (responses,), generator=self.random).repeat(copies)
        responses *= copies
        alive = torch.ones(responses, dtype=torch.bool)
        ends = (
            torch.rand(responses // copies, LONGEST, generator=self.random) < 1 / MEAN_LENGTH
        ).repeat(copies, 1)
        chance = torch.rand(responses, LONGEST, generator=self.random, dtype=torch.float64)
        columns = []
        for place in range(LONGEST):
            word = (chance[:, place, None] > sums[rows + state]).sum(1).clamp(max=WORDS - 1)
            columns.append((state, word, alive))
            alive = alive & ~ends[:, place]
            state = self.following[state, word]
        states, words, inside = (torch.stack(column, 1) for column in zip(*columns, strict=True))
        places = torch.arange(LONGEST).expand_as(states)
        every, last = torch.arange(responses), inside.sum(1) - 1
        outcome = self.reward[self.following[states[every, last], words[every, last]]]
        rewards = torch.zeros(responses, LONGEST)
        rewards[every, last] = torch.where(ends[every, last], outcome, -1.0).float()
        bounds = torch.nn.functional.pad(inside.sum(1).cumsum(0), (1, 0))
        return Responses(bounds, places[inside], states[inside], words[inside], rewards[inside])

    def improved(self, logits: Tensor, kl: float, responses: int = 512) -> Tensor:
        """The policy after a step along its sampled gradient, as long as moves it by `kl` nats per
        token."""
        found, log_chances = self.draw(logits, responses), logits.log_softmax(-1)
        q = self.q_values(logits)
        advantages = (q - self.values(logits)[..., None])[found.places, found.states, found.words]
        scores = torch.nn.functional.one_hot(found.words, WORDS) - log_chances[found.states].exp()
        gradient = torch.zeros_like(logits).index_add_(
            0, found.states, advantages[:, None] * scores
        )
        step = gradient / gradient.norm()
        scale = 1.0
        for _ in range(8):
            moved = (logits + scale * step).log_softmax(-1)
            divergence = (log_chances.exp() * (log_chances - moved)).sum(-1)[found.states].mean()
            scale *= float((kl / divergence).sqrt())
        return logits + scale * step

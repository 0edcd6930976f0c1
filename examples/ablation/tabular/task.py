"""A token MDP in which a response takes 20 to 400 tokens, and a slip shows only at the end of its
step.

A response works off `steps` steps of m tokens each, where m is its prompt's: the first token of a
step is a decision, the others are filler without any choice. A decision is right, a slip, or stops
the response there ("ends at any token"). A response without a slip is correct, any other is correct
by luck. Some prompts need an *insight*: an early decision that the policy gets right rarely, behind
which stand states that no critic has seen much of.

    [d . . .] [d . . .] ... [d . . .] # EOS        d decision, . filler, # EOS answer; m = 4
          ^ seen: from here on a critic can tell that the decision was a slip

Accuracy is not sampled but computed exactly. All seeds run side by side, each from a generator of
its own: what a seed gives does not depend on the others beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vapo_megatron.algorithms.selection import informative_groups

from .settings import ACTIONS, ANSWER_TOKENS, EASY, HARD, SOLVED, STOP, Setting


@dataclass
class Tasks:
    """The prompts and the starting policy of every seed."""

    length: Tensor  # int64 [seeds, prompts], index into step_tokens
    hard: Tensor  # bool [seeds, prompts]
    insight_at: Tensor  # int64 [seeds, prompts], the step; `steps` for an easy prompt
    skill: Tensor  # int64 [seeds, prompts, steps]
    right: Tensor  # int64 [seeds, skills], index of the right action
    logits: Tensor  # [seeds, skills, ACTIONS]
    actor_features: Tensor  # [seeds, skills, features]
    critic_features: Tensor  # [seeds, states, features]
    reward_model: Tensor  # [seeds, states, 1]


def make_tasks(s: Setting, seeds: Sequence[int]) -> Tasks:
    """What the task is for each seed."""
    parts = [_make_task(s, torch.Generator().manual_seed(seed)) for seed in seeds]
    return Tasks(*(torch.stack(column) for column in zip(*parts, strict=True)))


def _make_task(s: Setting, g: torch.Generator) -> tuple[Tensor, ...]:
    lengths = len(s.step_tokens)
    length = torch.arange(s.prompts) % lengths
    hard = torch.rand(s.prompts, generator=g) < s.hard_share
    pools = 1 if s.shared_skills else lengths
    skill = torch.randint(s.skills, (s.prompts, s.steps), generator=g)
    skill = skill + s.skills * (length % pools)[:, None]
    pool = length % pools
    fork_at = torch.rand(s.prompts, s.steps, generator=g).argsort(1)[:, : s.forks]
    fork = s.skills * pools + s.fork_skills * pool[:, None]
    fork = fork + torch.randint(s.fork_skills, fork_at.shape, generator=g)
    skill = skill.scatter(1, fork_at, fork)
    first_fork, ordinary = s.skills * pools, (s.skills + s.fork_skills) * pools
    if s.insights:
        insight = (
            ordinary + s.insights * pool + torch.randint(s.insights, (s.prompts,), generator=g)
        )
        skills = ordinary + s.insights * pools
    else:
        insight = ordinary + torch.arange(s.prompts)
        skills = ordinary + s.prompts
    insight_at = torch.randint(s.insight_step, (s.prompts,), generator=g)
    insight_at = torch.where(hard, insight_at, s.steps)
    skill = torch.where(torch.arange(s.steps) == insight_at[:, None], insight[:, None], skill)
    right = torch.randint(STOP, (skills,), generator=g)
    chances = torch.full((skills, ACTIONS), s.slip / 2)
    chances[torch.arange(skills), right] = 1 - s.slip - s.stop
    low, high = s.fork_right
    at_fork = low + (high - low) * torch.rand(ordinary - first_fork, generator=g)
    forked = torch.arange(first_fork, ordinary)
    chances[forked] = ((1 - s.stop - at_fork) * 0.1)[:, None]
    chances[forked, (right[forked] + 1) % STOP] = (1 - s.stop - at_fork) * 0.9
    chances[forked, right[forked]] = at_fork
    chances[ordinary:] = s.rare / 2
    chances[torch.arange(ordinary, skills), right[ordinary:]] = s.rare
    chances[torch.arange(ordinary, skills), (right[ordinary:] + 1) % STOP] = (
        1 - 1.5 * s.rare - s.stop
    )
    chances[:, STOP] = s.stop
    scale = s.coupling / math.sqrt(s.features)
    states = lengths * 3 * (s.steps + 1) * s.marks
    actor_features = torch.randn(skills, s.features, generator=g) * scale
    if s.common:
        actor_features[:, 0] = s.common
    return (
        length,
        hard,
        insight_at,
        skill,
        right,
        chances.log(),
        actor_features,
        critic_features(s, torch.randn(states, s.features, generator=g) * scale),
        # A reward model judges what has ended; of a prefix it says -1.
        -1 + 0.05 * torch.randn(states, 1, generator=g),
    )


def critic_features(s: Setting, random: Tensor) -> Tensor:
    """What states share for a critic, [states, features]; with partial credit how far the response
    is, and its score so far, in place of chance."""
    if not s.partial_credit:
        return random
    kinds = len(s.step_tokens) * 3
    progress = (torch.arange(s.steps + 1) / s.steps)[:, None].expand(-1, s.marks)
    slips = (torch.arange(s.marks) / s.forks)[None].expand(s.steps + 1, -1)
    stopped = (torch.arange(s.marks) == s.marks - 1).float()[None].expand(s.steps + 1, -1)
    return (
        torch.stack((torch.ones_like(slips), progress, slips, stopped), -1)
        .flatten(0, 1)
        .repeat(kinds, 1)
    )


@dataclass
class Rollout:
    """Responses of all seeds, [seeds, samples]; tokens are packed, seed by seed."""

    prompt: Tensor  # int64, number of the prompt
    group: Tensor  # int64, different for each group of each seed
    skill: Tensor  # int64 [..., steps]
    action: Tensor  # int64 [..., steps]
    decided: Tensor  # bool [..., steps], whether the response got there
    logprobs: Tensor  # [..., steps] of the policy that sampled
    correct: Tensor  # bool
    tokens: Tensor  # int64, length of each response
    bounds: Tensor  # int64 [seeds * samples + 1]
    state: Tensor  # int64 [T], index into the flattened value tables
    decision_token: Tensor  # int64 [..., steps], where it stands among [T]; 0 where none was made
    score: Tensor  # float32, 1 or 0; with partial credit the share of forks that were decided right

    @property
    def rewards(self) -> Tensor:
        """From -1 to +1, [seeds * samples]."""
        return (2 * self.score - 1).flatten()

    def of_seed(self, seed: int) -> tuple[slice, slice, Tensor]:
        """A seed's responses and tokens among those of all seeds, and the bounds of its responses
        among its tokens, int64 [samples + 1]."""
        samples = self.group.shape[1]
        responses = slice(seed * samples, (seed + 1) * samples)
        bounds = self.bounds[responses.start : responses.stop + 1]
        tokens = slice(int(bounds[0]), int(bounds[-1]))
        return responses, tokens, bounds - bounds[0]


@torch.no_grad()
def sample(
    s: Setting,
    tasks: Tasks,
    logits: Tensor,
    generators: list[torch.Generator],
    groups: bool,
    times: int = 1,
) -> Rollout:
    """Draw prompts and responses; `groups` says whether a prompt is answered several times."""
    seeds, samples = len(generators), s.samples * times
    repeat = s.samples_per_prompt if groups else 1
    prompt = torch.stack(
        [_draw(s.prompts, samples // repeat, g) for g in generators]
    ).repeat_interleave(repeat, 1)
    group = (
        torch.arange(samples // repeat).repeat_interleave(repeat)
        + (samples * torch.arange(seeds))[:, None]
    )
    uniform = torch.stack([torch.rand(samples, s.steps + 1, generator=g) for g in generators])

    seed = torch.arange(seeds)[:, None]
    skill = tasks.skill[seed, prompt]
    logp = logits.log_softmax(-1)[seed[..., None], skill]  # [seeds, samples, steps, ACTIONS]
    action = (uniform[..., :-1, None] > logp.exp().cumsum(-1)[..., :-1]).sum(-1)
    logprobs = logp.gather(-1, action[..., None]).squeeze(-1)
    stops = (action == STOP).long()
    decided = stops.cumsum(-1) - stops == 0
    stopped = stops.any(-1)
    done = torch.where(stopped, (decided.long().sum(-1) - 1), s.steps)  # steps worked off
    right = action == tasks.right[seed[..., None], skill]
    before = torch.arange(s.steps) < done[..., None]
    slipped = ~right & before & (is_fork(s, skill) if s.partial_credit else True)
    slips = slipped.long().cumsum(-1).clamp(max=s.marks - 2)
    broken = torch.cat([torch.zeros_like(slips[..., :1]), slips], -1)  # [..., steps + 1]
    luck = torch.where(
        stopped, s.luck_stop, torch.where(broken[..., -1] > 0, s.luck_broken, 1 - s.noise)
    )
    correct = uniform[..., -1] < luck
    score = correct.float()
    if s.partial_credit:
        score = (right & before & is_fork(s, skill)).sum(-1) / s.forks
        correct = score == 1

    index = tasks.length[seed, prompt]
    width = torch.tensor(s.step_tokens)[index]
    tokens = done * width + stopped + ANSWER_TOKENS
    flat_tokens = tokens.flatten()
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), flat_tokens.cumsum(0)])

    # What a critic sees before every token.
    insight_at = tasks.insight_at[seed, prompt]
    solved = (torch.arange(s.steps + 1) > insight_at[..., None]) & (broken == 0)
    kind = torch.where(tasks.hard[seed, prompt][..., None], torch.where(solved, SOLVED, HARD), EASY)
    steps = torch.arange(s.steps + 1)
    owner = torch.arange(seeds * samples).repeat_interleave(flat_tokens)
    position = torch.arange(len(owner)) - bounds[:-1].repeat_interleave(flat_tokens)
    width_t, done_t = width.flatten()[owner], done.flatten()[owner]
    step = position // width_t
    ended = step >= done_t
    offset = position - step * width_t
    step = torch.where(ended, done_t, step)
    later = (offset >= (s.seen * width_t).ceil().clamp(min=1)) & ~ended
    entry = (kind * (s.steps + 1) + steps) * s.marks + broken
    seen_entry = (kind[..., 1:] * (s.steps + 1) + steps[:-1]) * s.marks + broken[..., 1:]
    both = torch.stack([entry, torch.cat([seen_entry, entry[..., -1:]], -1)], -1).flatten()
    state = both[(owner * (s.steps + 1) + step) * 2 + later]
    end_of_stop = stopped.flatten()[owner] & (position > done_t * width_t)
    state = torch.where(end_of_stop, step * s.marks + s.marks - 1, state)
    per_length = 3 * (s.steps + 1) * s.marks
    state = (
        state
        + per_length * index.flatten()[owner]
        + (owner // samples) * per_length * len(s.step_tokens)
    )

    decision = bounds[:-1].view(seeds, samples, 1) + torch.arange(s.steps) * width[..., None]
    return Rollout(
        prompt,
        group,
        skill,
        action,
        decided,
        logprobs,
        correct,
        tokens,
        bounds,
        state,
        torch.where(decided, decision, 0),
        score,
    )


def is_fork(s: Setting, skill: Tensor) -> Tensor:
    """Whether a step needs a fork's skill, of the shape of skill."""
    pools = 1 if s.shared_skills else len(s.step_tokens)
    return (skill >= s.skills * pools) & (skill < (s.skills + s.fork_skills) * pools)


def _draw(population: int, count: int, g: torch.Generator) -> Tensor:
    """`count` of range(population), as evenly as can be."""
    return torch.cat(
        [torch.randperm(population, generator=g) for _ in range(-(-count // population))]
    )[:count]


@torch.no_grad()
def keep_informative(rollout: Rollout, samples: int) -> tuple[Rollout, Tensor]:
    """The first `samples` responses of groups that are neither all right nor all wrong, filled up
    with others.

    Returns them and bool [seeds, samples], which of them are informative. Packed tokens are left as
    they are.
    """
    informative = informative_groups(rollout.correct.flatten(), rollout.group.flatten()).view(
        rollout.correct.shape
    )
    order = (~informative).long().argsort(dim=1, stable=True)[:, :samples]
    picked = {
        name: getattr(rollout, name).gather(1, order)
        if getattr(rollout, name).dim() == 2
        else getattr(rollout, name).gather(
            1, order[..., None].expand(-1, -1, getattr(rollout, name).shape[2])
        )
        for name in [f.name for f in fields(rollout) if f.name not in ("bounds", "state")]
    }
    return replace(rollout, **picked), informative.gather(1, order)


@torch.no_grad()
def exact_accuracy(s: Setting, tasks: Tasks, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Chance of being correct, or mean score: over prompts [seeds], and over those of each length
    [seeds, lengths]."""
    seed = torch.arange(len(logits))[:, None, None]
    chances = logits.softmax(-1)[seed, tasks.skill]
    right = chances.gather(-1, tasks.right[seed, tasks.skill][..., None]).squeeze(-1)
    going = 1 - chances[..., STOP]
    whole, on = right.prod(-1), going.prod(-1)
    if s.partial_credit:
        reached = torch.cat([torch.ones_like(going[..., :1]), going[..., :-1].cumprod(-1)], -1)
        chance = (right * reached * is_fork(s, tasks.skill)).sum(-1) / s.forks
    else:
        chance = whole * (1 - s.noise) + (on - whole) * s.luck_broken + (1 - on) * s.luck_stop
    # Prompts have the same lengths at all seeds.
    by_length = torch.stack(
        [chance[:, tasks.length[0] == i].mean(1) for i in range(len(s.step_tokens))], 1
    )
    return chance.mean(1), by_length

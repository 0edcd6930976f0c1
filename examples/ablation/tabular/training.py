"""A policy and a critic that are tables, trained by the project's own lambdas, advantages, losses
and weights.

A critic is a table over (tokens per step, kind of prompt, step, broken or not) plus a few features
that states share; the actor is a table over skills plus features that skills share, so that states
and skills disturb each other as in a network. Both learn by AdamW, critic : actor = 2 : 1. Shapes
begin with [seeds]: seeds run side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from vapo_megatron.algorithms import baselines, calibration, tether
from vapo_megatron.algorithms.advantages import batch_baseline, grpo
from vapo_megatron.algorithms.aggregation import nll_weights, token_weights
from vapo_megatron.algorithms.critic_metrics import Figures, explained, figures_of
from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda, segmented_gae
from vapo_megatron.algorithms.policy_loss import clip_indicators, ppo_clip
from vapo_megatron.algorithms.segments import place_terminal
from vapo_megatron.algorithms.selection import split_minibatches
from vapo_megatron.algorithms.value_loss import value_mse

from .learnt_table import Adam, Table
from .settings import Row, Setting
from .task import Rollout, exact_accuracy, keep_informative, make_tasks, sample


@dataclass
class Course:
    """What was measured of one seed of a row, one entry per rollout (the first four also before the
    first)."""

    accuracy: list[float] = field(default_factory=list)
    by_length: list[list[float]] = field(default_factory=list)  # for each of step_tokens
    insight: list[float] = field(default_factory=list)  # mean chance of the insight in hard prompts
    responses: list[int] = field(default_factory=list)  # so far, value pretraining counted
    metrics: dict[str, list[float]] = field(default_factory=dict)


def run_code() -> ModuleType:
    """What rows have in common with a run's own code (regression.py). It imports Megatron, which
    takes seconds, and which most rows do without."""
    from . import regression

    return regression


class Training:
    """One row of one setting, all seeds side by side."""

    def __init__(self, s: Setting, row: Row, seeds: Sequence[int]) -> None:
        self.s, self.row, self.seeds = s, row, seeds
        self.tasks = make_tasks(s, seeds)
        self.generators = [torch.Generator().manual_seed(1_000_003 * (seed + 1)) for seed in seeds]
        self.actor = Table(
            self.tasks.logits, self.tasks.actor_features, s.own, row.lr * s.lr, s.warmup
        )
        critic_lr = s.critic_ratio * s.lr
        start = self.tasks.reward_model
        start = torch.zeros_like(start) if row.critic in ("zero", "noise") else start
        own = s.own and not s.partial_credit
        self.critic = Table(start, self.tasks.critic_features, own, critic_lr, s.warmup)
        self.past: list[calibration.Moments | None] = [None for _ in seeds]
        self.mixture = [0.0 for _ in seeds]  # TETHER's rho
        if row.critic == "regression":
            self.regressions = [run_code().value_regression(row.features) for _ in seeds]
        self.tracked = torch.zeros(
            2, len(seeds), s.prompts, dtype=torch.float64
        )  # sums of returns, of responses
        self.states = self.tasks.reward_model.shape[1]
        self.courses, self.responses = [Course() for _ in seeds], 0

    def run(self) -> list[Course]:
        """Value pretraining where the row has it, then the rollouts."""
        if self.row.critic == "pretrained":
            self.pretrain()
        self.measure()
        for number in range(self.rollouts):
            self.step(number)
            self.measure()
        return self.courses

    @property
    def rollouts(self) -> int:
        """The setting's, and as many more as value pretraining would have drawn for where there is
        no need of it."""
        s = self.s
        if self.row.critic in ("pretrained", "reward_model"):
            return s.rollouts
        times = s.oversampling if self.row.dynamic_sampling else 1
        return max(s.rollouts, -(-(s.rollouts + s.pretraining) // times))

    def measure(self) -> None:
        """Note how good the policies are."""
        accuracy, by_length = exact_accuracy(self.s, self.tasks, self.actor().detach())
        found = zip(
            self.courses,
            accuracy.tolist(),
            by_length.tolist(),
            self.insight().tolist(),
            strict=True,
        )
        for course, right, by_length_here, insight in found:
            course.accuracy.append(right)
            course.by_length.append(by_length_here)
            course.insight.append(insight)
            course.responses.append(self.responses)

    @torch.no_grad()
    def insight(self) -> Tensor:
        """Mean chance of the insight that a hard prompt needs, [seeds]; 0 where there are none."""
        tasks, seed = self.tasks, torch.arange(len(self.seeds))[:, None]
        skill = tasks.skill.gather(
            2, tasks.insight_at.clamp(max=self.s.steps - 1)[..., None]
        ).squeeze(2)
        chance = (
            self.actor()
            .softmax(-1)[seed, skill]
            .gather(2, tasks.right[seed, skill][..., None])
            .squeeze(2)
        )
        return (chance * tasks.hard).sum(1) / tasks.hard.sum(1).clamp(min=1)

    def note(self, **metrics: Tensor) -> None:
        """Metrics of this rollout, [seeds]."""
        for name, values in metrics.items():
            for course, value in zip(self.courses, values.tolist(), strict=True):
                course.metrics.setdefault(name, []).append(value)

    def pretrain(self) -> None:
        """Fit the critic to the returns of the starting policy; its optimizer starts anew
        afterwards."""
        s = self.s
        kept, self.critic.optimizer.lr = self.critic.optimizer.lr, s.pretraining_lr
        logits = self.actor().detach()
        for number in range(s.pretraining):
            rollout = sample(s, self.tasks, logits, self.generators, self.row.groups)
            self.responses += s.samples
            returns = rollout.rewards.repeat_interleave(rollout.tokens.flatten())
            if number == s.pretraining - 1:
                self.note(pretrained_explains=self.explained(rollout, returns))
            for epoch in range(s.pretraining_epochs):
                batch_of = self.batches(rollout, number * s.pretraining_epochs + epoch)
                counts, means = self.value_sums(rollout, returns, batch_of)
                for batch in range(s.minibatches):
                    self.update_critic(counts[batch], means[batch])
        self.critic.optimizer = Adam(self.critic.optimizer.parameters, kept, s.warmup)

    def explained(self, rollout: Rollout, returns: Tensor) -> Tensor:
        """Explained variance of the returns, before the critic has seen them, [seeds]."""
        values = self.critic().detach().flatten()[rollout.state]
        ends = rollout.bounds[:: rollout.tokens.shape[1]].tolist()
        parts = [
            figures_of(values[a:b], returns[a:b], torch.tensor([0, b - a]))
            for a, b in pairwise(ends)
        ]
        return torch.stack([explained(Figures.read(part)) for part in parts])

    def batches(self, rollout: Rollout, number: int) -> Tensor:
        """int64 [samples]: the mini-batch of each response, the same for all seeds."""
        samples = rollout.group.shape[1]
        batch_of = torch.empty(samples, dtype=torch.int64)
        size = samples // self.s.minibatches
        for i, chosen in enumerate(
            split_minibatches(torch.arange(samples), size, "samples", number)
        ):
            batch_of[chosen] = i
        return batch_of

    def value_sums(
        self, rollout: Rollout, targets: Tensor, batch_of: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens and mean target of each state in each mini-batch, [minibatches, seeds, states].

        The gradient of the token mean of (V - R)^2 / 2 is that of the mean over states of (V - mean
        R)^2 / 2, weighted by tokens: that is all that is needed of a rollout.
        """
        seeds, size = len(self.seeds), self.s.minibatches * len(self.seeds) * self.states
        offset = (
            (batch_of * (seeds * self.states))
            .repeat(seeds)
            .repeat_interleave(rollout.tokens.flatten())
        )
        where = rollout.state + offset
        counts = torch.bincount(where, minlength=size).float()
        sums = torch.bincount(where, weights=targets.double(), minlength=size).float()
        shape = (self.s.minibatches, seeds, self.states)
        return counts.view(shape), (sums / counts.clamp(min=1)).view(shape)

    def update_critic(self, counts: Tensor, means: Tensor) -> None:
        """One step on a mini-batch."""
        losses = value_mse(self.critic().squeeze(-1), means) * counts
        self.critic.optimizer.step((losses.sum(1) / counts.sum(1)).sum())

    def policy_lambda(self, rollout: Rollout) -> float | Tensor:
        """Lambda of the advantages, by response [seeds * samples] where it adapts to lengths."""
        row = self.row
        if row.lambda_policy == "adaptive":
            lengths = rollout.tokens.flatten()
            return length_adaptive_lambda(lengths, self.s.alpha, floor=row.lambda_floor)
        return self.s.fixed_lambda if row.lambda_policy == "fixed" else row.lambda_policy

    @torch.no_grad()
    def advantages(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Advantages of decisions [seeds, samples, steps], and value targets of tokens [T]."""
        s, row = self.s, self.row
        values = self.critic().flatten()[rollout.state]
        if row.critic == "noise":
            generator = torch.Generator().manual_seed(self.responses)
            values = torch.randn(values.shape, generator=generator)
        lam = self.policy_lambda(rollout)
        lam_critic = s.fixed_lambda if row.lambda_critic == "fixed" else row.lambda_critic
        rewards = place_terminal(rollout.rewards, rollout.bounds, len(rollout.state))
        advantages, targets = decoupled_gae(rewards, values, rollout.bounds, lam, lam_critic)
        if row.calibration != "none":
            if not isinstance(lam, Tensor):
                lam = torch.full((len(rollout.rewards),), lam)
            parts = [
                self.calibrated(seed, rollout, values, rewards, lam)
                for seed in range(len(self.seeds))
            ]
            advantages = torch.cat([part for part, _ in parts])
            self.note(trust=torch.tensor([trust for _, trust in parts]))
        return advantages[rollout.decision_token], targets

    def calibrated(
        self, seed: int, rollout: Rollout, values: Tensor, rewards: Tensor, lam: Tensor
    ) -> tuple[Tensor, float]:
        """A = g GAE(V~) + (1 - g) (R - V~) of a seed's tokens, and g (TETHER's rho); as
        training/past_returns.py has it on ranks."""
        of, tokens, bounds = rollout.of_seed(seed)
        returns = rollout.rewards[of]
        siblings, others = (
            mean(returns, rollout.group[seed])
            for mean in (baselines.siblings_mean, baselines.leave_one_out)
        )
        if self.row.tracker:
            siblings = self.track(seed, rollout)
        sums = calibration.response_sums(values[None, tokens], bounds)
        if self.row.calibration == "tether":
            trust = self.mixture[seed]
            baseline = tether.baseline(values[tokens], others, bounds, trust)
            best = tether.best_mixture(sums, returns, others)
            self.mixture[seed] = tether.after_step(trust, best)
            return segmented_gae(rewards[tokens], baseline, bounds, lam[of]), trust
        past = self.past[seed]
        fit = calibration.coefficients(past) if past is not None else None
        baseline, trust = calibration.baseline_and_trust(
            values[tokens], siblings, others, bounds, fit
        )
        trust = trust if self.row.calibration == "trust" else 1.0
        now = calibration.moments(sums, returns, siblings[None])
        self.past[seed] = now if past is None else past.followed_by(now)
        return calibration.trusted_advantages(
            rewards[tokens], baseline, bounds, lam[of], trust
        ), trust

    @torch.no_grad()
    def regressed(self, rollout: Rollout) -> Tensor:
        """Advantages of decisions over values by regression, [seeds, samples, steps]; as
        training/past_returns.py has it on ranks."""
        lam = self.policy_lambda(rollout)
        if not isinstance(lam, Tensor):
            lam = torch.full((len(rollout.rewards),), lam)
        rewards = place_terminal(rollout.rewards, rollout.bounds, len(rollout.state))
        advantages = []
        trusts = []
        explains = []
        for seed, batch in enumerate(run_code().seed_batches(rollout, self.actor())):
            past = self.regressions[seed]
            tracked = self.track(seed, rollout) if past.config.history else None
            values, trust, explained_variance = run_code().seed_values(batch, past, tracked)
            if self.row.calibration != "trust":
                trust = 1.0
            of, tokens, bounds = rollout.of_seed(seed)
            advantages.append(
                calibration.trusted_advantages(rewards[tokens], values, bounds, lam[of], trust)
            )
            trusts.append(trust)
            explains.append(explained_variance)
        self.note(trust=torch.tensor(trusts), critic_explains=torch.tensor(explains))
        return torch.cat(advantages)[rollout.decision_token]

    def step(self, number: int) -> None:
        """One rollout and its updates."""
        s, row = self.s, self.row
        times = s.oversampling if row.dynamic_sampling else 1
        rollout = sample(s, self.tasks, self.actor().detach(), self.generators, row.groups, times)
        self.responses += s.samples * times
        self.note(
            length=rollout.tokens.double().mean(1),
            longest=rollout.tokens.amax(1),
        )
        selected = torch.ones_like(rollout.correct)
        counts = means = None
        if row.critic == "none":
            if row.dynamic_sampling:
                rollout, selected = keep_informative(rollout, s.samples)
                self.note(informative=selected.double().mean(1))
            advantages = self.without_values(rollout)
            batch_of = self.batches(rollout, number)
        elif row.critic == "regression":
            advantages = self.regressed(rollout)
            batch_of = self.batches(rollout, number)
        else:
            batch_of = self.batches(rollout, number)
            returns = rollout.rewards.repeat_interleave(rollout.tokens.flatten())
            self.note(critic_explains=self.explained(rollout, returns))
            advantages, targets = self.advantages(rollout)
            counts, means = self.value_sums(rollout, targets, batch_of)
        order = batch_of.argsort(stable=True).view(s.minibatches, -1)
        clip_high = s.clip_high if row.clip_higher else s.clip_low
        clipped = torch.zeros(2, len(self.seeds))
        for batch, chosen in [*enumerate(order)] * s.epochs:
            if counts is not None and means is not None:
                self.update_critic(counts[batch], means[batch])
            indicators = self.update_actor(rollout, advantages, selected, chosen, clip_high)
            clipped += torch.stack(indicators)
        clipped /= s.minibatches * s.epochs
        self.note(clip_low=clipped[0], clip_high=clipped[1])

    def track(self, seed: int, rollout: Rollout) -> Tensor:
        """What earlier steps said of the prompt of each response of a seed, float64 [samples];
        these say it later."""
        sums, weights = self.tracked[:, seed]
        prompts, rewards = (
            rollout.prompt[seed],
            rollout.rewards.view(rollout.group.shape)[seed].double(),
        )
        prior = float(sums.sum() / weights.sum().clamp(min=1))
        values = baselines.tracked_values(sums, weights, prior)[prompts]
        counts = torch.bincount(prompts, minlength=len(sums)).double()
        answered = counts > 0
        returns = torch.bincount(prompts, rewards, minlength=len(sums))
        new = baselines.with_responses(sums, weights, returns, counts)
        self.tracked[:, seed] = torch.where(answered, torch.stack(new), self.tracked[:, seed])
        return values

    @torch.no_grad()
    def without_values(self, rollout: Rollout) -> Tensor:
        """Advantages of decisions without a critic, [seeds, samples, steps]."""
        if self.row.baseline == "tempo":
            batches = run_code().seed_batches(rollout, self.actor())
            by_seed = [run_code().tree_advantages(batch) for batch in batches]
            return torch.cat(by_seed)[rollout.decision_token]
        per_response = self.of_responses(rollout).view(rollout.correct.shape)
        return per_response[..., None].expand(rollout.logprobs.shape)

    def of_responses(self, rollout: Rollout) -> Tensor:
        """Advantages of whole responses without a critic, [seeds * samples]."""
        if self.row.tracker:
            values = torch.cat([self.track(seed, rollout) for seed in range(len(self.seeds))])
            return (rollout.rewards - values).float()
        if self.row.baseline == "grpo":
            return grpo(rollout.rewards, rollout.group.flatten())
        rewards = rollout.rewards.view(rollout.group.shape)
        return torch.cat(
            [batch_baseline(*each) for each in zip(rewards, rollout.group, strict=True)]
        )

    def update_actor(
        self,
        rollout: Rollout,
        advantages: Tensor,
        selected: Tensor,
        chosen: Tensor,
        clip_high: float,
    ) -> tuple[Tensor, Tensor]:
        """One step on a mini-batch; returns the shares of its decisions that are clipped below and
        above, [seeds].

        Padding tokens have one legal action: their ratio is 1 and their gradient 0, but they count
        in the weights.
        """
        s, row = self.s, self.row
        seed = torch.arange(len(self.seeds))[:, None, None]
        logits = self.actor().log_softmax(-1)
        logprobs = logits[seed, rollout.skill[:, chosen], rollout.action[:, chosen]]
        old, advantage = rollout.logprobs[:, chosen], advantages[:, chosen]
        decided, tokens, correct = (
            rollout.decided[:, chosen],
            rollout.tokens[:, chosen],
            rollout.correct[:, chosen],
        )
        kept = selected[:, chosen]
        weights = torch.vmap(
            lambda length, keep: token_weights(length, row.aggregation, selected=keep)
        )(tokens, kept)
        losses = ppo_clip(logprobs, old, advantage, s.clip_low, clip_high) * weights[..., None]
        if row.nll:
            positive_weights = torch.vmap(nll_weights)(tokens, correct)
            losses = losses - s.nll * logprobs * positive_weights[..., None]
        self.actor.optimizer.step(torch.where(decided, losses, 0).sum())
        cut = clip_indicators((logprobs - old).detach(), advantage, s.clip_low, clip_high)
        low, high, _ = ((bound * decided).sum((1, 2)) / decided.sum((1, 2)) for bound in cut)
        return low, high

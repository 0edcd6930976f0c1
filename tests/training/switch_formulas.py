"""One iteration under any switch of the section algorithm, response by response with transformers
in float64.

Like step_formulas, which has the presets, it shares nothing with the program but the config, the
recorded rollout and which responses each mini-batch had. Formulas are written out again from the
papers.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from step_formulas import AdamW, Critic, Policy, Response, State, differences
from torch import Tensor
from torch.nn import Parameter

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.policy import PolicyLossConfig

Group = list[int]
ADAM: dict[str, float] = {"lr": 5e-3, "eps": 1e-3}


def others_of(responses: Sequence[Response], s: int) -> Group:
    """The responses to the prompt of response s, itself included."""
    return [i for i, r in enumerate(responses) if r.group == responses[s].group]


def shaped(responses: Sequence[Response], config: AlgorithmConfig) -> list[float]:
    """The rewards that shaping makes."""
    found = []
    shaping = config.shaping
    for response in responses:
        reward = response.reward
        if shaping.soft_overlong is not None:
            longest = shaping.soft_overlong.max_length
            cache = shaping.soft_overlong.cache_length
            over = response.length - (longest - cache)
            reward -= min(max(over / cache, 0), 1)
        found.append(reward)
    return found


class ValueModel(Critic):
    """All outputs of a value head, and the values that they stand for."""

    def __init__(self, model_dir: Path, state: State, config: AlgorithmConfig) -> None:
        super().__init__(model_dir, state)
        self.loss = config.value_loss

    def outputs(self, response: Response) -> Tensor:
        hidden: Tensor = self.backbone(response.ids[None, :-1]).last_hidden_state[
            0, response.prompt - 1 :
        ]
        return hidden @ self.weight.T + self.bias

    def edges(self) -> Tensor:
        """Of the bins: `bins` of equal width, three of them outside low..high at either end."""
        config = self.loss
        width = (config.high - config.low) / (config.bins - 2 * 3)
        start = config.low - 3 * width
        return start + width * torch.arange(config.bins + 1, dtype=torch.float64)

    def head_values(self, response: Response) -> Tensor:
        """The value of each state."""
        outputs = self.outputs(response)
        config = self.loss
        if config.kind == "hl_gauss":
            edges = self.edges()
            return outputs.softmax(-1) @ ((edges[1:] + edges[:-1]) / 2)
        if config.squash == "arctan":
            return (
                config.low
                + (config.high - config.low) * (outputs[:, 0].arctan() + math.pi / 2) / math.pi
            )
        if config.squash != "none":
            middle = (config.low + config.high) / 2
            half = (config.high - config.low) / 2
            return middle + half * torch.tanh(outputs[:, 0] / half)
        return outputs[:, 0]

    def values_at(self, responses: Sequence[Response], s: int) -> Tensor:
        return self.head_values(responses[s])

    def token_losses(self, response: Response, target: Tensor, old: Tensor) -> Tensor:
        config = self.loss
        if config.kind == "hl_gauss":
            edges = self.edges()
            logs = self.outputs(response).log_softmax(-1)
            normal = torch.distributions.Normal(target[:, None], 0.75 * float(edges[1] - edges[0]))
            mass = normal.cdf(edges[None]).diff(dim=-1)
            return -(mass / mass.sum(-1, keepdim=True) * logs).sum(-1)
        values = self.head_values(response)
        losses = (values - target) ** 2 / 2
        if config.kind == "clipped":
            near = old + (values - old).clamp(-config.clip, config.clip)
            losses = torch.maximum(losses, (near - target) ** 2 / 2)
        return losses


def gae(rewards: Tensor, values: Tensor, lam: float, gamma: float, after: float) -> Tensor:
    """after: the value of what follows the last token."""
    found = torch.zeros_like(rewards)
    following = 0.0
    for t in reversed(range(len(rewards))):
        value_after = values[t + 1] if t + 1 < len(rewards) else after
        following = rewards[t] + gamma * value_after - values[t] + gamma * lam * following
        found[t] = following
    return found


def lambda_of(choice: Any, length: int, config: AlgorithmConfig) -> float:
    if choice != "length_adaptive":
        return float(choice)
    advantage = config.advantage
    return min(
        max(1 - 1 / (advantage.length_adaptive_alpha * length), advantage.length_adaptive_floor), 1
    )


def group_advantage(
    estimator: str, s: int, group: Group, totals: list[float], responses: Sequence[Response]
) -> float:
    rewards = [totals[i] for i in group]
    mean = sum(rewards) / len(rewards)
    own = totals[s]
    if estimator in ("grpo", "tempo"):
        return (own - mean) / (
            math.sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1)) + 1e-6
        )
    if estimator in ("dr_grpo", "group_baseline"):
        return own - mean
    if estimator in ("rloo", "batch_baseline"):  # alike where every group has two
        return own - (sum(rewards) - own) / (len(rewards) - 1)
    if estimator == "remax":
        return own - responses[s].greedy
    if estimator == "raft":
        return float(s == next(i for i in group if totals[i] == max(rewards)))
    raise NotImplementedError(f"write the formula of the estimator {estimator} here")


class Estimates:
    """Advantages, value targets and which responses carry loss, of one rollout."""

    def __init__(
        self,
        responses: list[Response],
        config: AlgorithmConfig,
        old: list[Tensor],
        ref: list[Tensor],
        values: list[Tensor] | None,
    ) -> None:
        self.rewards = shaped(responses, config)
        self.selected = [self._carries_loss(r, config) for r in responses]
        self.advantages: list[Tensor] = []
        self.targets: list[Tensor] = []
        penalty = [
            config.kl.coef * (o - r) if config.kl.placement == "reward" else o * 0
            for o, r in zip(old, ref, strict=True)
        ]
        totals = [reward - float(p.sum()) for reward, p in zip(self.rewards, penalty, strict=True)]
        advantage = config.advantage
        for s, response in enumerate(responses):
            rewards = -penalty[s]
            bootstraps = config.shaping.truncated in ("bootstrap", "window") and response.truncated
            rewards[-1] += 0.0 if bootstraps else self.rewards[s]
            if values is not None:
                after = float(values[s][-1]) if bootstraps else 0.0
                if advantage.credit == "turn":  # here a response is one turn
                    gain = rewards.sum() + advantage.gamma * after - values[s][0]
                    self.advantages.append(gain.expand(response.length).clone())
                    self.targets.append((gain + values[s][0]).expand(response.length))
                    continue
                if advantage.off_policy == "vtrace":
                    weights = (old[s] - response.rollout).exp().clamp(max=1.0)
                    self._vtrace(rewards, values[s], weights, after, response.length, config)
                    continue
                lam = lambda_of(advantage.lambda_policy, response.length, config)
                if advantage.calibration == "none":
                    self.advantages.append(gae(rewards, values[s], lam, advantage.gamma, after))
                else:  # no step came before: nothing is known of the critic
                    baseline = torch.full_like(rewards, self._others_mean(s, responses, config))
                    lam = 1.0 if advantage.calibration == "trust" else lam
                    self.advantages.append(gae(rewards, baseline, lam, 1.0, 0.0))
                lam = lambda_of(advantage.lambda_critic, response.length, config)
                self.targets.append(
                    gae(rewards, values[s], lam, advantage.gamma, after) + values[s]
                )
            elif advantage.estimator == "reinforce_pp":
                to_go = [
                    sum(
                        advantage.gamma ** (i - t) * float(rewards[i])
                        for i in range(t, len(rewards))
                    )
                    for t in range(len(rewards))
                ]
                self.advantages.append(torch.tensor(to_go, dtype=torch.float64))
            elif advantage.tracker:  # no step came before: a prompt has no history
                known = [i for i in self._known(responses, config) if i != s]
                mean = (
                    sum(totals[i] for i in known) / len(known)
                    if s in self._known(responses, config)
                    else 0.0
                )
                self.advantages.append(
                    torch.full((response.length,), totals[s] - mean, dtype=torch.float64)
                )
            elif advantage.estimator != "function":
                found = group_advantage(
                    advantage.estimator, s, others_of(responses, s), totals, responses
                )
                self.advantages.append(torch.full((response.length,), found, dtype=torch.float64))
                if advantage.estimator == "raft":
                    self.selected[s] = self.selected[s] and found > 0 and response.correct
        if advantage.estimator == "tempo":
            normalised = self.advantages
            self.advantages = [
                z + differences(responses, s, normalised) for s, z in enumerate(normalised)
            ]
        if advantage.function is not None:
            self.advantages = [tilted(r, self.rewards[s], old[s]) for s, r in enumerate(responses)]
        if advantage.whiten != "none":
            self._whiten(shift=advantage.whiten == "full")
        if config.kl.placement == "advantage":
            distances = [config.kl.coef * (o - r) for o, r in zip(old, ref, strict=True)]
            self.advantages = [
                a - distance for a, distance in zip(self.advantages, distances, strict=True)
            ]

    def _vtrace(
        self,
        rewards: Tensor,
        values: Tensor,
        weights: Tensor,
        after: float,
        length: int,
        config: AlgorithmConfig,
    ) -> None:
        """IMPALA's v_s = V_s + sum of products of what lies between, written out; A_t = r + gamma
        v_{t+1} - V_t."""
        gamma = config.advantage.gamma
        steps = range(length)
        following = [*values.tolist()[1:], after]
        deltas = [float(rewards[t]) + gamma * following[t] - float(values[t]) for t in steps]

        def target(s: int, lam: float) -> float:
            found = float(values[s]) if s < length else after
            for t in range(s, length):
                trace = math.prod(gamma * lam * float(weights[i]) for i in range(s, t))
                found += trace * float(weights[t]) * deltas[t]
            return found

        critic, policy = (
            lambda_of(choice, length, config)
            for choice in (config.advantage.lambda_critic, config.advantage.lambda_policy)
        )
        self.targets.append(torch.tensor([target(s, critic) for s in steps], dtype=torch.float64))
        # With lambda, returns beyond V of the next state count lambda times (remark 2).
        found = [deltas[t] + gamma * policy * (target(t + 1, policy) - following[t]) for t in steps]
        self.advantages.append(torch.tensor(found, dtype=torch.float64))

    def _known(self, responses: Sequence[Response], config: AlgorithmConfig) -> Group:
        """The responses with a return."""
        return [
            i
            for i, r in enumerate(responses)
            if not r.truncated or config.shaping.truncated == "terminal"
        ]

    def _others_mean(self, s: int, responses: Sequence[Response], config: AlgorithmConfig) -> float:
        """The mean return of the others of the group, or of the rollout where it has no other; 0
        for one without."""
        known = self._known(responses, config)
        others = [i for i in known if i != s]
        others = [i for i in others_of(responses, s) if i in others] or others
        return sum(self.rewards[i] for i in others) / len(others) if s in known else 0.0

    def _carries_loss(self, response: Response, config: AlgorithmConfig) -> bool:
        if config.shaping.truncated == "mask" and response.truncated:
            return False
        return config.filter_function is None or kept(response)

    def _whiten(self, shift: bool) -> None:
        counted = torch.cat(
            [a for a, chosen in zip(self.advantages, self.selected, strict=True) if chosen]
        )
        mean = counted.mean()
        std = counted.std()
        for s, chosen in enumerate(self.selected):
            scaled = (self.advantages[s] - mean) / std + (0 if shift else mean)
            self.advantages[s] = scaled if chosen else scaled * 0


def tilted(response: Response, reward: float, old: Tensor) -> Tensor:
    """What switch_functions.tilt gives one response."""
    return (reward + 0.5 * response.group) * (1 + old.abs())


def kept(response: Response) -> bool:
    """What switch_functions.keep says of one response."""
    return response.length % 2 == 1


def importance(config: AlgorithmConfig, old: Tensor, rollout: Tensor) -> Tensor:
    """A weight for every token of one response."""
    settings = config.importance_sampling
    log_ratio = old - rollout
    if settings.kind == "none":
        return torch.ones_like(old)
    ratio = log_ratio.exp()
    if settings.kind == "tis":
        return ratio.clamp(max=settings.cap)
    return ratio * ((ratio >= settings.low) & (ratio <= settings.high))


def share(settings: PolicyLossConfig, lengths: dict[int, int], s: int) -> float:
    """Weight of a token of response s where so many tokens of each response are counted."""
    present = [i for i in lengths if lengths[i]]
    if s not in present:
        return 0.0
    return {
        "token_mean": 1 / sum(lengths.values()),
        "sequence_mean": 1 / len(present) / lengths[s],
        "constant": 1 / len(present) / (settings.constant or 1),
    }[settings.aggregation]


def surrogate(
    config: AlgorithmConfig, new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor
) -> Tensor:
    """The loss of each token of one response, before importance weights; `cut` says what of it is
    clipped."""
    settings = config.policy_loss
    low = 1 - settings.clip_low
    high = 1 + settings.clip_high
    ratio = (new - old).exp()
    if settings.kind == "reinforce":
        return -advantages * new
    if settings.kind == "cispo":
        return -ratio.detach().clamp(max=high) * advantages * new
    if settings.kind == "sao":
        to_rollout = (new - rollout).exp()
        return -to_rollout * advantages * ((to_rollout > low) & (to_rollout < high))
    if settings.kind == "dppo":
        rose = new.detach().exp() - rollout.exp()
        kept_up = rose <= settings.clip_high
        kept_down = rose >= -settings.clip_low
        inside = torch.where(advantages > 0, kept_up, kept_down)
        return -(new - rollout).exp().detach().clamp(max=20) * advantages * new * inside
    if settings.kind == "function":  # switch_functions.nudge
        return -advantages * new + (new - old) ** 2 / 10
    if settings.kind == "gspo":
        ratio = (new - old).mean().exp().detach() * (new - new.detach()).exp()
    elif settings.kind != "ppo_clip":
        raise NotImplementedError(f"write the formula of the loss {settings.kind} here")
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if settings.dual_clip is not None:
        losses = torch.where(
            advantages < 0, torch.minimum(losses, -settings.dual_clip * advantages), losses
        )
    return losses


def cut(
    config: AlgorithmConfig, new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The tokens of one response that a low, a high and a dual bound clips; None: the loss has no
    such bound."""
    settings = config.policy_loss
    low = 1 - settings.clip_low
    high = 1 + settings.clip_high
    ratio = (new - old).exp()
    if settings.kind in ("reinforce", "function"):
        return None, None, None
    if settings.kind == "cispo":
        return None, ratio > high, None
    if settings.kind == "sao":
        to_rollout = (new - rollout).exp()
        return to_rollout <= low, to_rollout >= high, None
    if settings.kind == "dppo":
        rose = new.exp() - rollout.exp()
        fell = rose < -settings.clip_low
        grew = rose > settings.clip_high
        return (advantages <= 0) & fell, (advantages > 0) & grew, None
    if settings.kind == "gspo":
        ratio = (new - old).mean().exp().expand(len(new))
    elif settings.kind != "ppo_clip":
        raise NotImplementedError(f"say here what the loss {settings.kind} clips")
    dual = None
    if settings.dual_clip is not None:
        dual = (advantages < 0) & (ratio > settings.dual_clip)
    return (advantages < 0) & (ratio < low), (advantages > 0) & (ratio > high), dual


class FullPolicy(Policy):
    """Entropies as well."""

    def both(self, response: Response) -> tuple[Tensor, Tensor]:
        rows = self.model(response.ids[None, :-1]).logits[0, response.prompt - 1 :].log_softmax(-1)
        return rows.gather(1, response.ids[response.prompt :, None])[:, 0], -(
            rows.exp() * rows
        ).sum(-1)


class Iteration:
    """A rollout, what policy, reference and critic said of it before the updates, and the updates
    themselves."""

    def __init__(
        self,
        model_dir: Path,
        config: AlgorithmConfig,
        responses: list[Response],
        states: dict[str, State],
    ) -> None:
        self.config = config
        self.responses = responses
        self.model_dir = model_dir
        self.policy = FullPolicy(model_dir, states["actor"])
        self.critic: ValueModel | None = None
        values = None
        with torch.no_grad():
            self.old = [self.policy.logprobs(r) for r in responses]
            self.ref = self.old
            if config.kl.placement != "none":
                reference = Policy(model_dir, states["reference"])
                self.ref = [reference.logprobs(r) for r in responses]
            if config.advantage.estimator == "gae":
                self.critic = ValueModel(model_dir, states["critic"], config)
                values = [self.critic.values_at(responses, s) for s in range(len(responses))]
        self.values = values
        self.estimates = Estimates(responses, config, self.old, self.ref, values)

    def critic_after(
        self,
        minibatches: Sequence[Group],
        frozen: str = "",
        optimizer: Callable[[list[Parameter]], Any] = lambda parameters: AdamW(parameters, **ADAM),
    ) -> State:
        """The critic's weights after an optimizer step on each mini-batch. frozen: part of names
        that stand still."""
        assert self.critic is not None and self.values is not None
        critic = self.critic
        estimates = self.estimates
        named = critic.named_parameters()
        trained = optimizer([p for name, p in named if not frozen or frozen not in name])
        for members in minibatches:
            counted = [s for s in members if estimates.selected[s]]
            if self.config.shaping.truncated == "window":
                counted = [s for s in counted if not self.responses[s].truncated]
            losses = []
            for s in counted:
                losses.append(
                    critic.token_losses(self.responses[s], estimates.targets[s], self.values[s])
                )
            trained.step(torch.cat(losses).mean())
        return {name: parameter.detach() for name, parameter in named}

    def policy_after(
        self,
        minibatches: Sequence[Group],
        optimizer: Callable[[list[Parameter]], Any] = lambda parameters: AdamW(parameters, **ADAM),
    ) -> State:
        """The policy's weights after an optimizer step on each mini-batch."""
        trained = optimizer(list(self.policy.model.parameters()))
        for members in minibatches:
            trained.step(self.policy_loss(members))
        return {name: tensor.detach() for name, tensor in self.policy.model.state_dict().items()}

    def policy_loss(self, members: Sequence[int]) -> Tensor:
        """Of one mini-batch."""
        config, settings, estimates = self.config, self.config.policy_loss, self.estimates
        counted = [s for s in members if estimates.selected[s]]
        weights = {s: importance(config, self.old[s], self.responses[s].rollout) for s in counted}
        positive = [s for s in counted if self._is_positive(s)]
        loss = torch.zeros((), dtype=torch.float64)
        for s in counted:
            response = self.responses[s]
            advantages = estimates.advantages[s]
            new, entropy = self.policy.both(response)
            corrected = weights[s] * surrogate(
                config, new, self.old[s], response.rollout, advantages
            )
            losses = torch.zeros_like(corrected)
            if config.kl.placement == "loss" and config.kl.estimator == "k2":
                losses = losses + config.kl.coef * (new - self.ref[s]) ** 2 / 2
            if config.kl.placement == "loss" and config.kl.estimator == "k3":
                losses = losses + config.kl.coef * (
                    (self.ref[s] - new).exp() - (self.ref[s] - new) - 1
                )
            losses = losses - settings.entropy_coef * entropy
            whole = {i: self.responses[i].length for i in counted}
            loss = loss + share(settings, whole, s) * (losses + corrected).sum()
            if s in positive:
                loss = loss - settings.positive_nll.coef * new.sum() / sum(
                    self.responses[i].length for i in positive
                )
        return loss

    def _is_positive(self, s: int) -> bool:
        response = self.responses[s]
        return response.correct and not response.truncated

"""One iteration of every algorithm, written out response by response with transformers and torch's
AdamW in float64.

It shares nothing with the program but the recorded rollout: formulas and constants are taken from
the papers.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Formula:
    """What a preset is, in numbers."""

    advantage: str
    loss: str = "clip"
    low: float = 0.2
    high: float = 0.2
    aggregation: Literal["token", "sequence", "sum", "longest"] = "token"
    lambda_policy: float | None = None  # None with advantage "gae": 1 - 1 / (alpha l)
    lambda_critic: float = 1.0
    alpha: float = 0.05
    whiten: bool = False
    nll: float = 0.0
    kl: tuple[str, float] | None = None
    overlong: tuple[int, int] | None = None
    critic_rounds: int = 1
    frozen_attention: bool = False
    window: bool = False  # truncated responses have a value after them, and teach the policy alone
    arctan: tuple[float, float] | None = None  # the range that values are squashed into
    # In the first step nothing is known of the critic: the mean of the others is the baseline.
    calibrated: bool = False


VAPO = Formula("gae", high=0.28, nll=0.1)
LONGEST = 24
CACHE = 8
FORMULAS = {
    "vapo": VAPO,
    "vapo_without_value_pretraining": VAPO,
    "vapo_without_decoupled_gae": replace(VAPO, lambda_critic=0.95),
    "vapo_without_length_adaptive_gae": replace(VAPO, lambda_policy=0.95),
    "vapo_without_clip_higher": replace(VAPO, high=0.2),
    "vapo_without_token_level_loss": replace(VAPO, aggregation="sequence"),
    "vapo_without_positive_nll": replace(VAPO, nll=0.0),
    "vapo_without_group_sampling": VAPO,
    "vapo_without_critic": replace(VAPO, advantage="grpo"),
    "vapo_direct": replace(VAPO, calibrated=True),
    "vapo_direct_groups": replace(VAPO, calibrated=True),
    "reinforce_direct": replace(VAPO, advantage="others"),
    # Without a past the values are the mean of the others, and differences of values are not
    # trusted.
    "vapo_regression": replace(VAPO, advantage="others"),
    "reinforce_regression": replace(VAPO, advantage="others"),
    "tether": Formula("gae", "dppo", lambda_policy=1.0, calibrated=True),
    "tempo": Formula("tempo", aggregation="sequence", kl=("k3", 0.001)),
    "vc_ppo": Formula("gae", lambda_policy=0.95, aggregation="sequence"),
    "ppo": Formula("gae", lambda_policy=0.95, lambda_critic=0.95, aggregation="sequence"),
    "t_ppo": replace(VAPO, nll=0.0, window=True),
    "bpco": Formula("gae", "dppo", aggregation="sum", alpha=0.4, arctan=(0.0, 1.0)),
    "sao": Formula(
        "gae", "sao", low=0.3, high=5.0, alpha=1.5, critic_rounds=2, frozen_attention=True
    ),
    "grpo": Formula("grpo", aggregation="sequence", kl=("k3", 0.001)),
    "dr_grpo": Formula("centred", aggregation="longest"),
    "dapo": Formula("grpo", high=0.28, overlong=(LONGEST, CACHE)),
    "rloo": Formula("rloo", "log", aggregation="sum", kl=("reward", 0.03)),
    "reinforce_pp": Formula("to_go", whiten=True, kl=("reward", 0.01)),
    "reinforce_pp_baseline": Formula("centred", whiten=True, kl=("k2", 0.001)),
    "remax": Formula("greedy", "log", aggregation="sum"),
    "raft": Formula("best", "log"),
    "gspo": Formula("grpo", "sequence_clip", low=3e-4, high=4e-4, aggregation="sequence"),
    "distill": Formula("others", kl=("advantage", 1.0)),
    "cispo": Formula("grpo", "cispo", high=4.0),
}


@dataclass(eq=False)
class Response:
    """One response as the test sees it."""

    ids: Tensor
    prompt: int
    reward: float
    correct: bool
    truncated: bool
    group: int
    rollout: Tensor
    greedy: float

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt


def responses_of(batch: dict[str, Tensor]) -> list[Response]:
    found = []
    for s in range(len(batch["prompt_lengths"])):
        ids = batch["tokens"][batch["cu_seqlens"][s] : batch["cu_seqlens"][s + 1]].long()
        first = batch["response_cu_seqlens"][s]
        end = batch["response_cu_seqlens"][s + 1]
        found.append(
            Response(
                ids,
                int(batch["prompt_lengths"][s]),
                float(batch["rewards"][s]),
                bool(batch["correct"][s]),
                bool(batch["truncated"][s]),
                int(batch["group_ids"][s]),
                batch["rollout_logprobs"][first:end].double(),
                float(batch["greedy_rewards"][s]) if "greedy_rewards" in batch else 0.0,
            )
        )
    return found


def read_model(model_dir: Path) -> Any:
    """Without transformers' habit of giving the padding token's embedding no gradient where it is
    an input."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    model.get_input_embeddings().padding_idx = None
    return model


class Policy:
    """A causal language model of transformers; log-probs of response tokens at temperature 1."""

    def __init__(self, model_dir: Path, state: State) -> None:
        self.model = read_model(model_dir)
        missing, unexpected = self.model.load_state_dict(
            {k: v.double() for k, v in state.items()}, strict=False
        )
        assert not unexpected and set(missing) <= {"lm_head.weight"}

    def logprobs(self, response: Response) -> Tensor:
        rows = self.model(response.ids[None, :-1]).logits[0, response.prompt - 1 :].log_softmax(-1)
        return rows.gather(1, response.ids[response.prompt :, None])[:, 0]


class Critic:
    """A backbone of transformers and a linear head: the value of the state before each response
    token."""

    arctan: tuple[float, float] | None = None

    def __init__(self, model_dir: Path, state: State) -> None:
        self.backbone = read_model(model_dir).model
        state = {name: tensor.double() for name, tensor in state.items()}
        self.weight = torch.nn.Parameter(state.pop("score.weight"))
        self.bias = torch.nn.Parameter(state.pop("score.bias"))
        self.backbone.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})

    def values(self, response: Response) -> Tensor:
        hidden = self.backbone(response.ids[None, :-1]).last_hidden_state[0, response.prompt - 1 :]
        values = hidden @ self.weight[0] + self.bias
        if self.arctan is not None:
            low, high = self.arctan
            values = (low + high) / 2 + (high - low) * torch.arctan(values) / math.pi
        return values

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = [(f"model.{name}", p) for name, p in self.backbone.named_parameters()]
        return [*named, ("score.weight", self.weight), ("score.bias", self.bias)]


class AdamW:
    """torch's AdamW as the program is configured: no decay of vectors, gradients clipped at norm
    1."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, eps: float) -> None:
        self.parameters = parameters
        self.losses: list[float] = []
        self.norms: list[float] = []
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps)

    def step(self, loss: Tensor) -> None:
        self.adamw.zero_grad()
        loss.backward()
        self.losses.append(float(loss.detach()))
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)))
        self.adamw.step()


def shaped(response: Response, formula: Formula) -> float:
    if formula.overlong is None:
        return response.reward
    longest, cache = formula.overlong
    over = response.length - (longest - cache)
    return response.reward - (0 if over <= 0 else min(over / cache, 1))


def token_rewards(response: Response, formula: Formula, old: Tensor, ref: Tensor) -> Tensor:
    rewards = torch.zeros(response.length, dtype=torch.float64)
    rewards[-1] = 0.0 if formula.window and response.truncated else shaped(response, formula)
    return (
        rewards - formula.kl[1] * (old - ref)
        if formula.kl and formula.kl[0] == "reward"
        else rewards
    )


def gae(rewards: Tensor, values: Tensor, lam: float, after: float = 0.0) -> Tensor:
    advantages = torch.zeros_like(rewards)
    following = 0.0
    for t in reversed(range(len(rewards))):
        value_after = values[t + 1] if t + 1 < len(rewards) else after
        following = rewards[t] + value_after - values[t] + lam * following
        advantages[t] = following
    return advantages


def advantages_of(
    rollout: list[Response], formula: Formula, rewards: list[Tensor], values: list[Tensor] | None
) -> list[Tensor]:
    totals = [float(r.sum()) for r in rewards]
    found = []
    for s, response in enumerate(rollout):
        others = [totals[i] for i, r in enumerate(rollout) if r.group == response.group]
        mean = sum(others) / len(others)
        if formula.calibrated or formula.advantage == "others":
            beside = others if len(others) > 1 else totals
            number = totals[s] - (sum(beside) - totals[s]) / (len(beside) - 1)
            found.append(torch.full((response.length,), number, dtype=torch.float64))
            continue
        if formula.advantage == "gae":
            assert values is not None
            lam = formula.lambda_policy
            if lam is None:
                lam = min(max(1 - 1 / (formula.alpha * response.length), 0), 1)
            after = float(values[s][-1]) if formula.window and response.truncated else 0.0
            found.append(gae(rewards[s], values[s], lam, after))
            continue
        if formula.advantage == "to_go":
            found.append(torch.stack([rewards[s][t:].sum() for t in range(response.length)]))
            continue
        if formula.advantage in ("grpo", "tempo"):
            std = math.sqrt(sum((x - mean) ** 2 for x in others) / (len(others) - 1))
            number = (totals[s] - mean) / (std + 1e-6)
        elif formula.advantage == "centred":
            number = totals[s] - mean
        elif formula.advantage == "rloo":
            number = totals[s] - (sum(others) - totals[s]) / (len(others) - 1)
        elif formula.advantage == "greedy":
            number = totals[s] - response.greedy
        else:
            first = next(
                i
                for i, r in enumerate(rollout)
                if r.group == response.group and totals[i] == max(others)
            )
            number = float(first == s)
        found.append(torch.full((response.length,), number, dtype=torch.float64))
    if formula.advantage == "tempo":
        found = [a + differences(rollout, s, found) for s, a in enumerate(found)]
    if formula.whiten:
        flat = torch.cat(found)
        found = [(x - flat.mean()) / flat.std() for x in found]
    return found


def differences(rollout: list[Response], s: int, normalised: list[Tensor]) -> Tensor:
    """V of the state after each token less that before it, V the mean over the responses of the
    group that pass it."""
    response = rollout[s]
    values = []
    for t in range(response.prompt, len(response.ids)):
        passing = [
            float(normalised[i][0])
            for i, r in enumerate(rollout)
            if r.group == response.group
            and len(r.ids) > t
            and torch.equal(r.ids[:t], response.ids[:t])
        ]
        values.append(sum(passing) / len(passing))
    return torch.tensor([*values, float(normalised[s][0])], dtype=torch.float64).diff()


def token_losses(
    formula: Formula, new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor
) -> Tensor:
    low = 1 - formula.low
    high = 1 + formula.high
    ratio = (new - old).exp()
    if formula.loss == "clip":
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if formula.loss == "log":
        return -advantages * new
    if formula.loss == "cispo":
        return -ratio.detach().clamp(max=high) * advantages * new
    if formula.loss == "sao":
        ratio = (new - rollout).exp()
        return -ratio * advantages * ((ratio > low) & (ratio < high))
    if formula.loss == "dppo":
        moved = new.exp() - rollout.exp()
        cut = torch.where(advantages > 0, moved > formula.high, moved < -formula.low)
        return -(new - rollout).exp().detach().clamp(max=20) * advantages * new * ~cut
    # GSPO's own objective (eq. 5): one ratio and one advantage a response, here spread over its
    # tokens.
    whole = (new - old).mean().exp()
    return -torch.minimum(whole * advantages, whole.clamp(low, high) * advantages)


def policy_objective(
    policy: Policy,
    rollout: list[Response],
    formula: Formula,
    old: list[Tensor],
    ref: list[Tensor],
    advantages: list[Tensor],
) -> Tensor:
    counted = [
        s
        for s in range(len(rollout))
        if formula.advantage != "best" or (advantages[s][0] > 0 and rollout[s].correct)
    ]
    tokens = sum(rollout[s].length for s in counted)
    positive = [r for r in rollout if r.correct and not r.truncated]
    loss = torch.zeros((), dtype=torch.float64)
    for s, response in enumerate(rollout):
        new = policy.logprobs(response)
        if s in counted:
            per_token = token_losses(formula, new, old[s], response.rollout, advantages[s])
            if formula.kl and formula.kl[0] == "k2":
                per_token = per_token + formula.kl[1] * (new - ref[s]) ** 2 / 2
            if formula.kl and formula.kl[0] == "k3":
                per_token = per_token + formula.kl[1] * ((ref[s] - new).exp() - (ref[s] - new) - 1)
            share = {
                "token": 1 / tokens,
                "sequence": 1 / len(counted) / response.length,
                "sum": 1 / len(counted),
                "longest": 1 / len(counted) / LONGEST,
            }[formula.aggregation]
            loss = loss + share * per_token.sum()
        if formula.nll and response in positive:
            loss = loss - formula.nll * new.sum() / sum(r.length for r in positive)
    return loss


@dataclass
class Iteration:
    """A recorded iteration: the rollout and the weights that it began with."""

    batch: dict[str, Tensor]
    actor: State
    critic: State | None
    reference: State | None


def weights_after(
    model_dir: Path, name: str, begin: Iteration, epochs: int, lr: float, eps: float
) -> tuple[State, State | None]:
    """The weights of actor and critic after `epochs` passes over the rollout as one mini-batch.

    The value targets that the program recorded are compared on the way.
    """
    formula = FORMULAS[name]
    rollout = responses_of(begin.batch)
    policy = Policy(model_dir, begin.actor)
    with torch.no_grad():
        old = [policy.logprobs(r) for r in rollout]
        ref = (
            old
            if begin.reference is None
            else [Policy(model_dir, begin.reference).logprobs(r) for r in rollout]
        )
    rewards = [token_rewards(r, formula, o, p) for r, o, p in zip(rollout, old, ref, strict=True)]
    values = None
    critic_state = None
    if begin.critic is not None:
        critic = Critic(model_dir, begin.critic)
        critic.arctan = formula.arctan
        with torch.no_grad():
            values = [critic.values(r) for r in rollout]
        targets = [
            v * 0 if formula.window and response.truncated else gae(r, v, formula.lambda_critic) + v
            for response, r, v in zip(rollout, rewards, values, strict=True)
        ]
        torch.testing.assert_close(
            begin.batch["returns"].double(), torch.cat(targets), rtol=1e-5, atol=1e-5
        )
        critic_state = critic_after(critic, rollout, targets, formula, epochs, lr, eps)
    advantages = advantages_of(rollout, formula, rewards, values)
    if formula.kl and formula.kl[0] == "advantage":
        advantages = [
            a - formula.kl[1] * (o - r) for a, o, r in zip(advantages, old, ref, strict=True)
        ]
    optimizer = AdamW(list(policy.model.parameters()), lr, eps)
    for _ in range(epochs):
        optimizer.step(policy_objective(policy, rollout, formula, old, ref, advantages))
    actor_state = {k: v.detach() for k, v in policy.model.state_dict().items() if k in begin.actor}
    return actor_state, critic_state


def critic_after(
    critic: Critic,
    rollout: list[Response],
    targets: list[Tensor],
    formula: Formula,
    epochs: int,
    lr: float,
    eps: float,
) -> State:
    named: list[tuple[str, Any]] = critic.named_parameters()
    trained = [p for name, p in named if not (formula.frozen_attention and ".self_attn." in name)]
    optimizer = AdamW(trained, lr, eps)
    taught = [
        (r, t)
        for r, t in zip(rollout, targets, strict=True)
        if not (formula.window and r.truncated)
    ]
    tokens = sum(r.length for r, _ in taught)
    for _ in range(epochs * formula.critic_rounds):
        squares = [(critic.values(r) - t).square().sum() / 2 for r, t in taught]
        optimizer.step(torch.stack(squares).sum() / tokens)
    return {name: parameter.detach() for name, parameter in named}

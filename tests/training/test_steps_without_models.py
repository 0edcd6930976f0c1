"""Scoring, estimates and both updates of an iteration under every switch, on tables in place of
models: each optimizer step gets the loss that the formulas of switch_formulas give on its
    responses, on one rank and on several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import spread
from step_formulas import Response, responses_of
from switch_formulas import Estimates, Iteration, ValueModel
from switch_metrics import of_scores
from switch_rollout import Watched
from test_estimate_switches import algorithm_of, noise, scored
from test_shards_on_threads import Planner
from test_step_switches import CASES, CUTS, OLD_LOGPROBS, REPORTED, K, L, S, U, V, W
from threads import on_threads
from torch import Tensor

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.megatron.token_loss import StepResult
from vapo_megatron.monitoring import names
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import Models
from vapo_megatron.training.return_history import ReturnHistory
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import policy_signal, update_critic, update_policy

SWITCHES = {case.name: {U + "minibatch_size": 5} | case.switches for case in CASES}
SWITCHES |= (
    {name: {U + "minibatch_size": 5} | cut[0] for name, cut in CUTS.items()}
    | OLD_LOGPROBS
    | REPORTED
)
COMBINED: dict[str, dict[str, Any]] = {
    "clipped": {V + "kind": "clipped", V + "clip": 0.05, U + "minibatch_size": 5},
    "masked_of_windows": {S + "truncated": "window", W + "kind": "mis", W + "low": 0.8},
    "masked_of_filtered": {
        "algorithm.filter_function": "switch_functions:keep",
        W + "kind": "mis",
        W + "low": 0.8,
    }
    | {U + "minibatch_size": 5},
    "masked_of_constant": {
        L + "aggregation": "constant",
        L + "constant": 24.0,
        W + "kind": "mis",
        W + "low": 0.8,
    }
    | {U + "minibatch_size": 5},
}
SWITCHES |= COMBINED
REFUSED = 2  # by the judge: the second step of each model
Outputs = list[Tensor]  # of each response


class AsPacked:
    """LocalTokens of a batch whose outputs are in the order of its responses."""

    def __init__(self, batch: ExperienceBatch) -> None:
        self.lengths = batch.response_lengths

    def gather(self, values: Tensor) -> Tensor:
        return values

    def sequence_mean(self, x: Tensor) -> Tensor:
        means = [part.detach().mean() for part in x.split(self.lengths.tolist())]
        return torch.stack(means).repeat_interleave(self.lengths) if means else x


class Table(Planner):
    """Gives each response its recorded outputs: `before` until its first update is made,
    then `now`."""

    dtype = torch.float32
    config = SimpleNamespace(precision=SimpleNamespace(fp8="none"))
    onloaded: frozenset[str] = frozenset()

    def __init__(self, name: str, before: Outputs, now: Outputs | None = None) -> None:
        super().__init__(tp=1, replays=False)
        self.name = name
        self.before = before
        self.now = before if now is None else now
        self.steps: list[tuple[list[int], float]] = []
        self.kept: list[bool] = []
        self.given: list[set[str]] = []

    @property
    def offloader(self) -> "Table":
        return self

    def send_all_but(self, *parts: str) -> None:
        self.onloaded &= frozenset(parts)

    def free_sent(self) -> None: ...

    def fetch(self, *parts: str, room: float = 0) -> float:
        self.onloaded |= frozenset(parts)
        return room

    def footprint(self) -> dict[str, Any]:
        return {}

    def head_has_gradient(self) -> bool:
        return True

    def score(
        self,
        batch: ExperienceBatch,
        on_done: Callable[[int], None],
        share: Sequence[int],
        read: Any = None,
    ) -> Tensor:
        assert self.onloaded == {"weights"}
        on_done(len(share))
        found = self.outputs(self.before, batch)
        return found if read is None else read(found)[:, None]  # type: ignore[no-any-return]

    def train_step(
        self, batch: ExperienceBatch, share: Any, loss: Any, keep_outputs: bool
    ) -> StepResult:
        assert "optimizer" in self.onloaded and list(share) == list(range(batch.samples))
        found = self.outputs(self.now if self.steps else self.before, batch)
        value, metrics = loss(found, AsPacked(batch))
        self.steps.append((numbers_of(batch), float(value)))
        self.kept.append(keep_outputs)
        self.given.append(
            {
                name
                for name in ("values", "returns", "advantages")
                if getattr(batch, name) is not None
            }
        )
        count = len(self.steps)
        told = {name: float(number) for name, number in metrics.items()}
        return StepResult(
            float(count), 0.1 * count, told, found if keep_outputs else None, count != REFUSED
        )

    def outputs(self, of: Outputs, batch: ExperienceBatch) -> Tensor:
        return torch.cat([of[0][:0], *(of[number] for number in numbers_of(batch))])


def numbers_of(batch: ExperienceBatch) -> list[int]:
    """The last token of a response is its number."""
    return batch.tokens[batch.cu_seqlens[1:] - 1].tolist()


def numbered(config: AlgorithmConfig) -> ExperienceBatch:
    """The rollout as the engines bring it."""
    batch = scored(config)
    batch.tokens[batch.cu_seqlens[1:] - 1] = torch.arange(batch.samples, dtype=batch.tokens.dtype)
    batch.values = batch.old_logprobs = batch.ref_logprobs = batch.entropies = None
    return batch


def tables(config: AlgorithmConfig) -> dict[str, Table]:
    """The policy moves between scoring and updates, unless its update is what scores."""
    whole = scored(config)
    lengths = whole.response_lengths.tolist()
    total = whole.response_tokens

    def cut(x: Tensor) -> Outputs:
        return list(x.split(lengths))

    old = whole.old_logprobs
    entropies = whole.entropies
    assert old is not None and entropies is not None
    moves = 0.0 if config.update_gives_logprobs(12, 4) else 0.2
    before, now = (torch.stack((old + by * noise(20, total), entropies), 1) for by in (0.0, moves))
    found = {"actor": Table("actor", cut(before), cut(now))}
    if config.uses_reference:
        assert whole.ref_logprobs is not None
        found["reference"] = Table(
            "reference", cut(torch.stack((whole.ref_logprobs, entropies), 1))
        )
    if config.uses_critic:
        count = config.value_loss.outputs
        head = 0.3 * noise(21, total * count).reshape(total, count)
        found["critic"] = Table(
            "critic", cut(head), cut(head + 0.2 * noise(22, total * count).reshape(total, count))
        )
    return found


def iterate(config: AlgorithmConfig, seed: str = "1/1") -> Any:
    """On every rank: the steps of each model, the row and how far each phase was."""
    made: Any = tables(config)
    models = Models(made["actor"], made.get("critic"), made.get("reference"))
    whole = numbered(config)
    batch = spread(whole)
    with Watched(Path("unused")) as recorder:
        score(models, batch, config, recorder)
        estimate_advantages(batch, config, recorder, history=ReturnHistory())
        update_critic(models, batch, config, seed, recorder)
        update_policy(models, batch, config, seed, recorder)
        row = recorder.write(1)
    return (
        {name: (model.steps, model.kept, model.given) for name, model in made.items()},
        row,
        recorder.progress,
    )


class Written(ValueModel):
    """A value model whose outputs are written down."""

    def __init__(
        self, config: AlgorithmConfig, outputs: Outputs, responses: list[Response]
    ) -> None:
        self.loss = config.value_loss
        self.of = dict(zip(map(id, responses), outputs, strict=True))

    def outputs(self, response: Response) -> Tensor:
        return self.of[id(response)].double()


class Formula(Iteration):
    """What each step minimises, on recorded outputs."""

    def __init__(self, config: AlgorithmConfig) -> None:
        made = tables(config)
        self.config = config
        self.responses = responses_of(scored(config).tensors())
        self.of_engines = (
            config.update.rollout_logprobs_within is not None
            and not config.update_gives_logprobs(12, 4)
        )
        self.old = [x[:, 0].double() for x in made["actor"].before]
        if self.of_engines:
            self.old = [response.rollout for response in self.responses]
        self.ref = (
            [x[:, 0].double() for x in made["reference"].before]
            if "reference" in made
            else self.old
        )
        self.made = made
        self.values = None
        if "critic" in made:
            self.critic = Written(config, made["critic"].before, self.responses)
            self.values = [
                self.critic.values_at(self.responses, s) for s in range(len(self.responses))
            ]
        self.estimates = Estimates(self.responses, config, self.old, self.ref, self.values)

    def loss(self, model: str, number: int, members: Sequence[int]) -> float:
        """Of a step of a model, by its number from 0."""
        now = self.made[model].now if number else self.made[model].before
        if model == "critic":
            return self.value_loss(members, Written(self.config, now, self.responses))
        of = dict(zip(map(id, self.responses), now, strict=True))
        policy: Any = SimpleNamespace(both=lambda response: of[id(response)].double().unbind(-1))
        self.policy = policy
        return float(self.policy_loss(members))

    def mean_entropy(self, members: Sequence[int]) -> float:
        counted = [self.made["actor"].now[s][:, 1] for s in members if self.estimates.selected[s]]
        return float(torch.cat(counted).mean())

    def value_loss(self, members: Sequence[int], critic: ValueModel) -> float:
        assert self.values is not None
        window = self.config.shaping.truncated == "window"
        counted = [
            s
            for s in members
            if self.estimates.selected[s] and not (window and self.responses[s].truncated)
        ]
        losses = []
        for s in counted:
            losses.append(
                critic.token_losses(self.responses[s], self.estimates.targets[s], self.values[s])
            )
        return float(torch.cat(losses).mean())


def check_steps(config: AlgorithmConfig, ranks: int) -> None:
    """Each optimizer step minimises the formula, and its metrics are true."""
    found = on_threads(ranks, iterate, config)
    formula = Formula(config)
    (by_model, row, progress), update = found[0], config.update
    one_pass = config.update_gives_logprobs(12, 4)
    for model in by_model.keys() & {"actor", "critic"}:
        steps = list(zip(*(answer[0][model][0] for answer in found), strict=True))
        for number, parts in enumerate(steps):
            members = [s for part, _ in parts for s in part]
            expected = formula.loss(model, number, members)
            assert sum(value for _, value in parts) == pytest.approx(
                expected, rel=1e-3, abs=1e-5
            ), (model, number)
        kept = by_model[model][1]
        first_alone = model == "critic" and config.value_loss.outputs == 1
        assert kept == [
            one_pass if model == "actor" else first_alone and n == 0 for n in range(len(kept))
        ]
        needed = {"critic": {"values", "returns"}, "actor": {"advantages"}}[model]
        needed |= (
            {"values"} if config.policy_loss.function is not None and config.uses_critic else set()
        )
        assert by_model[model][2] == [needed] * len(steps), "nothing else is sent"
        rounds = update.epochs * (
            update.critic_updates_per_policy_update if model == "critic" else 1
        )
        phase = "update_policy" if model == "actor" else "update_critic"
        assert progress[phase] == (12 * rounds, 12 * rounds)
        made = [n for n in range(1, len(steps) + 1) if n != REFUSED]
        assert row[f"{model}/updates"] == len(made) and row[f"{model}/lr"] == pytest.approx(
            0.1 * made[-1]
        )
        assert (
            row[f"{model}/grad_norm"] == sum(made) / len(made)
            and row[f"{model}/grad_norm_max"] == made[-1]
        )
        if ranks == 1 and model == "actor":
            entropies = [
                formula.mean_entropy(parts[0][0])
                for n, parts in enumerate(steps, 1)
                if n != REFUSED
            ]
            assert row["actor/update_entropy"] == pytest.approx(
                sum(entropies) / len(entropies), rel=1e-4
            )
        if ranks == 1 and model == "critic":
            losses = [parts[0][1] for n, parts in enumerate(steps, 1) if n != REFUSED]
            assert row["critic/value_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    formula.loss("actor", 0, range(12))  # of the policy that scored
    told = {
        key: float(value)
        for key, value in of_scores(formula).items()
        if not key.startswith("importance/")
    }
    if formula.of_engines:
        told = {
            key: told[key] for key in told.keys() & {names.REFERENCE_KL, names.REFERENCE_KL_MAX}
        }
    assert {key: row.get(key) for key in told} == pytest.approx(told, rel=1e-4, abs=1e-5)
    assert ("score_policy" in progress) == (not one_pass) and (
        "score_reference" in progress
    ) == config.uses_reference
    assert ("score_values" in progress) == config.uses_critic
    assert "critic/fault_targets" not in row, "the critic does what its values say"


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, 1) for name in SWITCHES] + [(name, 2) for name in (*CUTS, *REPORTED, *COMBINED)],
)
def test_each_step_minimises_what_the_formula_says(name: str, ranks: int) -> None:
    check_steps(algorithm_of(SWITCHES[name]), ranks)


def unfinished(which: Sequence[int]) -> Any:
    """On one rank: steps and what is counted as skipped, where these responses go on."""
    config = algorithm_of(
        {S + "truncated": "window", U + "minibatch_size": 5, L + "positive_nll.coef": 0.0}
    )
    made: Any = tables(config)
    models = Models(made["actor"], made["critic"])
    whole = numbered(config)
    whole.truncated[:] = False
    whole.truncated[list(which)] = True
    batch = spread(whole)
    with Watched(Path("unused")) as recorder:
        score(models, batch, config, recorder)
        estimate_advantages(batch, config, recorder)
        update_critic(models, batch, config, "1/1", recorder)
        row = recorder.write(1)
    return (
        [members for members, _ in made["critic"].steps],
        models.updates.metrics(),
        recorder.progress,
        row,
    )


def test_a_critic_learns_nothing_of_responses_that_go_on() -> None:
    ((steps, skipped, progress, row),) = on_threads(1, unfinished, range(12))
    assert steps == [] and skipped == {"skipped_updates/total": 1, "skipped_updates/unfinished": 1}
    assert "update_critic" not in progress and "critic/updates" not in row
    ((straight, _, _, _),) = on_threads(1, unfinished, [])
    for number, left_out in enumerate(straight):
        ((steps, skipped, progress, row),) = on_threads(1, unfinished, left_out)
        assert (
            steps == straight[:number] + straight[number + 1 :]
            and row["critic/updates"] == len(steps) - 1
        )
        assert skipped == {
            "skipped_updates/total": 1,
            "skipped_updates/unfinished": 1,
        } and progress["update_critic"] == (12, 12)


def test_mini_batches_are_drawn_by_model_and_seed() -> None:
    config = algorithm_of({U + "minibatch_size": 5, U + "epochs": 2})
    orders = []
    for seed in ("1/1", "1/1", "1/2"):
        ((by_model, _, _),) = on_threads(1, iterate, config, seed)
        orders.append(
            [[members for members, _ in by_model[model][0]] for model in ("actor", "critic")]
        )
    (actor, critic), again, (other_actor, other_critic) = orders
    assert (
        again == [actor, critic]
        and actor != critic
        and actor != other_actor
        and critic != other_critic
    )


# Advantages and importance weights of three tokens, the first new one, whether selected, correct,
# cut off.
SAID: list[tuple[list[float], list[float], int, bool, bool, bool]] = [
    ([1, 1, 1], [1, 1, 1], 0, True, False, False),
    ([0, 0, 0], [1, 1, 1], 0, True, False, False),
    ([1, 1, 1], [0, 0, 0], 0, True, False, False),
    ([1, 1, 1], [1, 1, 1], 0, False, False, False),
    ([0, 0, 0], [1, 1, 1], 0, True, True, False),
    ([0, 0, 0], [1, 1, 1], 0, True, True, True),
    ([0, 0, 0], [1, 1, 1], 0, False, True, False),
    ([5, 0, 0], [1, 1, 1], 2, True, False, False),
    ([0, 0, 5], [2, 2, 2], 2, True, False, False),
    ([0, 1, 0], [0, 1, 0], 0, True, False, False),
]


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {L + "positive_nll.coef": 0.1},
        {L + "entropy_coef": 0.1},
        {K + "placement": "loss", K + "estimator": "k3", K + "coef": 0.1},
        {K + "placement": "reward", K + "estimator": "k1", K + "coef": 0.1},
    ],
    ids=str,
)
def test_sample_teaches_the_policy_where_its_loss_has_a_gradient(
    switches: dict[str, Any], windows: bool
) -> None:
    config = algorithm_of({L + "positive_nll.coef": 0.0} | switches)
    samples = []
    for number, (_, _, _, _, correct, cut) in enumerate(SAID):
        prompt = Prompt(str(number), "", "", (1,))
        reason: Any = "length" if cut else "stop"
        sample = Sample(
            prompt, number, 0, 0, [5] * 3, [-1.0] * 3, reason, 0, 0, reward=0.5, correct=correct
        )  # type: ignore[arg-type]
        samples.append(sample)
    batch = from_samples(samples)
    starts = torch.tensor([row[2] for row in SAID])
    batch.window_starts = starts if windows else None
    batch.advantages = torch.tensor([x for row in SAID for x in row[0]])
    batch.importance_weights = torch.tensor([x for row in SAID for x in row[1]])
    whole = spread(batch)
    whole.fill(selected=torch.tensor([row[3] for row in SAID]))
    others = L + "entropy_coef" in switches
    others = others or switches.get(K + "placement") == "loss"
    carries = []
    signal = []
    for advantages, weights, start, selected, correct, cut in SAID:
        imitated = selected and correct and not cut and L + "positive_nll.coef" in switches
        moves = any(
            a * w for a, w in list(zip(advantages, weights, strict=True))[start * windows :]
        )
        carries.append(selected if others else selected or imitated)
        signal.append(selected if others else (selected and moves) or imitated)
    found = policy_signal(whole, config)
    assert found[0].tolist() == carries and found[1].tolist() == signal

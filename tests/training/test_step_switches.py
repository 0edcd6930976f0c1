"""Every switch of the section algorithm through the trainer's own iteration, against an independent
one.

Each case gives one switch a value and compares the weights of actor and critic, after all
mini-batches, with those that switch_formulas computes; and it makes sure that another value of the
switch would give other weights, so that a switch that is ignored, inverted or applied to the wrong
responses is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import read_tensors
from matrices import others_in_full
from ranks import one_rank_in_process, run_ranks
from step_formulas import AdamW, State
from switch_formulas import ADAM, Iteration
from switch_metrics import reported
from switch_rollout import (
    Seen,
    config_of,
    iterate,
    iterate_all,
    load_seen,
    models_of_this_process,
    responses,
    write_models,
)

from vapo_megatron.algorithms.registry import ESTIMATORS, POLICY_LOSSES
from vapo_megatron.monitoring import names

A, L, V, K, W, S, U = (
    f"algorithm.{section}."
    for section in (
        "advantage",
        "policy_loss",
        "value_loss",
        "kl",
        "importance_sampling",
        "shaping",
        "update",
    )
)


@dataclass(frozen=True)
class Case:
    """A switch, its value and what else has to be set; another value, or other settings, that have
    to make a difference to the weights of the model named by `changes`."""

    key: str
    value: Any
    other: Any = "unset"
    context: dict[str, Any] = field(default_factory=dict)
    changes: str = "actor"

    @property
    def name(self) -> str:
        more = "".join(f",{key.rpartition('.')[2]}={value}" for key, value in self.context.items())
        return f"{self.key.removeprefix('algorithm.')}={self.value}{more}"

    @property
    def switches(self) -> dict[str, Any]:
        return self.context | {self.key: self.value}

    @property
    def other_switches(self) -> dict[str, Any]:
        return self.context | (
            self.other if isinstance(self.other, dict) else {self.key: self.other}
        )


KL_REWARD = {K + "placement": "reward", K + "coef": 0.3}
KL_LOSS = {K + "placement": "loss", K + "estimator": "k3", K + "coef": 0.5}
KL_ADVANTAGE = {K + "placement": "advantage", K + "coef": 0.3}
NO_KL = {K + "placement": "none", K + "estimator": "k1", K + "coef": 0.0}
TIS = {W + "kind": "tis"}
MIS = {W + "kind": "mis"}
BINS = {V + "kind": "hl_gauss", V + "bins": 21}
TILT = "switch_functions:tilt"

CASES = [
    *(
        Case(A + "estimator", name, "dr_grpo" if name == "grpo" else "grpo")
        for name in ESTIMATORS.names()
    ),
    Case(
        A + "estimator",
        "function",
        {A + "estimator": "grpo", A + "function": "unset"},
        {A + "function": TILT},
    ),
    Case(A + "function", TILT),
    Case(A + "gamma", 0.8),
    Case(A + "gamma", 0.8, context={A + "estimator": "reinforce_pp", **KL_REWARD}),
    Case(A + "lambda_critic", 0.5, changes="critic"),
    Case(A + "lambda_critic", "length_adaptive", changes="critic"),
    Case(A + "lambda_policy", 0.3),
    Case(A + "lambda_policy", "length_adaptive", 1.0),
    Case(A + "length_adaptive_alpha", 0.1),
    Case(A + "length_adaptive_floor", 0.7),
    Case(A + "off_policy", "none", "vtrace"),
    Case(A + "off_policy", "vtrace", "none"),
    Case(
        A + "off_policy", "vtrace", "none", {A + "lambda_critic": 0.5, A + "gamma": 0.9}, "critic"
    ),
    Case(A + "whiten", "none", "full"),
    Case(A + "whiten", "full", "scale"),
    Case(A + "whiten", "scale", "full", {A + "estimator": "reinforce_pp"}),
    Case(A + "whiten", "full", "none", {S + "truncated": "mask"}),
    *(
        Case(
            L + "kind",
            name,
            "reinforce" if name == "ppo_clip" else "ppo_clip",
            {L + "aggregation": "sequence_mean", L + "clip_low": 0.02}
            if traits.per_sequence
            else {},
        )
        for name, traits in POLICY_LOSSES.traits.items()
    ),
    Case(L + "clip_high", 0.002, context={L + "kind": "dppo"}),
    Case(L + "clip_low", 0.02),
    Case(L + "clip_high", 0.02),
    Case(L + "clip_high", 0.05, context={L + "kind": "cispo"}),
    Case(L + "dual_clip", 1.03, context={L + "clip_high": 0.01, U + "epochs": 2}),
    Case(L + "aggregation", "token_mean", "sequence_mean"),
    Case(L + "aggregation", "sequence_mean"),
    Case(L + "constant", 24.0, 6.0, {L + "aggregation": "constant"}),
    Case(
        L + "aggregation",
        "constant",
        {L + "aggregation": "sequence_mean", L + "constant": "unset"},
        {L + "constant": 24.0},
    ),
    Case(L + "entropy_coef", 0.3),
    Case(L + "positive_nll.coef", 0.5),
    Case(V + "kind", "mse", "clipped", changes="critic"),
    Case(V + "kind", "clipped", changes="critic"),
    Case(V + "kind", "hl_gauss", changes="critic"),
    Case(V + "clip", 0.02, context={V + "kind": "clipped"}, changes="critic"),
    Case(V + "bins", 21, 31, {V + "kind": "hl_gauss"}, "critic"),
    Case(V + "low", -1.5, context=BINS, changes="critic"),
    Case(V + "high", 1.5, context=BINS, changes="critic"),
    Case(V + "squash", "tanh", changes="critic"),
    Case(
        V + "squash",
        "tanh",
        context={V + "low": -1.5, V + "high": 1.1, V + "kind": "clipped"},
        changes="critic",
    ),
    Case(V + "squash", "arctan", "tanh", changes="critic"),
    Case(K + "placement", "none", KL_REWARD),
    Case(K + "placement", "reward", NO_KL, KL_REWARD),
    Case(K + "placement", "reward", NO_KL, KL_REWARD, "critic"),
    Case(K + "placement", "reward", NO_KL, KL_REWARD | {A + "estimator": "grpo"}),
    Case(K + "placement", "loss", NO_KL, KL_LOSS),
    Case(K + "placement", "advantage", NO_KL, KL_ADVANTAGE | {A + "estimator": "grpo"}),
    Case(K + "coef", 0.3, 0.1, KL_REWARD),
    Case(K + "coef", 0.5, 0.1, KL_LOSS),
    Case(K + "estimator", "k1", KL_LOSS, KL_REWARD),
    Case(K + "estimator", "k2", "k3", KL_LOSS),
    Case(K + "estimator", "k3", "k2", KL_LOSS),
    Case(W + "kind", "none", "tis", {W + "cap": 1.1}),
    Case(W + "kind", "tis"),
    Case(W + "kind", "mis"),
    Case(W + "cap", 1.05, context=TIS),
    Case(W + "low", 0.8, context=MIS),
    Case(W + "high", 1.2, context=MIS),
    Case(S + "truncated", "terminal", "bootstrap"),
    Case(S + "truncated", "bootstrap", changes="critic"),
    Case(S + "truncated", "window", "terminal"),
    Case(S + "truncated", "window", "bootstrap", changes="critic"),
    Case(S + "truncated", "mask"),
    Case(S + "truncated", "mask", changes="critic"),
    Case(S + "soft_overlong.max_length", 18, 24, {S + "soft_overlong.cache_length": 8}),
    Case(S + "soft_overlong.cache_length", 12, 4, {S + "soft_overlong.max_length": 20}),
    Case("algorithm.filter_function", "switch_functions:keep"),
]

# What these compute shows in the gradients of models. test_steps_without_models.py, all of which
# `make test` runs, trains with every case on recorded outputs in place of models.
WITH_MODELS = (
    "advantage.estimator=grpo",
    "advantage.off_policy=vtrace",
    "policy_loss.kind=ppo_clip",
    "policy_loss.kind=reinforce",
    "policy_loss.kind=gspo,aggregation=sequence_mean,clip_low=0.02",
    "policy_loss.kind=cispo",
    "policy_loss.kind=sao",
    "policy_loss.kind=dppo",
    "policy_loss.dual_clip=1.03,clip_high=0.01,epochs=2",
    "policy_loss.entropy_coef=0.3",
    "value_loss.kind=clipped",
    "value_loss.bins=21,kind=hl_gauss",
    "value_loss.squash=arctan",
    "kl.placement=reward,placement=reward,coef=0.3,estimator=grpo",
    "kl.estimator=k3,placement=loss,estimator=k3,coef=0.5",
    "importance_sampling.kind=tis",
    "shaping.truncated=bootstrap",
)
IN_TEST = [case for case in CASES if case.name in WITH_MODELS]
assert len(IN_TEST) == len(WITH_MODELS)

# How a rollout of 12 responses is cut: switches, responses of each optimizer step of one pass,
# passes of actor, critic.
CUTS: dict[str, tuple[dict[str, Any], list[int], int, int]] = {
    "default": ({}, [5, 5, 2], 1, 1),
    "minibatch_size": ({U + "minibatch_size": 4}, [4, 4, 4], 1, 1),
    "minibatches": ({U + "minibatch_size": "unset", U + "minibatches": 2}, [6, 6], 1, 1),
    "minibatch_unit": ({U + "minibatch_unit": "groups", U + "minibatch_size": 3}, [9, 3], 1, 1),
    "minibatches_of_groups": (
        {U + "minibatch_unit": "groups", U + "minibatch_size": "unset", U + "minibatches": 2},
        [6, 6],
        1,
        1,
    ),
    "epochs": ({U + "epochs": 2}, [5, 5, 2], 2, 2),
    "critic_updates_per_policy_update": (
        {U + "critic_updates_per_policy_update": 3},
        [5, 5, 2],
        1,
        3,
    ),
    "both": ({U + "epochs": 2, U + "critic_updates_per_policy_update": 2}, [5, 5, 2], 2, 4),
}
ONE_STEP = {U + "minibatch_size": "unset", U + "minibatches": 1}
SURPRISES = {"algorithm.metrics_function": "switch_functions:surprise"}
OLD_LOGPROBS = {"auto": ONE_STEP, "score": ONE_STEP | SURPRISES}
# Iterations of one step whose metrics are all written out; the last one has no critic.
REPORTED: dict[str, dict[str, Any]] = {
    "reported": ONE_STEP
    | KL_LOSS
    | {W + "kind": "tis", W + "cap": 1.05, A + "gamma": 0.9, A + "length_adaptive_floor": 0.7}
    | {L + "dual_clip": 3.0},
    "reported_of_finished_responses": ONE_STEP | {S + "truncated": "bootstrap", L + "kind": "sao"},
    "reported_masked": ONE_STEP | {S + "truncated": "mask", A + "lambda_policy": 0.9},
    "reported_without_a_critic": ONE_STEP | {A + "estimator": "grpo"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return (
        models_of_this_process()
        if one_rank_in_process()
        else write_models(tmp_path_factory.mktemp("switches"))
    )


SWITCHES = {case.name: case.switches for case in CASES} | {
    name: cut[0] for name, cut in CUTS.items()
}
SWITCHES |= OLD_LOGPROBS | REPORTED


@pytest.fixture(scope="module")
def failed(request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    """The cases of all tests that are to run, on one forked rank; the tracebacks of those that did
    not get through."""
    if one_rank_in_process():
        return {}  # each test runs its own: what it reaches is then known
    names = set(OLD_LOGPROBS)
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        case = given.get("case")
        names |= {case.name if isinstance(case, Case) else given.get("name")} & SWITCHES.keys()
    cases = {name: switches for name, switches in SWITCHES.items() if name in names}
    return run_ranks(1, iterate_all, folder, cases, deadline=280)[0]


def change(after: State, before: State) -> torch.Tensor:
    return torch.cat(
        [(after[name].double() - before[name].double()).flatten() for name in sorted(before)]
    )


def weights_after(folder: Path, switches: dict[str, Any], seen: Seen) -> dict[str, torch.Tensor]:
    """How far the formula takes the weights of each model that these switches train."""
    config = config_of(folder, switches).algorithm
    states = {"reference": read_tensors(folder / "reference"), **seen.begin}
    iteration = Iteration(folder / "policy", config, responses(folder), states)
    after = {"actor": iteration.policy_after(seen.steps["actor"])}
    if config.uses_critic:
        after["critic"] = iteration.critic_after(seen.steps["critic"])
    return {name: change(state, seen.begin[name]) for name, state in after.items()}


def what_was_seen(folder: Path, failed: dict[str, str], name: str) -> Seen:
    if one_rank_in_process():
        seen: Seen = run_ranks(1, iterate, folder, SWITCHES[name])[0]
        return seen
    assert name not in failed, failed[name]
    return load_seen(folder / f"{name}.pt")


def check_weights(folder: Path, switches: dict[str, Any], seen: Seen) -> dict[str, torch.Tensor]:
    wanted = weights_after(folder, switches, seen)
    assert set(wanted) == set(seen.end)
    for name, expected in wanted.items():
        found = change(seen.end[name], seen.begin[name])
        assert (found - expected).norm() < 1e-3 * expected.norm(), name
    return wanted


@pytest.mark.parametrize("case", others_in_full(CASES, IN_TEST), ids=lambda case: case.name)
def test_weights_are_those_of_the_formula_and_of_no_other(
    folder: Path, failed: dict[str, str], case: Case
) -> None:
    seen = what_was_seen(folder, failed, case.name)
    wanted = check_weights(folder, case.switches, seen)
    algorithm = config_of(folder, case.other_switches).algorithm
    if (
        algorithm.value_loss.outputs
        == config_of(folder, case.switches).algorithm.value_loss.outputs
    ):
        other = weights_after(folder, case.other_switches, seen)[case.changes]
        assert (other - wanted[case.changes]).norm() > 2e-2 * other.norm(), (
            "the rollout does not tell them apart"
        )


@pytest.mark.parametrize("name", CUTS)
def test_a_rollout_is_cut_into_the_steps_that_were_asked_for(
    folder: Path, failed: dict[str, str], name: str
) -> None:
    switches, sizes, *passes = CUTS[name]
    seen = what_was_seen(folder, failed, name)
    for model, rounds in zip(("actor", "critic"), passes, strict=True):
        steps = seen.steps[model]
        assert [len(step) for step in steps] == sizes * rounds
        for start in range(0, len(steps), len(sizes)):
            one_pass = steps[start : start + len(sizes)]
            assert sorted(s for step in one_pass for s in step) == list(range(12)), (
                "every response once a pass"
            )
            if switches.get(U + "minibatch_unit") == "groups":
                assert all(
                    s // 3 * 3 + i in step for step in one_pass for s in step for i in range(3)
                ), "groups whole"
        assert (
            len({str(steps[i : i + len(sizes)]) for i in range(0, len(steps), len(sizes))})
            == rounds
        ), "reshuffled"
    totals = {
        "score_policy": 12,
        "score_values": 12,
        "update_critic": 12 * passes[1],
        "update_policy": 12 * passes[0],
    }
    assert seen.progress == {name: (total, total) for name, total in totals.items()}
    assert {f"time/{name}" for name in totals} <= seen.row.keys()
    check_weights(folder, switches, seen)


def test_old_logprobs_of_only_update_are_scored_only_if_needed(
    folder: Path, failed: dict[str, str]
) -> None:
    found = {how: what_was_seen(folder, failed, how) for how in OLD_LOGPROBS}
    for how, seen in found.items():
        assert ("time/score_policy" in seen.row) == (how == "score")
        assert seen.row[names.TRAIN_INFER_KL] > 0, "compared with the engine's either way"
        check_weights(folder, OLD_LOGPROBS[how], seen)


@pytest.mark.parametrize("name", REPORTED)
def test_a_step_reports_what_happened(folder: Path, failed: dict[str, str], name: str) -> None:
    seen = what_was_seen(folder, failed, name)
    config = config_of(folder, REPORTED[name])
    states = {"reference": read_tensors(folder / "reference"), **seen.begin}
    iteration = Iteration(folder / "policy", config.algorithm, responses(folder), states)
    expected = reported(iteration, seen.row.get(names.BASELINE_POSITION))
    found = {
        key: value for key, value in seen.row.items() if not key.startswith(("time/", "memory/"))
    }
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("name", ["default"])
def test_metrics_of_several_steps_are_means_and_maxima(
    folder: Path, failed: dict[str, str], name: str
) -> None:
    seen = what_was_seen(folder, failed, name)
    states = {"reference": read_tensors(folder / "reference"), **seen.begin}
    iteration = Iteration(
        folder / "policy", config_of(folder, {}).algorithm, responses(folder), states
    )
    optimizers: dict[str, AdamW] = {}

    def watched(name: str) -> Callable[[list[torch.nn.Parameter]], AdamW]:
        return lambda parameters: optimizers.setdefault(name, AdamW(parameters, **ADAM))

    iteration.critic_after(seen.steps["critic"], optimizer=watched("critic"))
    iteration.policy_after(seen.steps["actor"], optimizer=watched("actor"))
    for name, optimizer in optimizers.items():
        norms = optimizer.norms
        losses = optimizer.losses
        assert seen.row[f"{name}/updates"] == len(norms) == 3
        assert seen.row[f"{name}/grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-3)
        assert seen.row[f"{name}/grad_norm_max"] == pytest.approx(max(norms), rel=1e-3)
        assert seen.row[f"{name}/lr"] == ADAM["lr"]
        loss = seen.row.get(names.VALUE_LOSS) if name == "critic" else None
        if loss is None:
            loss = seen.row["actor/policy_loss"] + 0.1 * seen.row["actor/nll_loss"]
        assert loss == pytest.approx(sum(losses) / 3, rel=1e-3, abs=1e-5)

"""Any two choices of the section algorithm together, beside the formulas of switch_formulas: on
tables in place of models, as in test_steps_without_models.py, where each choice is alone."""

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import pytest
from pairwise import Pair, Row, every_pair, pairs_of, pairwise_rows
from pydantic import ValidationError
from test_estimate_switches import algorithm_of
from test_step_switches import TILT, A, K, L, S, U, V, W
from test_steps_without_models import check_steps

from vapo_megatron.config.algorithm import AdvantageConfig, AlgorithmConfig, ShapingConfig
from vapo_megatron.config.base import Section
from vapo_megatron.config.policy import PolicyLossConfig

PARTS = 6  # of the rows, for several processes
RANKS = "ranks"
WIDE = {V + "low": -6.0, V + "high": 6.0}
NO_CHANGE: dict[str, Any] = {}


def named(section: type[Section], prefix: str, key: str) -> dict[str, dict[str, Any]]:
    """The choices that the type of a key names, except a user's function."""
    choices = get_args(section.model_fields[key].annotation)
    return {choice: {prefix + key: choice} for choice in choices if choice != "function"}


# By switch and choice: settings. The first choices go together.
SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "estimator": named(AdvantageConfig, A, "estimator")
    | {"function": {A + "estimator": "function", A + "function": TILT}},
    "loss": named(PolicyLossConfig, L, "kind")
    | {"function": {L + "kind": "function", L + "function": "switch_functions:nudge"}},
    "aggregation": {name: {L + "aggregation": name} for name in ("token_mean", "sequence_mean")}
    | {"constant": {L + "aggregation": "constant", L + "constant": 24.0}},
    "kl": {
        "none": NO_CHANGE,
        "reward": {K + "placement": "reward", K + "coef": 0.3},
        "advantage": {K + "placement": "advantage", K + "coef": 0.3},
        "loss_k2": {K + "placement": "loss", K + "estimator": "k2", K + "coef": 0.5},
        "loss_k3": {K + "placement": "loss", K + "estimator": "k3", K + "coef": 0.5},
    },
    "correction": {
        "none": NO_CHANGE,
        "tis": {W + "kind": "tis", W + "cap": 1.05},
        "mis": {W + "kind": "mis", W + "low": 0.8, W + "high": 1.3},
    },
    "truncated": named(ShapingConfig, S, "truncated"),
    "overlong": {
        "none": NO_CHANGE,
        "soft": {S + "soft_overlong.max_length": 18, S + "soft_overlong.cache_length": 8},
    },
    "filter": {"none": NO_CHANGE, "odd": {"algorithm.filter_function": "switch_functions:keep"}},
    "advantages": {"estimated": NO_CHANGE, "function": {A + "function": TILT}},
    "whiten": named(AdvantageConfig, A, "whiten"),
    "gamma": {"1": NO_CHANGE, "0.8": {A + "gamma": 0.8}},
    "lambda_policy": {"adaptive": NO_CHANGE, "0.3": {A + "lambda_policy": 0.3}},
    "lambda_critic": {
        "1": NO_CHANGE,
        "0.5": {A + "lambda_critic": 0.5},
        "adaptive": {A + "lambda_critic": "length_adaptive"},
    },
    "off_policy": named(AdvantageConfig, A, "off_policy"),
    "calibration": named(AdvantageConfig, A, "calibration"),
    "tracker": {"no": NO_CHANGE, "yes": {A + "tracker": True}},
    "credit": named(AdvantageConfig, A, "credit"),
    "value_loss": {
        "mse": NO_CHANGE,
        "clipped": {V + "kind": "clipped", V + "clip": 0.05},
        "hl_gauss": {V + "kind": "hl_gauss", V + "bins": 21, **WIDE},
    },
    "squash": {"none": NO_CHANGE}
    | {name: {V + "squash": name, **WIDE} for name in ("tanh", "arctan")},
    "clip": {"usual": NO_CHANGE, "tight": {L + "clip_low": 0.02, L + "clip_high": 0.05}},
    "dual_clip": {"none": NO_CHANGE, "1.3": {L + "dual_clip": 1.3}},
    "entropy": {"0": NO_CHANGE, "0.3": {L + "entropy_coef": 0.3}},
    "positive_nll": {"0.1": NO_CHANGE, "0": {L + "positive_nll.coef": 0.0}},
    "minibatch": {
        "responses": {U + "minibatch_size": 5},
        "groups": {U + "minibatch_unit": "groups", U + "minibatch_size": 3},
        "whole": {U + "minibatches": 1},
    },
    "epochs": {"1": NO_CHANGE, "2": {U + "epochs": 2}},
    "critic_rounds": {"1": NO_CHANGE, "2": {U + "critic_updates_per_policy_update": 2}},
    "old_logprobs": {"scored": NO_CHANGE, "engines": {U + "rollout_logprobs_within": 10.0}},
    RANKS: {"1": NO_CHANGE, "2": NO_CHANGE},
}
CHOICES = {switch: list(choices) for switch, choices in SWITCHES.items()}
FIRSTS: Row = {switch: choices[0] for switch, choices in CHOICES.items()}


def config_of(row: Row) -> AlgorithmConfig:
    settings: dict[str, Any] = {}
    for switch, choice in row.items():
        settings |= SWITCHES[switch][choice]
    return algorithm_of(settings)


def fits(row: Row) -> bool:
    try:
        config_of(row)
    except ValidationError:
        return False
    return True


@cache
def all_rows() -> tuple[list[Row], set[Pair]]:
    return pairwise_rows(CHOICES, fits)


def check_rows(rows: Sequence[Row]) -> None:
    for row in rows:
        try:
            check_steps(config_of(row), int(row[RANKS]))
        except Exception as error:
            error.add_note(f"with {dict(row.items() - FIRSTS.items())}")
            raise


@pytest.mark.parametrize("part", range(PARTS))
def test_any_two_choices_train_together_as_the_formula_says(part: int) -> None:
    check_rows(all_rows()[0][part::PARTS])


def in_one_update(switch: str, choice: str) -> Row:
    """A choice with a whole rollout in one update, beside first choices; where it needs another
    one, that as well."""
    row = FIRSTS | {"minibatch": "whole", switch: choice}
    others = [other for other in CHOICES if other not in (switch, "minibatch")]
    helped = (row | {other: choice} for other in others for choice in CHOICES[other])
    return row if fits(row) else next(filter(fits, helped))


@pytest.mark.parametrize("part", range(PARTS))
def test_any_choice_trains_in_an_update_that_scores_its_rollout(part: int) -> None:
    """In most rows of pairs a third choice has the rollout scored before, which hides what this
    pair does."""
    others = [
        (switch, choice)
        for switch in CHOICES
        if switch != "minibatch"
        for choice in CHOICES[switch][1:]
    ]
    check_rows([in_one_update(*other) for other in others[part::PARTS]])


def test_pairs_are_left_out_only_where_the_config_refuses_them() -> None:
    rows, refused = all_rows()
    met = set().union(*map(pairs_of, rows))
    assert met | refused == set(every_pair(CHOICES)) and not met & refused
    assert all(map(fits, rows))
    for pair in refused:
        assert not any(fits(row | dict(pair)) for row in rows[::10]), pair

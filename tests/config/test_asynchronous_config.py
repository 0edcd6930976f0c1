"""Which rollouts an algorithm allows, and which are refused in one line."""

from typing import Any

import pytest
from pydantic import ValidationError

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.train import TrainConfig

TIS = {"importance_sampling": {"kind": "tis"}}


def config(rollout: dict[str, Any], algorithm: dict[str, Any]) -> TrainConfig:
    tree: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "unread.jsonl"},
        "sampling": {"max_new_tokens": 24},
        "rollout": rollout,
        "algorithm": algorithm,
        "value_pretraining": {
            "enabled": algorithm.get("advantage", {}).get("estimator", "gae") == "gae"
        },
    }
    return TrainConfig.model_validate(tree)


def ahead(staleness: int, **more: Any) -> dict[str, Any]:
    return {"asynchronous": {"max_staleness": staleness, **more}}


PARTIAL = {"partial_responses": {"oversampling": 1.5}}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ahead(-1), TIS, "greater than or equal to 0"),
    (
        ahead(1),
        {},
        r"max_staleness=1 with algorithm.importance_sampling.kind=none and .* "
        "nothing corrects for it",
    ),
    (
        PARTIAL,
        {},
        r"partial_responses.oversampling=1.5 with algorithm.importance_sampling.kind=none",
    ),
    (
        ahead(2),
        TIS | {"advantage": {"estimator": "remax"}},
        "estimator=remax: its greedy responses come from newer weights",
    ),
    (
        PARTIAL,
        TIS | {"advantage": {"estimator": "grpo"}},
        r"estimator=grpo: it compares responses of a group",
    ),
    (
        PARTIAL | ahead(1),
        TIS,
        r"partial_responses.oversampling=1.5 with asynchronous.max_staleness=1",
    ),
    (
        PARTIAL | {"deterministic": True},
        TIS,
        r"partial_responses.oversampling=1.5 with deterministic=true",
    ),
    (
        ahead(1) | {"router_replay": True},
        TIS,
        r"router_replay=true with asynchronous.max_staleness=1",
    ),
    (
        ahead(0, weight_sync="retract"),
        TIS,
        r"weight_sync=retract with asynchronous.max_staleness=0: no response runs",
    ),
    (
        ahead(1, weight_sync="in_place") | {"deterministic": True},
        TIS,
        r"weight_sync=in_place with deterministic=true",
    ),
]


@pytest.mark.parametrize(("rollout", "algorithm", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(
    rollout: dict[str, Any], algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(rollout, algorithm)


def test_what_corrects_for_age_is_allowed() -> None:
    assert config(ahead(2), TIS).rollout.asynchronous.max_staleness == 2
    config(ahead(2), {"policy_loss": {"kind": "sao"}})
    config(ahead(1), TIS | {"advantage": {"estimator": "grpo"}})
    config(PARTIAL, TIS)


@pytest.mark.parametrize(
    ("settings", "on_gpus", "mode"),
    [
        ({}, True, "wait"),
        (ahead(1), False, "wait"),
        (ahead(1), True, "retract"),
        (ahead(1) | {"deterministic": False}, False, "retract"),
        (ahead(1, weight_sync="in_place"), True, "in_place"),
        (ahead(1, weight_sync="wait"), True, "wait"),
    ],
)
def test_weight_sync_waits_for_deterministic_results(
    settings: dict[str, Any], on_gpus: bool, mode: str
) -> None:
    assert RolloutConfig.model_validate(settings).sync_mode("bfloat16", on_gpus) == mode

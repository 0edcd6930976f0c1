"""Valid and refused configs with values by regression."""

from typing import Any

import pytest

from vapo_megatron.config.train import TrainConfig


def config_of(critic: dict[str, Any], **sections: Any) -> TrainConfig:
    defaults = {"value_pretraining": {"enabled": False}}
    return TrainConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "sampling": {"max_new_tokens": 8},
            "critic": critic,
            **defaults,
            **sections,
        }
    )


def advantage(**settings: Any) -> dict[str, Any]:
    return {"algorithm": {"advantage": settings}}


def test_its_features_are_in_the_resolved_config() -> None:
    config = config_of({"kind": "regression"})
    regression = config.critic.regression
    assert regression is not None and regression.prefix and not regression.entropy
    again = TrainConfig.model_validate(config.model_dump(by_alias=True))
    assert again == config
    assert not config.has_critic_model and not config.has_probe
    assert set(config.sources) == {"actor"}
    assert config_of({"kind": "model"}).critic.regression is None


def test_entropies_need_the_pass_that_scores_the_policy() -> None:
    assert not config_of({"kind": "regression"}).reads_policy_outputs
    assert config_of({"kind": "regression", "regression": {"entropy": True}}).reads_policy_outputs
    assert config_of({"kind": "probe"}).reads_policy_outputs


KIND = {"kind": "regression"}
NO_GROUPS = {"siblings": False, "prefix": False}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        KIND,
        {"value_pretraining": {"enabled": True}},
        "value_pretraining.enabled=true with critic.k",
    ),
    (KIND, advantage(estimator="grpo"), "critic.kind=regression with algorithm.advantage.est"),
    (KIND, {"batch": {"samples_per_prompt": 1}}, "siblings=true with batch.samples_per_prompt=1"),
    (
        {**KIND, "regression": {"siblings": False}},
        {"batch": {"samples_per_prompt": 1}},
        "critic.regression.prefix=true with batch.samples_per_prompt=1",
    ),
    (KIND, advantage(gamma=0.9), "critic.regression with algorithm.advantage.gamma=0.9"),
    (KIND, advantage(off_policy="vtrace"), "off_policy=vtrace: it learns from the undiscounted"),
    (KIND, advantage(function="a.b:c"), "critic.regression with algorithm.advantage.function"),
    (
        {**KIND, "regression": NO_GROUPS},
        {**advantage(calibration="values", tracker=True), "batch": {"samples_per_prompt": 1}},
        "set critic.regression.history",
    ),
    (
        KIND,
        {"algorithm": {"shaping": {"truncated": "bootstrap"}}},
        "truncated=bootstrap: it learns",
    ),
    (
        KIND,
        {"algorithm": {"kl": {"placement": "reward", "coef": 0.1}}},
        "kl.placement=reward: it learns",
    ),
    (KIND, {"algorithm": {"value_loss": {"kind": "clipped"}}}, "a regression has no loss"),
    (KIND, advantage(lambda_critic=0.9), "a regression has no loss"),
    (
        {**KIND, "regression": {"entropy": True}},
        {"algorithm": {"update": {"rollout_logprobs_within": 0.1}}},
        "critic.regression.entropy=true with algorithm.update.rollout_logprobs_within=0.1",
    ),
    ({**KIND, "layout": {"tp": 2}}, {}, "layout with kind=regression: it has no weights"),
    ({**KIND, "head_init_std": 0.1}, {}, "head_init_std with kind=regression"),
    ({"regression": {}}, {}, "critic.regression with critic.kind=model and .*calibration=none"),
]


@pytest.mark.parametrize(("critic", "sections", "message"), REFUSED)
def test_what_does_not_go_with_it_is_refused_by_name(
    critic: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(critic, **sections)


@pytest.mark.parametrize(
    ("critic", "sections"),
    [
        (KIND, advantage(calibration="trust")),
        (KIND, advantage(credit="turn") | {"rollout": {"agent": "a.b:c"}}),
        ({**KIND, "regression": NO_GROUPS}, {"batch": {"samples_per_prompt": 1}}),
        ({"regression": {"entropy": True}}, advantage(calibration="trust")),
        ({"kind": "probe", "regression": {}}, advantage(calibration="values")),
    ],
)
def test_what_goes_with_it_is_taken(critic: dict[str, Any], sections: dict[str, Any]) -> None:
    config_of(critic, **sections)

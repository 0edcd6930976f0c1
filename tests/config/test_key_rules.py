"""Rules across sections at their limits: what is just allowed, and the line for one step more."""

from typing import Any

import pytest
from pydantic import ValidationError

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.model import CriticConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput

REQUIRED = ("model.path=m", "data.train=t", "sampling.max_new_tokens=2048")
UNDONE = "take it out of the file or the overrides, or choose another preset"
GRADES = (
    "needs the verifier's grade, which reward.correct_above=null leaves out: set that, or switch "
    "this off"
)
SCORES = (
    "reward.verifier=function",
    "reward.function=a:b",
    "reward.correct_above=null",
)
OF_FILE = "{verifier: function, function: 'a:b', correct_above: null}"
BINS = "algorithm.value_loss.kind=hl_gauss"
SQUASH = "algorithm.value_loss.squash=tanh"
UPDATE = "algorithm.update={{minibatches: null, minibatch_size: {size}}}"
WIDEN = "of reward.incorrect, reward.correct and algorithm.shaping: widen it"
UNBOUNDED = (
    "with reward.verifier=function: its scores are unbounded, give algorithm.value_loss.low and "
    "high"
)
NO_NLL = "algorithm.policy_loss.positive_nll.coef=0"


def refusal(*overrides: str) -> str | None:
    try:
        load_config(TrainConfig, None, [*REQUIRED, *overrides], PRESETS)
    except BadInput as error:
        return str(error).partition(": ")[2]
    return None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["preset=rloo", UPDATE.format(size=8192)], None),
        (
            ["preset=rloo", UPDATE.format(size=8191)],
            "preset=rloo needs one update per rollout, but algorithm.update gives 2: " + UNDONE,
        ),
        (["preset=rloo", "algorithm.update.epochs=2"], None),
        (
            ["preset=remax", UPDATE.format(size=100)],
            "preset=remax needs one update per rollout, but algorithm.update gives 82: " + UNDONE,
        ),
        (["preset=grpo", UPDATE.format(size=8191)], None),
        (
            ["preset=vapo_without_clip_higher", "algorithm.policy_loss.clip_high=0.3"],
            "algorithm.policy_loss.clip_high=0.3 with preset=vapo_without_clip_higher: it needs "
            f"clip_low=0.2: {UNDONE}",
        ),
        (
            [
                "preset=vapo_without_clip_higher",
                "algorithm.policy_loss={clip_low: 1.0, clip_high: 1}",
            ],
            None,
        ),
        (
            ["preset=vapo_without_positive_nll", "algorithm.policy_loss.positive_nll.coef=1"],
            "algorithm.policy_loss.positive_nll.coef=1 with preset=vapo_without_positive_nll: it "
            f"undoes what the preset is named after: {UNDONE}",
        ),
        (
            [
                "preset=vapo_without_length_adaptive_gae",
                "algorithm.advantage.lambda_policy=length_adaptive",
            ],
            "algorithm.advantage.lambda_policy=length_adaptive with "
            "preset=vapo_without_length_adaptive_gae: it undoes what the preset is named after: "
            f"{UNDONE}",
        ),
        ([*SCORES, NO_NLL], None),
        (list(SCORES), f"algorithm.policy_loss.positive_nll.coef=0.1: {GRADES}"),
        (
            [*SCORES, NO_NLL, "algorithm.dynamic_sampling.max_rounds=2"],
            f"algorithm.dynamic_sampling.max_rounds=2: {GRADES}",
        ),
        (
            [f"data.train={{a: {{reward: {OF_FILE}}}}}"],
            f"algorithm.policy_loss.positive_nll.coef=0.1: {GRADES}",
        ),
        ([BINS], None),
        ([SQUASH], None),
        (
            [BINS, "reward.correct=1.5"],
            f"algorithm.value_loss.low..high=-1..1 does not contain the returns -1..1.5 {WIDEN}",
        ),
        (
            [SQUASH, "reward.incorrect=-1.5"],
            f"algorithm.value_loss.low..high=-1..1 does not contain the returns -1.5..1 {WIDEN}",
        ),
        ([BINS, "reward.incorrect=-1.5", "algorithm.value_loss.low=-1.5"], None),
        (["reward.correct=1.5"], None),
        ([BINS, *SCORES[:2]], f"algorithm.value_loss.kind=hl_gauss {UNBOUNDED}"),
        ([SQUASH, *SCORES[:2]], f"algorithm.value_loss.squash=tanh {UNBOUNDED}"),
        (
            [BINS, *SCORES[:2], "algorithm.value_loss.low=-2"],
            f"algorithm.value_loss.kind=hl_gauss {UNBOUNDED}",
        ),
        ([BINS, *SCORES[:2], "algorithm.value_loss={low: -2, high: 2}"], None),
        (
            ["rollout.collect_timeout_s=60", "cluster.collective_timeout_s=60"],
            "rollout.collect_timeout_s=60 s is not below cluster.collective_timeout_s=60 s: ranks "
            "would give up on a rollout that is still within its limit: raise the latter",
        ),
        (["rollout.collect_timeout_s=60", "cluster.collective_timeout_s=60.5"], None),
        (["run.steps=3", "run.profile.steps=[1, 3]"], None),
        (
            ["run.steps=3", "run.profile.steps=[1, 4, 5]"],
            "run: profile.steps=4 is above steps=3: name steps within the run",
        ),
        (
            ["value_pretraining.enabled=false", "critic={kind: probe, head_init_std: 0.1}"],
            None,
        ),
        (
            [
                "critic.regression={}",
                "algorithm.advantage.calibration=none",
            ],
            "critic.regression with critic.kind=model and algorithm.advantage.calibration=none: "
            "nothing would read its features: set calibration=values or trust, or "
            "critic.kind=regression",
        ),
    ],
)
def test_a_rule_holds_up_to_its_limit(overrides: list[str], told: str | None) -> None:
    assert refusal(*overrides) == told


PROBE = "with kind=probe: a probe reads the actor's hidden states, leave it out (or all, by "
WEIGHTS = "with kind=regression: it has no weights, leave it out (or all, by critic=null before)"


@pytest.mark.parametrize(
    ("critic", "told"),
    [
        ({"kind": "probe", "probe": {"width": 8}}, None),
        ({"kind": "probe", "optimizer": {"lr": 1e-3}, "head_init_std": 1.0}, None),
        ({"kind": "probe", "init": "value_checkpoint", "init_path": "p"}, None),
        ({"kind": "probe", "regression": {}}, None),
        ({"kind": "probe", "init": "reward_model", "init_path": "p"}, "init " + PROBE),
        ({"kind": "probe", "layout": {"tp": 2}}, "layout " + PROBE),
        ({"kind": "probe", "freeze_attention": True}, "freeze_attention " + PROBE),
        ({"kind": "regression", "regression": {"history": True}}, None),
        ({"kind": "regression", "optimizer": {"lr": 1e-3}}, "optimizer " + WEIGHTS),
        ({"kind": "regression", "offload": "never"}, "offload " + WEIGHTS),
        ({"init": "policy", "model_path": "small"}, None),
        (
            {"init": "reward_model", "init_path": "p", "model_path": "small"},
            "model_path=small with init=reward_model: backbone and head come from init_path, leave "
            "model_path out",
        ),
        (
            {"kind": "adapter", "probe": {"width": 8}},
            "probe with kind=adapter: only a probe has these keys, set kind=probe or remove them",
        ),
    ],
)
def test_a_critic_has_only_the_keys_of_its_kind(critic: dict[str, Any], told: str | None) -> None:
    if told is None:
        CriticConfig.model_validate(critic)
        return
    with pytest.raises(ValidationError) as refused:
        CriticConfig.model_validate(critic)
    assert refused.value.errors()[0]["msg"].startswith(f"Value error, {told}")


@pytest.mark.parametrize(
    ("address", "is_one"),
    [
        ("http://host:1", True),
        ("http://[::1]:30000", True),
        ("http://host:0", False),
        ("http://host:70000", False),
        ("http://host", False),
        ("http://:1", False),
        ("https://host:1", False),
        ("http://host:1/", False),
        ("http://host:1?a", False),
        ("http://[::1:30000", False),
        ("HTTP://host:1", False),
        ("", False),
    ],
)
def test_an_engine_is_named_by_host_and_port(address: str, is_one: bool) -> None:
    if is_one:
        RolloutConfig(external_urls=(address,))
        return
    with pytest.raises(ValidationError) as refused:
        RolloutConfig(external_urls=(address,))
    assert f"external_urls: {address!r} is not of the form http://host:port" in str(refused.value)

"""Switches of different sections that contradict each other are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import write_config

from vapo_megatron.config import algorithm
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput

AGENT = "rollout.agent=a:b"
PRESETS = Path(algorithm.__file__).parent / "presets"
FUNCTION = "{verifier: function, function: a.b:c, correct_above: null}"
SCORES = ["reward.verifier=function", "reward.function=a.b:c", "reward.correct_above=null"]


def load(tmp_path: Path, *overrides: str) -> TrainConfig:
    required: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "sampling": {"max_new_tokens": 8192},
    }
    return load_config(
        TrainConfig, write_config(tmp_path / "train.yaml", required), overrides, PRESETS
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["preset=grpo", "batch.samples_per_prompt=1"], "batch.samples_per_prompt=1"),
        (["preset=dapo", "batch.samples_per_prompt=1"], "batch.samples_per_prompt=1"),
        (
            ["algorithm.dynamic_sampling.max_rounds=10", "batch.samples_per_prompt=1"],
            "dynamic_sampling.max_rounds=10",
        ),
        (["algorithm.advantage.lambda_policy=1.5"], "lambda_policy"),
        (["algorithm.advantage.credit=turn"], "credit=turn with rollout.agent=null"),
        (
            ["algorithm.advantage.credit=turn", "rollout.agent=a:b", "rollout.episode.max_turns=1"],
            "credit=turn with rollout.episode.max_turns=1",
        ),
        ([AGENT, "preset=remax"], "rollout.agent=a:b with algorithm.advantage.estimator=remax"),
        (
            [AGENT, "data.prompt.chat_template=false"],
            "rollout.agent=a:b with data.prompt.chat_template=false",
        ),
        (
            [AGENT, "rollout.partial_responses.oversampling=1.5"],
            "agent=a:b with partial_responses.oversampling=1.5",
        ),
        (
            [
                "rollout.windows=2",
                "algorithm.shaping.truncated=window",
                "algorithm.mask_function=a:b",
            ],
            "rollout.windows=2 with algorithm.mask_function=a:b",
        ),
        (["algorithm.kl.coef=0.1"], "placement=none with coef=0.1"),
        (
            ["preset=grpo", "value_pretraining.enabled=true"],
            "value_pretraining.enabled=true with algorithm.advantage",
        ),
        (
            ["preset=grpo", "critic.freeze_attention=true"],
            "critic.freeze_attention=true with algorithm.advantage",
        ),
        (["preset=grpo", "critic.kind=adapter"], "critic.kind=adapter with algorithm.advantage"),
        (
            ["preset=grpo", "critic.privileged_field=a"],
            "critic.privileged_field=a with algorithm.advantage",
        ),
        (
            ["preset=vapo_direct", "critic.kind=probe", "critic.privileged_field=a"],
            "critic: privileged_field with kind=probe: a probe reads the actor's hidden states",
        ),
        (["preset=grpo", "critic.kind=probe"], "critic.kind=probe with algorithm.advantage"),
        (
            ["preset=tether", "batch.samples_per_prompt=1"],
            "calibration=tether with batch.samples_per_prompt=1",
        ),
        (
            ["preset=tether", "critic.regression={}"],
            "calibration=tether with critic.regression",
        ),
        (["preset=tether", "algorithm.advantage.tracker=true"], "calibration=tether with tracker"),
        (
            ["preset=tether", "algorithm.advantage.calibration=trust"],
            "calibration=trust with preset=tether",
        ),
        (["critic.kind=probe"], "value_pretraining.enabled=true with critic.kind=probe"),
        (
            ["preset=vapo_direct", "critic.kind=probe", "critic.layout.tp=2"],
            "critic: layout with kind=probe",
        ),
        (
            [
                "preset=vapo_direct",
                "critic.kind=probe",
                "critic.init=reward_model",
                "critic.init_path=p",
            ],
            "critic: init with kind=probe",
        ),
        (["actor.kind=probe"], "actor.kind"),
        (["preset=vapo_direct", "critic.probe.width=64"], "critic: probe with kind=model"),
        (["preset=vapo_direct", "critic.kind=probe", "critic.probe.layer=0"], "critic.probe.layer"),
        (
            ["critic.kind=adapter", "critic.freeze_attention=true"],
            "critic.freeze_attention=true with critic.kind",
        ),
        (
            [
                "actor.kind=adapter",
                "algorithm.kl={placement: loss, coef: 0.1, estimator: k3, replace_reference_every: "
                "2}",
            ],
            "replace_reference_every=2 with actor.kind=adapter",
        ),
        (["critic.kind=adapter", "model.adapter.layers=[q_proj]"], "model.adapter.layers.0"),
        (
            ["preset=grpo", "critic.init=reward_model", "critic.init_path=m"],
            "critic.init=reward_model with algorithm.advantage",
        ),
        (
            [
                "critic.init=reward_model",
                "critic.init_path=m",
                "algorithm.value_loss.kind=hl_gauss",
            ],
            "critic.init=reward_model with algorithm.value_loss.kind=hl_gauss",
        ),
        (
            ["algorithm.value_loss.kind=hl_gauss", "reward.correct=2.0"],
            "does not contain the returns -1..2 of reward",
        ),
        (
            [
                "algorithm.value_loss.kind=hl_gauss",
                "data.train={a.jsonl: {reward: {correct: 3, incorrect: 0}}, b: 1}",
            ],
            "does not contain the returns -1..3 of reward",
        ),
        (
            [
                "algorithm.value_loss.kind=hl_gauss",
                f"data.train={{a.jsonl: {{reward: {FUNCTION}}}, b.jsonl: 1}}",
            ],
            "its scores are unbounded",
        ),
        (
            [f"data.train={{a.jsonl: {{reward: {FUNCTION}}}}}"],
            "positive_nll.coef=0.1: needs the verifier's grade",
        ),
        (
            ["data.train={a.jsonl: {reward: {verifer: code}}}"],
            "a.jsonl: reward: unknown key verifer; did you mean ver",
        ),
        (
            ["reward.judge={url: 'http://a/v1', model: m}"],
            "nothing uses it, set reward.verifier=judge, or data.fields",
        ),
        (
            ["algorithm.value_loss.squash=tanh", "preset=dapo"],
            "value_loss.squash=tanh with advantage.estimator=grpo: it needs a critic",
        ),
        (
            [
                "algorithm.value_loss.squash=tanh",
                "algorithm.shaping.soft_overlong={max_length: 9, cache_length: 3}",
            ],
            "does not contain the returns -2..1",
        ),
        (
            [
                "algorithm.value_loss.squash=tanh",
                "reward.verifier=function",
                "reward.function=a.b:c",
            ],
            "its scores are unbounded, give algorithm.value_loss.low and high",
        ),
        (
            ["algorithm.value_loss.squash=tanh", "algorithm.kl={placement: reward, coef: 0.1}"],
            "algorithm.kl.placement=reward with algorithm.value_loss.squash=tanh",
        ),
        (
            [
                "algorithm.shaping.truncated=bootstrap",
                "algorithm.shaping.soft_overlong={max_length: 9, cache_length: 3}",
            ],
            "shaping.soft_overlong with shaping.truncated=bootstrap",
        ),
        (
            ["algorithm.update.rollout_logprobs_within=0.01", "rollout.router_replay=true"],
            "with rollout.router_replay=tr",
        ),
        (
            ["algorithm.update.rollout_logprobs_within=0.01", "sampling.top_p=0.9"],
            "sampling.top_p=0.9",
        ),
        (
            [
                "preset=vapo_direct",
                "critic.kind=probe",
                "algorithm.update.rollout_logprobs_within=0.01",
            ],
            "rollout_logprobs_within=0.01 with critic.kind=probe",
        ),
        (
            ["algorithm.update={minibatch_size: 8, minibatches: 2}"],
            "minibatch_size=8 with minibatches=2",
        ),
        (
            ["preset=rloo", "algorithm.update.minibatch_size=64"],
            "minibatch_size=64 with minibatches=1",
        ),
        (
            ["preset=rloo", "algorithm.update={minibatch_size: 64, minibatches: null}"],
            "preset=rloo needs one update per rollout, but algorithm.update gives 128",
        ),
        (
            ["preset=vapo_without_group_sampling", "batch.samples_per_prompt=8"],
            "batch.samples_per_prompt=8 with preset=vapo_without",
        ),
        (
            ["preset=vapo_without_clip_higher", "algorithm.policy_loss.clip_high=0.28"],
            "algorithm.policy_loss.clip_high=0.28 with preset=vapo",
        ),
        (
            ["preset=vapo_without_decoupled_gae", "algorithm.advantage.lambda_critic=1.0"],
            "lambda_critic=1 with preset=vapo_without",
        ),
        ([*SCORES, "preset=raft"], "advantage.estimator=raft: needs the verifier's grade"),
        (SCORES, "positive_nll.coef=0.1: needs the verifier's grade"),
        ([*SCORES, "preset=dapo"], "dynamic_sampling.max_rounds=10: needs the verifier's grade"),
        (["reward.correct_above=null"], "correct_above=null with verifier=math"),
    ],
)
def test_contradictions_between_sections_are_refused_by_name(
    tmp_path: Path, overrides: list[str], told: str
) -> None:
    with pytest.raises(BadInput) as refused:
        load(tmp_path, *overrides)
    assert told in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*SCORES, "algorithm.policy_loss.positive_nll.coef=0"],
        [
            "algorithm.value_loss.kind=hl_gauss",
            "reward.correct=2.0",
            "algorithm.value_loss.high=2.0",
        ],
        ["preset=grpo", "algorithm.kl.replace_reference_every=25"],
        ["algorithm.value_loss={squash: tanh}"],
        ["preset=rloo", "algorithm.update={minibatch_size: 8192, minibatches: null}"],
        ["preset=vapo_without_group_sampling", "batch.prompts_per_step=64"],
        ["preset=vapo_without_decoupled_gae", "algorithm.advantage.lambda_critic=0.9"],
        [AGENT, "preset=dapo", "rollout.router_replay=true"],
    ],
)
def test_what_is_refused_can_be_mended(tmp_path: Path, overrides: list[str]) -> None:
    load(tmp_path, *overrides)


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_every_preset_is_a_whole_config(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, f"preset={name}")
    assert config.value_pretraining.enabled <= config.algorithm.uses_critic


def test_user_file_cannot_undo_what_a_preset_is_named_after(tmp_path: Path) -> None:
    """examples/gsm8k/vapo.yaml has a batch section: the preset was a no-op over it."""
    gsm8k = Path(__file__).parents[2] / "examples" / "gsm8k" / "vapo.yaml"
    with pytest.raises(
        BadInput, match=r"batch.samples_per_prompt=8 with preset=vapo_without_group_sampling"
    ):
        load_config(TrainConfig, gsm8k, ["preset=vapo_without_group_sampling"], PRESETS)
    with pytest.raises(
        BadInput, match=r"minibatch_size=256 with minibatches=1: both split a rollout"
    ):
        load_config(TrainConfig, gsm8k, ["preset=rloo", "value_pretraining.enabled=false"], PRESETS)


@pytest.mark.parametrize(
    ("settings", "rollouts", "updates"),
    [
        ({}, 4, 50),  # 50 x 512 of 7/8 x 8192 a rollout
        ({"steps": 12}, 1, 12),
        ({"iterations": 50}, 50, 700),
        ({"iterations": 50, "steps": 100}, 50, 100),
        ({"iterations": 50, "replay_epochs": 2}, 50, 1400),
        ({"replay_epochs": 4}, 1, 50),
    ],
)
def test_value_pretraining_counts_gradient_steps_by_default(
    tmp_path: Path, settings: dict[str, int], rollouts: int, updates: int
) -> None:
    config = load(
        tmp_path,
        "preset=vapo",
        *(f"value_pretraining.{key}={value}" for key, value in settings.items()),
    )
    assert config.value_pretraining.rollouts(config.samples) == rollouts
    assert config.value_pretraining.updates(config.samples) == updates


def test_dapo_warms_up_by_rollouts_and_gspo_takes_four_steps(tmp_path: Path) -> None:
    dapo = load(tmp_path, "preset=dapo")
    gspo = load(tmp_path, "preset=gspo")
    assert dapo.updates_per_rollout("actor") == 16
    assert dapo.actor.optimizer.warmup_steps == 20 * dapo.updates_per_rollout("actor") == 20 * 16
    assert gspo.updates_per_rollout("actor") == 4
    assert dapo.trainable("actor").optimizer.warmup_steps == 320
    assert gspo.trainable("actor").optimizer.warmup_steps == 10
    sao = load(tmp_path, "preset=sao")
    assert (sao.updates_per_rollout("actor"), sao.updates_per_rollout("critic")) == (1, 2)

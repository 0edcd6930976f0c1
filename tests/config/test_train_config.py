"""What holds between sections is checked before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.balance import Cost, plan_microbatches
from vapo_megatron.errors import BadInput

MINIMAL: dict[str, Any] = {
    "model": {"path": "somewhere"},
    "data": {"train": "train.jsonl"},
    "sampling": {"max_new_tokens": 16},
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k" / "vapo.yaml"


def test_the_defaults_are_vapo() -> None:
    config = TrainConfig.model_validate(MINIMAL)
    advantage = config.algorithm.advantage
    loss = config.algorithm.policy_loss
    assert (advantage.estimator, advantage.lambda_critic, advantage.lambda_policy) == (
        "gae",
        1.0,
        "length_adaptive",
    )
    assert (advantage.length_adaptive_alpha, loss.clip_low, loss.clip_high) == (0.05, 0.2, 0.28)
    assert (loss.aggregation, loss.positive_nll.coef) == ("token_mean", 0.1)
    assert (config.batch.prompts_per_step, config.batch.samples_per_prompt) == (512, 16)
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (1e-6, 2e-6)
    assert config.value_pretraining.enabled and config.value_pretraining.most_steps == 50
    assert (config.reward.correct, config.reward.incorrect) == (1.0, -1.0)


def test_partial_section_keeps_the_other_defaults_of_its_place() -> None:
    """A preset without critic.optimizer, an override of its warm-up: the critic learned half as
    fast as documented."""
    overrides = [
        "model.path=m",
        "data.train=t",
        "sampling.max_new_tokens=16",
        "critic.optimizer.warmup_steps=3",
    ]
    config = load_config(
        TrainConfig, None, ["preset=vapo_without_positive_nll", *overrides], PRESETS
    )
    assert (config.critic.optimizer.lr, config.critic.optimizer.warmup_steps) == (2e-6, 3)
    assert config.actor.optimizer.lr == 1e-6
    sft = SftConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "run": {"root": "r"}}
    )
    assert sft.run.directory == "r/sft"


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"sampling": {"max_new_tokens": 16, "temperature": 0}},
            "sampling.temperature=0: it is greedy",
        ),
        (
            {"sampling": {"max_new_tokens": 16, "top_p": 0.9}},
            "sampling.top_p=0.9: the trainer computes log-probs",
        ),
        ({"reward": {"grade_truncated": True}}, "grade_truncated=true with verifier=math"),
        (
            {"cluster": {"collective_timeout_s": 3600}},
            "rollout.collect_timeout_s=7200 s is not below",
        ),
    ],
)
def test_sections_that_disagree_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(MINIMAL | change)


@pytest.mark.parametrize(
    "layout,max_tokens,longest",
    [
        (LayoutConfig(), 100, 100),
        (
            LayoutConfig(tp=8, sequence_parallel=True),
            100,
            96,
        ),  # the micro-batch as a whole is padded to 8
        (LayoutConfig(cp=4), 100, 400),
        (LayoutConfig(cp=4), 101, 400),  # sequences are padded to 8
    ],
)
def test_the_longest_sample_of_a_layout_just_fits(
    layout: LayoutConfig, max_tokens: int, longest: int
) -> None:

    assert layout.longest_sample(max_tokens) == longest

    def plan(tokens: int) -> None:
        plan_microbatches(
            [0],
            [tokens],
            dp_size=1,
            max_tokens=max_tokens * layout.cp,
            cost=Cost(1, 0),
            alignment=layout.alignment,
            total_alignment=layout.total_alignment,
        )

    plan(longest + 1)  # a sample of n tokens has n - 1 positions
    with pytest.raises(BadInput):
        plan(longest + 2)


@pytest.mark.parametrize(("cp", "shares"), [(1, True), (2, False)])
def test_a_context_parallel_reference_shares_no_prompts(cp: int, shares: bool) -> None:
    config = TrainConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "sampling": {"max_new_tokens": 16},
            "algorithm": {"kl": {"placement": "reward", "coef": 0.1}},
            "actor": {"share_prompts": True},
            "critic": {"share_prompts": False},
            "reference": {"layout": {"cp": cp}},
        }
    )
    assert config.trainable("reference").share_prompts == shares
    assert config.trainable("actor").share_prompts
    assert not config.trainable("critic").share_prompts


@pytest.mark.parametrize("key", ["hardware.kind=h200-141g", "plan.gpus=8"])
def test_what_only_plan_reads_is_refused_with_where_it_belongs(key: str) -> None:
    with pytest.raises(
        BadInput, match=rf"unknown key {key.partition('=')[0]}; it belongs to `vapo-megatron plan`"
    ):
        load_config(TrainConfig, EXAMPLE, [key], PRESETS)
    planned = load_config(PlanConfig, EXAMPLE, [key], PRESETS)
    assert isinstance(planned, TrainConfig) and (
        planned.hardware.kind == "h200-141g" or planned.plan.gpus == 8
    )


@pytest.mark.parametrize(("tp", "expected"), [(1, False), (2, True)])
def test_auto_sequence_parallelism_follows_tensor_parallelism(tp: int, expected: bool) -> None:
    layout = LayoutConfig.model_validate({"tp": tp, "sequence_parallel": "auto"})
    assert (
        layout.sequence_parallel is expected and layout.alignment == LayoutConfig(tp=tp).alignment
    )
    assert layout.model_dump()["sequence_parallel"] is expected, (
        "what a run directory and a resume see"
    )

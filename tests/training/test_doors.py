"""User functions through the trainer: each example on two layouts, and what a function says
is what is done."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import make_batch, spread, with_observation
from hf_models import write_model
from ranks import run_ranks
from torch import Tensor
from trainables import make_trainable
from written_rollouts import END, RIGHT, WRONG, write_rollouts

from vapo_megatron.algorithms.policy_loss import ppo_clip
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rollout.ledger import StepRule
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import Models
from vapo_megatron.training.score import score
from vapo_megatron.training.token_rewards import token_rewards
from vapo_megatron.training.updates import update_critic, update_policy
from vapo_megatron.training.user_functions import PolicyTerms, mask_tokens

EXAMPLES = "examples.custom_functions.functions"
HERE = "test_doors"
CASES: dict[str, dict[str, Any]] = {
    "builtin": {},
    "ppo_clip": {"policy_loss": {"kind": "function", "function": f"{HERE}:the_builtin"}},
    "loss": {"policy_loss": {"kind": "function", "function": f"{EXAMPLES}:decoupled_ppo"}},
    "targets": {"advantage": {"function": f"{EXAMPLES}:half_way_to_the_group"}},
    "metrics": {"metrics_function": f"{EXAMPLES}:where_credit_goes"},
    "mask": {"mask_function": f"{EXAMPLES}:until_the_code_ends"},
    "cut": {},
}
# What counts tokens or weighs them.
COUNTS = {
    "policy_loss": {"positive_nll": {"coef": 0.1}},
    "shaping": {"soft_overlong": {"max_length": 16, "cache_length": 12}},
    "advantage": {
        "gamma": 0.97,
        "length_adaptive_alpha": 0.3,
        "lambda_critic": 0.9,
        "whiten": "full",
    },
}
FENCE = 9


def the_builtin(terms: PolicyTerms) -> Tensor:
    assert (
        terms.values is not None
        and bool(terms.values[terms.mask].any())
        and terms.ref_logprobs is None
    )
    return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, 0.2, 0.28)


def no_gradient(terms: PolicyTerms) -> Tensor:
    return terms.advantages


def code(cursor: int) -> list[list[int]]:
    """Two responses: a block of code, and in one of them more words behind it. Every second prompt
    has a right one."""
    block = [20 + cursor, FENCE, 30, 31 + cursor, FENCE]
    return [[WRONG, *block, *range(40, 48), FENCE, END], [RIGHT if cursor % 2 else WRONG, *block]]


def collected(mask: str | None, cut: bool) -> ExperienceBatch:
    """Six responses as a run takes them, graded and masked; cut: those that end where their code
    does."""
    rollouts = write_rollouts(lambda cursor: [ids[:6] if cut else ids for ids in code(cursor)])
    rollouts.tokenizer.decode = lambda ids: "".join(
        "```" if i == FENCE else (f" {i} ") for i in ids
    )  # type: ignore[method-assign]
    rollouts.mask_function = mask
    rollouts.begin(StepRule(3, 1), 2, 0)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        samples = rollouts.take(recorder)
    rollouts.end()
    return from_samples(samples)


def one_step(
    model_dir: Path, layout: dict[str, Any], names: list[str]
) -> dict[str, dict[str, float]]:
    rows = {}
    for name in names:
        sections = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in CASES[name].items()
        }
        sections["update"] = {"minibatch_size": 3}
        config = AlgorithmConfig.model_validate(sections)
        if name in ("mask", "cut"):
            config = AlgorithmConfig.model_validate({**sections, **COUNTS})
            batch = collected(config.mask_function, name == "cut")
        else:
            batch = make_batch(spread=4.0, observed={1: (4, 3)})
            batch.group_ids = batch.group_ids // 2
        models = Models(
            *(make_trainable(model_dir, head, layout=layout) for head in ("lm", "value"))
        )  # type: ignore[arg-type]
        sharded = spread(batch)
        with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
            score(models, sharded, config, recorder)
            estimate_advantages(sharded, config, recorder)
            update_critic(models, sharded, config, "1/1", recorder)
            update_policy(models, sharded, config, "1/1", recorder)
            row = recorder.write(1)
        rows[name] = {
            key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))
        }
    return rows


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("doors"), "qwen3", num_hidden_layers=2)


@pytest.mark.full
def test_examples_train_alike_on_two_layouts(model_dir: Path) -> None:
    rows = run_ranks(1, one_step, model_dir, {}, list(CASES), deadline=200)[0]
    for other in run_ranks(4, one_step, model_dir, {"tp": 2, "cp": 2}, list(CASES), deadline=280):
        for name, row in rows.items():
            assert other[name] == pytest.approx(row, rel=1e-4, abs=1e-6), name
    clips = ("actor/clip_fraction_low", "actor/clip_fraction_high")
    builtin = {key: value for key, value in rows["builtin"].items() if key not in clips}
    assert {key: rows["ppo_clip"][key] for key in builtin} == pytest.approx(builtin), (
        "the same formula"
    )
    assert abs(rows["loss"]["actor/policy_loss"] - builtin["actor/policy_loss"]) > 1e-3
    assert abs(rows["targets"]["critic/value_loss"] - builtin["critic/value_loss"]) > 1e-3
    assert not any("fault_targets" in key for key in rows["targets"])
    assert (
        rows["metrics"]["custom/longest"] == 30 and rows["metrics"]["custom/credit_of_others"] > 0
    )
    assert {key: rows["metrics"][key] for key in builtin} == pytest.approx(builtin), (
        "metrics change nothing"
    )
    assert rows["mask"] == pytest.approx(rows["cut"], rel=1e-4, abs=1e-6), (
        "as if the response ended with its code"
    )
    assert rows["cut"]["actor/nll_loss"] > 0 and rows["cut"]["advantage/lambda_clamped"] == 0


def after_the_right_answer(sample: Sample, decode: Any) -> Tensor:
    """Takes the answer out of the loss; the verifier has read it before."""
    assert (
        sample.correct is (str(RIGHT) in sample.text.split())
        and decode([RIGHT, END]) == f"{RIGHT} {END}"
    )
    return torch.from_numpy(sample.response_ids != RIGHT)


def everything(sample: Sample, decode: Any) -> Tensor:
    return torch.zeros(len(sample.response_ids), dtype=torch.bool)


def as_a_list(sample: Sample, decode: Any) -> list[bool]:
    return [True] * len(sample.response_ids)


def first_half(sample: Sample, decode: Any) -> Tensor:
    return torch.arange(len(sample.response_ids) // 2) >= 0


def written(*ids: int) -> Sample:
    graded: dict[str, Any] = {"text": " ".join(map(str, ids)), "reward": 1.0, "correct": True}
    return Sample(
        Prompt("0", "", "", (1, 2)), 0, 0, 0, ids, [-1.0] * len(ids), "stop", 0, 0, **graded
    )  # type: ignore[arg-type]


def test_a_mask_is_drawn_behind_the_verifier() -> None:
    rollouts = write_rollouts(lambda cursor: [[WRONG, RIGHT, 8, END], [8, WRONG, END]])
    rollouts.mask_function = f"{HERE}:after_the_right_answer"
    rollouts.begin(StepRule(1, 1), 2, 0)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        masked, plain = rollouts.take(recorder)
    rollouts.end()
    assert masked.loss_mask is not None and masked.loss_mask.tolist() == [True, False, True, True]
    assert masked.correct and masked.reward == 1.0 and plain.loss_mask is None
    batch = from_samples([masked, plain])
    assert batch.response_lengths.tolist() == [3, 3] and batch.tokens.tolist()[2:6] == [
        WRONG,
        RIGHT,
        8,
        END,
    ]


def test_a_mask_and_observations_are_both_left_out() -> None:
    sample = with_observation(written(5, RIGHT, 6), after=2, count=2)
    mask_tokens(f"{HERE}:after_the_right_answer", [sample], lambda ids: " ".join(map(str, ids)))
    assert sample.loss_mask is not None and sample.loss_mask.tolist() == [
        True,
        False,
        False,
        False,
        True,
    ]


def not_the_ends(sample: Sample, decode: Any) -> Tensor:
    return torch.from_numpy(sample.response_ids != END)


def test_a_turn_keeps_its_reward_where_a_mask_takes_its_end() -> None:
    """Turns of two and three tokens, of which a mask takes END: 0.5 was paid before the second."""
    sample = written(5, END, 6, 7, END)
    sample.turn_rewards = np.array([0.0, 0.5, 0.0, 0.0, 0.25], dtype=np.float32)
    mask_tokens(f"{HERE}:not_the_ends", [sample], str)
    batch = from_samples([sample])
    batch.shaped_rewards = batch.rewards
    assert token_rewards(batch, AlgorithmConfig()).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "everything",
            "it leaves no token of a response, expected one at least: use "
            "algorithm.filter_function",
        ),
        ("as_a_list", "it returned list, expected a bool tensor [response] = [4]"),
        ("first_half", "it returned torch.bool [2], expected a bool tensor [response] = [4]"),
    ],
)
def test_a_wrong_mask_is_refused(name: str, message: str) -> None:
    with pytest.raises(BadInput) as error:
        mask_tokens(f"{HERE}:{name}", [written(5, 6, 7, END)], str)
    assert str(error.value) == f"algorithm.mask_function={HERE}:{name}: {message}"


def refused(model_dir: Path) -> str:
    CASES["refused"] = {"policy_loss": {"kind": "function", "function": f"{HERE}:no_gradient"}}
    try:
        one_step(model_dir, {}, ["refused"])
    except BadInput as error:
        return str(error)
    return "it was taken"


def test_a_loss_that_teaches_nothing_is_refused(model_dir: Path) -> None:
    message = run_ranks(1, refused, model_dir)[0]
    assert (
        message.startswith(f"algorithm.policy_loss.function={HERE}:no_gradient: ")
        and "no gradient" in message
    )


def test_a_mask_cuts_no_turn_in_two() -> None:
    with pytest.raises(ValueError, match=r"mask_function=.* with advantage.credit=turn: "):
        AlgorithmConfig.model_validate(
            {"mask_function": f"{HERE}:everything", "advantage": {"credit": "turn"}}
        )


def test_a_function_and_its_kind_go_together() -> None:
    for section in ({"kind": "function"}, {"function": f"{HERE}:the_builtin"}):
        with pytest.raises(ValueError, match=r"kind!?=.* with function="):
            AlgorithmConfig.model_validate({"policy_loss": section})

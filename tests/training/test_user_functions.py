"""A user's own advantage and filter: their arguments, their results, what a wrong path
says."""

import sys
from pathlib import Path

import pytest
import torch

from vapo_megatron.algorithms.selection import loss_mask
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput
from vapo_megatron.training.user_functions import (
    ScoredResponses,
    check_functions,
    scored_responses,
    user_advantages,
    user_metrics,
    user_selection,
)

HERE = "test_user_functions"
EXAMPLE = "examples.custom_functions.functions"


def scored_batch() -> ExperienceBatch:
    """Two prompts with two responses each, of 1, 3, 2 and 4 tokens; the last one was cut off."""
    prompt = Prompt("p", "", "", (1, 2))
    lengths = (1, 3, 2, 4)
    rewards = (0.0, 1.0, 1.0, 0.0)
    samples = [
        Sample(
            prompt,
            i // 2,
            i % 2,
            0,
            [5] * n,
            [-1.0] * n,
            "length" if i == 3 else "stop",
            0,
            0,
            reward=r,
            correct=r > 0,
        )
        for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
    ]
    batch = from_samples(samples)
    total = batch.response_tokens
    batch.shaped_rewards = batch.rewards - 0.25
    batch.old_logprobs = torch.full((total,), -1.5)
    batch.entropies = torch.arange(1.0, total + 1)
    return batch


def wrong_shape(scored: ScoredResponses) -> torch.Tensor:
    return scored.rewards


def not_finite(scored: ScoredResponses) -> torch.Tensor:
    return scored.old_logprobs / 0


def no_tensor(scored: ScoredResponses) -> list[float]:
    return scored.rewards.tolist()


NOT_A_FUNCTION = 3


def test_what_a_function_is_given() -> None:
    scored = scored_responses(scored_batch())
    assert scored.cu_seqlens.tolist() == [0, 1, 4, 6, 10]
    assert scored.rewards.tolist() == [-0.25, 0.75, 0.75, -0.25]
    assert scored.group_ids.tolist() == [0, 0, 1, 1]
    assert scored.truncated.tolist() == [False, False, False, True]
    assert scored.values is None and scored.ref_logprobs is None
    batch = scored_batch()
    batch.values = torch.zeros(10)
    batch.ref_logprobs = torch.ones(10)
    scored = scored_responses(batch)
    assert scored.rewards is batch.shaped_rewards and scored.cu_seqlens is batch.response_cu_seqlens
    for name in (
        "correct",
        "truncated",
        "group_ids",
        "rollout_logprobs",
        "old_logprobs",
        "entropies",
        "values",
    ):
        assert getattr(scored, name) is getattr(batch, name)
    assert scored.ref_logprobs is batch.ref_logprobs
    assert (
        scored.old_logprobs.shape
        == scored.entropies.shape
        == scored.rollout_logprobs.shape
        == (10,)
    )


def test_the_example_spreads_the_centred_reward_by_entropy() -> None:
    found, targets = user_advantages(f"{EXAMPLE}:reward_times_surprise", False, scored_batch()).t()
    assert targets.isnan().all(), "the function gives none"
    torch.testing.assert_close(found[:4], torch.tensor([-0.5, 0.5 * 2 / 3, 0.5, 0.5 * 4 / 3]))
    assert float(found[4:6].mean()) == pytest.approx(0.5) and float(
        found[6:].mean()
    ) == pytest.approx(-0.5)


def test_the_filter_takes_responses_out_of_the_loss() -> None:
    batch = scored_batch()
    path = f"{EXAMPLE}:finished_and_not_too_short"
    kept = user_selection(path, batch)
    assert kept.tolist() == [False, True, True, False]
    batch.selected = loss_mask(batch.truncated, False, kept)
    assert batch.select([0, 1, 3]).selected.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wrong_shape", "returned torch.float32 [4], expected a finite float tensor [T] = [10]"),
        ("not_finite", "expected a finite float tensor [T] = [10]"),
        ("no_tensor", "returned list, expected a finite float tensor [T] = [10]"),
    ],
)
def test_a_wrong_answer_is_bad_input(name: str, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        user_advantages(f"{HERE}:{name}", False, scored_batch())
    assert told in str(refused.value) and "algorithm.advantage.function" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wrong_shape", "it returned torch.float32 [4], expected a bool tensor [S] = [4]"),
        ("not_finite", "it returned torch.float32 [10], expected a bool tensor [S] = [4]"),
        ("no_tensor", "it returned list, expected a bool tensor [S] = [4]"),
        ("no_such", "cannot be imported"),
    ],
)
def test_a_wrong_filter_is_bad_input(name: str, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        user_selection(f"{HERE}:{name}", scored_batch())
    message = str(refused.value)
    assert message.startswith(f"algorithm.filter_function={HERE}:{name}: ") and told in message


def test_an_estimator_that_is_gone_is_named() -> None:
    with pytest.raises(
        BadInput, match=f"^algorithm.advantage.function={HERE}:no_such: cannot be imported"
    ):
        user_advantages(f"{HERE}:no_such", False, scored_batch())


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no_such_module_at_all:f", "ModuleNotFoundError"),
        (f"{HERE}:no_such_function", "AttributeError"),
        (f"{HERE}:NOT_A_FUNCTION", "a int, expected a function"),
    ],
)
def test_a_wrong_path_is_bad_input_before_anything_starts(path: str, told: str) -> None:
    for section, key in (
        (
            {"advantage": {"estimator": "function", "function": path}},
            "algorithm.advantage.function",
        ),
        ({"filter_function": path}, "algorithm.filter_function"),
        ({"metrics_function": path}, "algorithm.metrics_function"),
        ({"mask_function": path}, "algorithm.mask_function"),
        ({"policy_loss": {"kind": "function", "function": path}}, "algorithm.policy_loss.function"),
    ):
        with pytest.raises(BadInput) as refused:
            check_functions(AlgorithmConfig.model_validate(section))
        message = str(refused.value)
        assert message.startswith(f"{key}={path}: ") and told in message and "\n" not in message


def test_modules_of_the_working_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_alone.py").write_text("def keep(scored):\n    return scored.correct\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    for _ in range(2):
        check_functions(AlgorithmConfig.model_validate({"filter_function": "mine_alone:keep"}))
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def infinite(scored: ScoredResponses) -> dict[str, float]:
    return {"size": float("inf")}


def test_metrics_join_the_row_under_a_name_of_their_own() -> None:
    batch = scored_batch()
    batch.advantages = torch.ones(10)
    row = user_metrics(f"{EXAMPLE}:where_credit_goes", batch)
    assert row == {
        "custom/credit_of_undecided": 1.0,
        "custom/credit_of_others": 1.0,
        "custom/longest": 4.0,
    }
    for name, told in (
        ("infinite", "size is inf, expected a finite number"),
        ("no_tensor", "expected numbers by name"),
    ):
        with pytest.raises(BadInput, match=f"^algorithm.metrics_function={HERE}:{name}: .*{told}"):
            user_metrics(f"{HERE}:{name}", batch)


def test_value_targets_without_a_critic_are_refused() -> None:
    batch = scored_batch()
    batch.values = torch.zeros(10)
    path = f"{EXAMPLE}:half_way_to_the_group"
    assert user_advantages(path, True, batch)[:, 1].tolist() == pytest.approx(
        [0.0] + [0.5] * 3 + [0.5] * 2 + [0.0] * 4
    )
    with pytest.raises(BadInput, match="no critic learns them"):
        user_advantages(path, False, batch)

"""A user's functions are called once before a run begins: what they return wrongly is not found out
after hours."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, assert_refused
from tiny_runs import make_model

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.errors import BadInput
from vapo_megatron.training.function_trial import try_functions
from vapo_megatron.training.user_functions import PolicyTerms, ScoredResponses

HERE = "test_function_trial"
EXAMPLE = "examples.custom_functions.functions"
SECTIONS: dict[str, dict[str, Any]] = {
    "advantage": {"advantage": {"estimator": "function", "function": "PATH"}},
    "critic": {"advantage": {"estimator": "gae", "function": "PATH"}},
    "filter": {"filter_function": "PATH"},
    "mask": {"mask_function": "PATH"},
    "loss": {"policy_loss": {"kind": "function", "function": "PATH"}},
    "metrics": {"metrics_function": "PATH"},
}


def one_number(scored: ScoredResponses) -> torch.Tensor:
    return scored.rewards


def without_a_gradient(terms: PolicyTerms) -> torch.Tensor:
    return -terms.advantages


def a_list(scored: ScoredResponses) -> list[float]:
    return []


def raises(scored: ScoredResponses) -> dict[str, float]:
    return {"gain": float({}["absent"])}


def all_and_one_more(sample: Any, decode: Any) -> torch.Tensor:
    return torch.ones(len(sample.response_ids) + 1, dtype=torch.bool)


def nothing(sample: Any, decode: Any) -> torch.Tensor:
    return torch.zeros(len(sample.response_ids), dtype=torch.bool)


def tried(section: str, path: str) -> list[str]:
    """Cautions about a function in this section of the config."""
    values = AlgorithmConfig.model_validate(_filled(SECTIONS[section], path))
    prompts = [Prompt(name, "", "", (3, 4, 5), "rows") for name in "ab"]
    return try_functions(values, prompts, 4, lambda ids: " ".join(map(str, ids)), 100)


def _filled(section: dict[str, Any], path: str) -> dict[str, Any]:
    return {
        key: _filled(value, path) if isinstance(value, dict) else value.replace("PATH", path)
        for key, value in section.items()
    }


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("advantage", f"{EXAMPLE}:reward_times_surprise"),
        ("critic", f"{EXAMPLE}:half_way_to_the_group"),
        ("filter", f"{EXAMPLE}:finished_and_not_too_short"),
        ("mask", f"{EXAMPLE}:until_the_code_ends"),
        ("mask", f"{HERE}:nothing"),
        ("loss", f"{EXAMPLE}:decoupled_ppo"),
        ("metrics", f"{EXAMPLE}:where_credit_goes"),
    ],
)
def test_functions_that_work_say_nothing(section: str, path: str) -> None:
    assert tried(section, path) == []


@pytest.mark.parametrize(
    ("section", "name", "said"),
    [
        ("advantage", "one_number", r"returned torch\.float32 \[8\], expected a finite float"),
        ("critic", "one_number", r"returned torch\.float32 \[8\], expected a finite float"),
        ("filter", "one_number", r"returned torch\.float32 \[8\], expected a bool tensor \[S\]"),
        ("loss", "without_a_gradient", "its return value has no gradient"),
        ("metrics", "a_list", r"returned \[\], expected numbers by name"),
        ("mask", "all_and_one_more", r"expected a bool tensor \[response\]"),
    ],
)
def test_a_wrong_answer_is_refused(section: str, name: str, said: str) -> None:
    with pytest.raises(BadInput, match=rf"{HERE}:{name}: it returned .*|{HERE}:{name}: .*") as end:
        tried(section, f"{HERE}:{name}")
    assert re.search(said, str(end.value)), end.value


def test_an_exception_is_a_caution() -> None:
    (caution,) = tried("metrics", f"{HERE}:raises")
    assert f"algorithm.metrics_function={HERE}:raises raised KeyError" in caution
    assert "'absent'" in caution


def test_a_check_calls_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = Command(tmp_path, make_model(tmp_path / "model"))
    function = f"algorithm.filter_function={HERE}:one_number"
    code = command.exit_code("train", "--check", function)
    assert_refused(command, code, capfd.readouterr().err, function, "expected a bool tensor [S]")
    assert command.exit_code("train", "--check", f"algorithm.metrics_function={HERE}:raises") == 0
    assert "caution: algorithm.metrics_function" in capfd.readouterr().err

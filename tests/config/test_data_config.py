"""Files of training data with settings of their own, and what is refused of them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vapo_megatron.config.data import DataConfig, EvaluationDataConfig, FieldNames, ServerConfig
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.errors import BadInput

A, B, C = Path("a.jsonl"), Path("b.jsonl"), Path("c.jsonl")
FILES: dict[str, Any] = {
    "a.jsonl": {"weight": 2.5, "fields": {"problem": "q"}, "reward": {"correct": 3}},
    "b.jsonl": {"fields": {"answer": "a"}},
    "c.jsonl": 4,
}
JUDGE = RewardConfig.model_validate(
    {"judge": {"url": "http://a/v1", "model": "m"}, "verifier": "math"}
)


def data(train: Any, **keys: Any) -> DataConfig:
    return DataConfig.model_validate({"train": train} | keys)


def test_each_file_has_its_weight_fields_and_reward() -> None:
    config = data(FILES, fields={"id": "key", "problem": "p"})
    assert config.train_files == [A, B, C]
    assert config.weights == {"a.jsonl": 2.5, "b.jsonl": 1.0, "c.jsonl": 4.0}
    assert config.fields_of(A) == FieldNames(id="key", problem="q")
    assert config.fields_of(B) == FieldNames(id="key", problem="p", answer="a")
    assert config.fields_of(C) == config.fields_of(Path("other")) == config.fields
    assert [config.reward_of(path) for path in (A, B, C, Path("other"))] == [
        {"correct": 3},
        {},
        {},
        {},
    ]


@pytest.mark.parametrize(
    ("train", "files", "weights"),
    [
        ("a.jsonl", [A], {}),
        (["b.jsonl", "a.jsonl"], [B, A], {"b.jsonl": 1, "a.jsonl": 1}),
        ({"a.jsonl": 1}, [A], {"a.jsonl": 1}),
    ],
)
def test_a_file_alone_or_a_list_has_equal_weights(
    train: Any, files: list[Path], weights: dict[str, float]
) -> None:
    config = data(train)
    assert (config.train_files, config.weights) == (files, weights)
    assert config.fields_of(A) == FieldNames() and config.reward_of(A) == {}


def test_rewards_are_the_sections_and_those_of_files() -> None:
    reward = RewardConfig(incorrect=0.0)
    config = data({"b.jsonl": 1, "a.jsonl": FILES["a.jsonl"], "c.jsonl": {"reward": {}}})
    config.check_rewards(reward)
    assert config.rewards(reward) == [reward, RewardConfig(incorrect=0.0, correct=3.0)]
    assert data("a.jsonl").rewards(reward) == [reward]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            {"reward": {"correct": 1, "wokers": 2}},
            "data.train: b.jsonl: reward: unknown key wokers; did you mean workers?",
        ),
        (
            {"reward": {"verifier": "code", "workers": 0}},
            "data.train: b.jsonl: reward: workers is 0; expected greater than or equal to 1",
        ),
        (
            {"fields": {"problem": "q", "anwser": "x"}},
            "data.train: b.jsonl: fields: unknown key anwser; did you mean answer?",
        ),
        (
            {"reward": {"verifier": "function"}},
            "data.train: b.jsonl: reward: verifier=function with function=null: name the "
            "function, package.module:name",
        ),
    ],
)
def test_a_wrong_key_of_a_file_is_told_with_the_file(entry: Any, told: str) -> None:
    config = data({"a.jsonl": 1, "b.jsonl": entry})
    with pytest.raises(ValueError) as refused:
        config.check_rewards(RewardConfig())
    assert str(refused.value) == told


UNUSED = (
    "reward.judge with reward.verifier=math: nothing uses it, set reward.verifier=judge, or "
    "data.fields.verifier to the field that names the verifier of a row"
)


@pytest.mark.parametrize(
    ("train", "fields", "reward", "told"),
    [
        ("a", {}, RewardConfig(), None),
        ("a", {}, JUDGE, UNUSED),
        ("a", {"verifier": "kind"}, JUDGE, None),
        ("a", {}, JUDGE.model_copy(update={"verifier": "judge"}), None),
        ({"a": 1, "b": {"reward": {"verifier": "judge"}}}, {}, JUDGE, None),
        ({"a": 1, "b": {"reward": {"verifier": "code"}}}, {}, JUDGE, UNUSED),
    ],
)
def test_a_judge_that_nothing_uses_is_refused(
    train: Any, fields: dict[str, str], reward: RewardConfig, told: str | None
) -> None:
    config = data(train, fields=fields)
    if told is None:
        return config.check_rewards(reward)
    with pytest.raises(ValueError) as refused:
        config.check_rewards(reward)
    assert str(refused.value) == told


def test_an_evaluation_has_a_set_and_uses_its_judge() -> None:
    sets = [{"name": "a", "path": "p"}]
    EvaluationDataConfig.model_validate({"eval": sets}).check_rewards(RewardConfig())
    with pytest.raises(ValueError, match=r"verifier=math: nothing uses it"):
        EvaluationDataConfig.model_validate({"eval": sets}).check_rewards(JUDGE)
    with pytest.raises(ValidationError, match="at least 1 item"):
        EvaluationDataConfig.model_validate({"eval": []})


def test_a_reward_changes_with_a_row_and_keeps_the_rest() -> None:
    base = RewardConfig(
        verifier="function", function="a:b", grade_truncated=True, correct_above=None, correct=2
    )
    assert base.changed("") is base
    assert base.changed('{"workers": 2}') == base.model_copy(update={"workers": 2})
    assert base.changed('{"verifier": "code"}') == RewardConfig(verifier="code", correct=2)
    high = base.model_copy(update={"correct_above": 0.9})
    assert high.changed('{"verifier": "math"}') == RewardConfig(correct=2, correct_above=0.9)
    with pytest.raises(ValueError):
        base.changed('{"workers": 0}')


def test_the_key_of_a_server_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerConfig(url="http://a", model="m", api_key_variable="THE_KEY")
    assert ServerConfig(url="http://a", model="m").api_key() is None
    monkeypatch.setenv("THE_KEY", "word")
    assert server.api_key() == "word"
    for unset in (lambda: monkeypatch.setenv("THE_KEY", ""), lambda: monkeypatch.delenv("THE_KEY")):
        unset()
        with pytest.raises(BadInput) as refused:
            server.api_key()
        assert str(refused.value) == (
            "server.api_key_variable=THE_KEY: the environment has no such variable: export it, or "
            "leave the key out for a server that needs none"
        )

"""A name stands once, in the decorator beside its formula; config, trainer and pages read it
there."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vapo_megatron.algorithms import registry
from vapo_megatron.algorithms.policy_loss import Clip, PolicyTerms
from vapo_megatron.algorithms.registry import ESTIMATORS, POLICY_LOSSES, Registry, call_with
from vapo_megatron.config.algorithm import AdvantageConfig
from vapo_megatron.config.policy import PolicyLossConfig

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
HANDED_OVER = {"rewards", "group_ids", "lengths", "greedy_rewards"}


def rows_below(heading: str) -> set[str]:
    """The names in the first columns of the tables of a section of docs/algorithms.md."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.M)) | set(
        re.findall(r"^\*\*`estimator: (\w+)`\*\*", section, re.M)
    )


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_an_estimator_is_found_and_documented(name: str) -> None:
    assert callable(ESTIMATORS.formula(name))
    assert AdvantageConfig(estimator=name, whiten="none").traits == ESTIMATORS.traits[name]
    assert name in rows_below("Advantages"), "give it a row in docs/algorithms.md"


@pytest.mark.parametrize("name", ESTIMATORS.names(per_token=False))
def test_an_estimator_needs_what_the_trainer_has(name: str) -> None:
    parameters = inspect.signature(ESTIMATORS.formula(name)).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty}
    assert needed <= HANDED_OVER
    assert ("greedy_rewards" in needed) == ESTIMATORS.traits[name].greedy


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_policy_loss_is_found_and_documented(name: str) -> None:
    parameters = inspect.signature(POLICY_LOSSES.formula(name)).parameters.values()
    assert [p.annotation for p in parameters] == [PolicyTerms, Clip]
    traits = POLICY_LOSSES.traits[name]
    aggregation = "sequence_mean" if traits.per_sequence else "token_mean"
    assert PolicyLossConfig(kind=name, aggregation=aggregation).traits == traits
    assert name in rows_below("Policy loss"), "give it a row in docs/algorithms.md"


def test_the_config_knows_names_without_torch() -> None:
    program = "import sys, vapo_megatron.config.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_a_name_that_its_decorator_hides_is_refused() -> None:
    for name, flags in (("computed_" + "name", {}), ("rloo", {"groups": False})):
        with pytest.raises(ValueError, match="as literals"):
            registry.estimator(name, **flags)(len)
    with pytest.raises(TypeError, match="gruops"):
        registry.estimator("rloo", gruops=True)(len)


def test_two_formulas_of_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "HERE", tmp_path)
    for module in ("first", "second"):
        text = '"""Docs."""\n\n@estimator("mine")\ndef mine(rewards): ...\n'
        (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(ValueError, match=r"'mine'.*second.*first"):
        Registry("estimator", registry.EstimatorTraits)


def test_a_formula_gets_what_its_parameters_name() -> None:
    def formula(b: int, a: int, eps: float = 0.5) -> tuple[int, int, float]:
        return b, a, eps

    assert call_with(formula, {"a": 1, "b": 2, "c": 3}) == (2, 1, 0.5)
    with pytest.raises(TypeError, match="'b'"):
        call_with(formula, {"a": 1})

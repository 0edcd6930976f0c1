"""Functions of one's own through the trainer: each example on two layouts, and what a function says is what is done."""

from pathlib import Path
from typing import Any

import pytest
from batches import make_batch, spread
from hf_models import write_model
from ranks import run_ranks
from torch import Tensor
from trainables import make_trainable

from vapo_megatron.algorithms.policy_loss import ppo_clip
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import Models
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import update_critic, update_policy
from vapo_megatron.training.user_functions import PolicyTerms

EXAMPLES, HERE = "examples.custom_functions.functions", "test_doors"
CASES: dict[str, dict[str, Any]] = {
    "builtin": {},
    "ppo_clip": {"policy_loss": {"kind": "function", "function": f"{HERE}:the_builtin"}},
    "loss": {"policy_loss": {"kind": "function", "function": f"{EXAMPLES}:decoupled_ppo"}},
    "targets": {"advantage": {"function": f"{EXAMPLES}:half_way_to_the_group"}},
    "metrics": {"metrics_function": f"{EXAMPLES}:where_credit_goes"},
}


def the_builtin(terms: PolicyTerms) -> Tensor:
    assert terms.values is not None and bool(terms.values[terms.mask].any()) and terms.ref_logprobs is None
    return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, 0.2, 0.28)


def no_gradient(terms: PolicyTerms) -> Tensor:
    return terms.advantages


def one_step(model_dir: Path, layout: dict[str, Any], names: list[str]) -> dict[str, dict[str, float]]:
    rows = {}
    for name in names:
        sections = {key: dict(value) if isinstance(value, dict) else value for key, value in CASES[name].items()}
        sections["update"] = {"minibatch_size": 3}
        config = AlgorithmConfig.model_validate(sections)
        batch = make_batch(spread=4.0, observed={1: (4, 3)})
        batch.group_ids = batch.group_ids // 2
        models = Models(*(make_trainable(model_dir, head, layout=layout) for head in ("lm", "value")))  # type: ignore[arg-type]
        sharded = spread(batch)
        with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
            score(models, sharded, config, recorder)
            estimate_advantages(sharded, config, recorder)
            update_critic(models, sharded, config, "1/1", recorder)
            update_policy(models, sharded, config, "1/1", recorder)
            row = recorder.write(1)
        rows[name] = {key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))}
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
    assert {key: rows["ppo_clip"][key] for key in builtin} == pytest.approx(builtin), "the same formula"
    assert abs(rows["loss"]["actor/policy_loss"] - builtin["actor/policy_loss"]) > 1e-3
    assert abs(rows["targets"]["critic/value_loss"] - builtin["critic/value_loss"]) > 1e-3
    assert not any("fault_targets" in key for key in rows["targets"])
    assert rows["metrics"]["custom/longest"] == 30 and rows["metrics"]["custom/credit_of_others"] > 0
    assert {key: rows["metrics"][key] for key in builtin} == pytest.approx(builtin), "metrics change nothing"


def refused(model_dir: Path) -> str:
    CASES["refused"] = {"policy_loss": {"kind": "function", "function": f"{HERE}:no_gradient"}}
    try:
        one_step(model_dir, {}, ["refused"])
    except BadInput as error:
        return str(error)
    return "it was taken"


def test_a_loss_that_teaches_nothing_is_refused(model_dir: Path) -> None:
    message = run_ranks(1, refused, model_dir)[0]
    assert message.startswith(f"algorithm.policy_loss.function={HERE}:no_gradient: ") and "no gradient" in message


def test_a_function_and_its_kind_go_together() -> None:
    for section in ({"kind": "function"}, {"function": f"{HERE}:the_builtin"}):
        with pytest.raises(ValueError, match=r"kind!?=.* with function="):
            AlgorithmConfig.model_validate({"policy_loss": section})

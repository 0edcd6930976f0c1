"""On-policy distillation: a teacher of another size, its reverse KL as the advantage of each
token."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from batches import spread, whole_of
from hf_models import write_model
from ranks import run_ranks
from switch_formulas import ADAM
from switch_rollout import Watched, config_of, read_rollout, state_of, write_models
from tiny_runs import WORDS, make_model, train_config, write_config

from vapo_megatron.checkpoint.resume import check_config_change
from vapo_megatron.checkpoint.sizes import run_bytes
from vapo_megatron.checks.preflight import check_train
from vapo_megatron.checks.sizes import check_train_numbers
from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import dump_config, load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.tiny_model import TinyModel
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.plan.models import planned_models
from vapo_megatron.operations.plan.plan import make_plan
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import update_policy
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, save_tiny_model, word_tokenizer


def step_with_teacher(
    folder: Path, layout: dict[str, int], kind: str = "model", teacher: dict[str, int] | None = None
) -> dict[str, Any]:
    """Collective: a step on a rollout that only the teacher judges; advantages, both models'
    log-probs, the policy's weights afterwards, and the layout of each model."""
    kl = {"placement": "advantage", "coef": 0.5, "reference_path": str(folder / "teacher")}
    config = config_of(
        folder,
        {f"algorithm.kl.{key}": value for key, value in kl.items()}
        | {
            "algorithm.advantage.estimator": "batch_baseline",
            "actor.layout": layout,
            "actor.kind": kind,
        }
        | {"reference.layout": teacher},
    )
    models = load_models(config, None)
    whole = read_rollout(folder)
    whole.rewards.zero_()
    whole.greedy_rewards = None
    batch = spread(whole)
    assert models.reference is not None
    assert (models.actor.spec.num_layers, models.reference.spec.num_layers) == (2, 4)
    with Watched(folder) as recorder:
        score(models, batch, config.algorithm, recorder)
        estimate_advantages(batch, config.algorithm, recorder)
        update_policy(models, batch, config.algorithm, "1/1", recorder)
    tensors = whole_of(batch).tensors()
    seen: dict[str, Any] = {
        name: tensors[name].numpy() for name in ("advantages", "old_logprobs", "ref_logprobs")
    }
    weights = {name: weight.numpy() for name, weight in state_of(models.actor).items()}
    meshes = {model.name: model.mesh for model in (models.actor, models.reference)}
    return seen | {
        "weights": weights,
        "layouts": {
            name: (mesh.tp_size, mesh.pp_size, mesh.cp_size, mesh.dp_size)
            for name, mesh in meshes.items()
        },
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two layers, a teacher of four, and a rollout."""
    folder = write_models(tmp_path_factory.mktemp("models"))
    write_model(folder / "policy", "qwen3", num_hidden_layers=2)
    write_model(folder / "teacher", "qwen3", num_hidden_layers=4, seed=3)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """The step on one rank."""
    (seen,) = run_ranks(1, step_with_teacher, folder, {})
    return seen


def assert_same_step(seen: dict[str, Any], alone: dict[str, Any]) -> None:
    for name in ("advantages", "ref_logprobs", "old_logprobs"):
        assert seen[name] == pytest.approx(alone[name], abs=1e-4), name
    assert seen["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        # Adam's first step is as long as the learning rate wherever rounding does not decide the
        # sign.
        moved = np.abs(seen["weights"][name] - weight)
        assert np.quantile(moved, 0.99) < 0.02 * ADAM["lr"], name


def test_a_larger_teacher_gives_each_token_its_reverse_kl(
    folder: Path, alone: dict[str, Any]
) -> None:
    pairs = zip(alone["old_logprobs"], alone["ref_logprobs"], strict=True)
    assert alone["advantages"] == pytest.approx([-0.5 * (s - t) for s, t in pairs], abs=1e-5)
    assert np.abs(alone["advantages"]).max() > 0.01
    # Adapters begin at zero; their base is not the teacher here.
    (adapted,) = run_ranks(1, step_with_teacher, folder, {}, "adapter")
    assert adapted["advantages"] == pytest.approx(alone["advantages"], abs=1e-5)


@pytest.mark.parametrize(
    ("ranks", "actor", "teacher", "layouts"),
    [
        (2, {"tp": 2}, None, {"actor": (2, 1, 1, 1), "reference": (2, 1, 1, 1)}),
        pytest.param(
            2,
            {},
            {"tp": 2},
            {"actor": (1, 1, 1, 2), "reference": (2, 1, 1, 1)},
            marks=pytest.mark.full,
        ),
        (2, {}, {"pp": 2}, {"actor": (1, 1, 1, 2), "reference": (1, 2, 1, 1)}),
        pytest.param(
            4,
            {"pp": 2},
            {"tp": 2, "cp": 2},
            {"actor": (1, 2, 1, 2), "reference": (2, 1, 2, 1)},
            marks=pytest.mark.full,
        ),
    ],
    ids=["the_actors", "tp2_beside_dp2", "pp2_beside_dp2", "tp2_cp2_beside_pp2"],
)
def test_a_teacher_in_a_layout_of_its_own_teaches_the_same(
    folder: Path,
    alone: dict[str, Any],
    ranks: int,
    actor: dict[str, int],
    teacher: dict[str, int] | None,
    layouts: dict[str, tuple[int, ...]],
) -> None:
    for seen in run_ranks(ranks, step_with_teacher, folder, actor, "model", teacher):
        assert seen["layouts"] == layouts
        assert_same_step(seen, alone)


def config_with_teacher(folder: Path, words: list[str], *overrides: str) -> TrainConfig:
    tokenizer = word_tokenizer(words, 128, CHATML_TEMPLATE)
    shape = TinyModel(
        vocab_size=len(tokenizer), layers=3, hidden_size=64, intermediate_size=96, max_positions=128
    )
    save_tiny_model(shape, tokenizer, folder / "teacher")
    settings = train_config(folder, make_model(folder / "model")) | {"preset": "distill"}
    del settings["critic"], settings["algorithm"]
    settings["algorithm"] = {"kl": {"reference_path": str(folder / "teacher")}}
    return load_config(
        TrainConfig, write_config(folder / "train.yaml", settings), overrides, PRESETS
    )


def test_checks_and_plans_know_the_teacher(tmp_path: Path) -> None:
    config = config_with_teacher(tmp_path, WORDS)
    check_train(config, 2)
    planned = planned_models(config, 2)
    assert {name: model.spec.num_layers for name, model in planned.items()} == {
        "actor": 2,
        "reference": 3,
    }
    assert planned["reference"].bytes_of("weights", 0) > planned["actor"].bytes_of("weights", 0)


def test_a_teacher_with_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    config = config_with_teacher(tmp_path, [*WORDS[1:], WORDS[0]])
    with pytest.raises(
        BadInput, match=r"kl\.reference_path=.*gives \d+ of the .* another id, or none"
    ):
        check_train(config, 2)


def test_a_teacher_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"replace_reference_every=3 with reference_path="):
        config_with_teacher(tmp_path, WORDS, "algorithm.kl.replace_reference_every=3")


def test_plans_and_checks_know_the_teachers_layout(tmp_path: Path) -> None:
    """Its layers lie on three stages beside an actor that every rank has whole, and no checkpoint
    holds it."""
    config = config_with_teacher(tmp_path, WORDS, "actor.layout.tp=1", "reference.layout.pp=3")
    whole = config_with_teacher(tmp_path, WORDS, "actor.layout.tp=1")
    assert config.model_sizes == {"actor": 1, "reference": 3}
    specs = check_train_numbers(config, 3)
    cut, uncut = (planned_models(each, 3)["reference"] for each in (config, whole))
    assert (cut.dp, uncut.dp) == (1, 3)
    assert max(cut.bytes_of("weights", stage) for stage in range(3)) < 0.6 * uncut.bytes_of(
        "weights", 0
    )
    assert run_bytes(config, specs) == run_bytes(config, {"actor": specs["actor"]})
    dump_config(whole, tmp_path / "config.yaml")
    check_config_change(config, tmp_path, ())  # a resumed run may have it in another layout


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["reference.layout.tp=3"],
            "reference.layout: tp 3 x pp 1 x cp 1 = 3 ranks a replica do not divide the 2",
        ),
        (
            ["reference.layout.pp=4", "cluster.ranks=4"],
            "reference.layout: pp 4 x vpp 1 = 4 stages are more than the model's 3 layers",
        ),
        (
            ["actor.layout.tp=1", "reference.layout.tp=4", "cluster.ranks=4"],
            "reference.layout.tp=4 does not divide",
        ),
        (
            [
                "cluster.ranks=4",
                "actor.layout.cp=2",
                "reference.layout.tp=2",
                "actor.max_tokens_per_microbatch=16",
            ],
            "actor.max_tokens_per_microbatch=16 with reference.layout.cp=1 holds samples of at "
            "most 16 tokens",
        ),
        (
            [
                "reference.layout.tp=2",
                "algorithm.kl={reference_path: null, placement: none, coef: 0}",
            ],
            "reference.layout with algorithm.kl.placement=none",
        ),
        (
            [
                "reference.layout.tp=2",
                "algorithm.kl.reference_path=null",
                "algorithm.kl.replace_reference_every=2",
            ],
            "reference.layout with algorithm.kl.replace_reference_every=2",
        ),
        (
            ["reference.layout.tp=2", "algorithm.kl.reference_path=null", "actor.kind=adapter"],
            "reference.layout with actor.kind=adapter and algorithm.kl.reference_path=null",
        ),
    ],
)
def test_a_layout_that_a_teacher_cannot_have_is_refused_by_name(
    tmp_path: Path, overrides: list[str], named: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(named)) as refused:
        config = config_with_teacher(tmp_path, WORDS, *overrides)
        check_train_numbers(config, config.cluster.ranks)
    assert "\n" not in str(refused.value)


def test_plan_refuses_a_teacher_layout_too_small_for_a_sample(
    tmp_path: Path,
) -> None:
    """What an actor of two context-parallel ranks has room for."""
    layouts = ["actor.layout.cp=2", "reference.layout.tp=2", "actor.max_tokens_per_microbatch=16"]
    config = config_with_teacher(tmp_path, WORDS, *layouts)
    problems = make_plan(PlanConfig.model_validate(config.model_dump()), 4).memory.problems
    assert [problem for problem in problems if "max_tokens_per_microbatch" in problem] == [ANY]
    assert "actor.max_tokens_per_microbatch=16 with reference.layout.cp=1" in "".join(problems)


def test_a_teacher_is_not_cut_as_the_actors_recomputation_asks(tmp_path: Path) -> None:
    """It has no backward pass: blocks of the actor's two layers need not divide its three."""
    recompute = "actor.recompute={granularity: full, layers: 2}"
    check_train(config_with_teacher(tmp_path, WORDS, recompute), 2)

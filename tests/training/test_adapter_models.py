"""A step with adapters: the reference is the policy without them, and nothing of the base moves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread
from ranks import run_ranks
from switch_rollout import Watched, config_of, read_rollout, state_of, write_models

from vapo_megatron.config.train import TrainConfig
from vapo_megatron.monitoring import names
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import update_critic, update_policy

BOTH = {"actor.kind": "adapter", "critic.kind": "adapter", "model.adapter": {"rank": 4}}
KL = {
    f"algorithm.kl.{key}": value
    for key, value in {"placement": "loss", "estimator": "k3", "coef": 0.1}.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def two_steps(folder: Path, switches: dict[str, Any]) -> dict[str, Any]:
    """Of two steps on one rollout: metrics, reference and policy log-probs, bytes of parts, weights
    that have moved."""
    config = config_of(folder, switches)
    models = load_models(config, None)
    algorithm = config.algorithm
    assert models.critic is not None
    before = {model.name: state_of(model) for model in models.trained}
    rows = []
    references = []
    policies = []
    for _ in range(2):
        batch = spread(read_rollout(folder))
        batch.local.greedy_rewards = None
        with Watched(folder) as recorder:
            score(models, batch, algorithm, recorder)
            assert batch.local.ref_logprobs is not None
            references.append(batch.local.ref_logprobs.numpy())
            policies.append(models.actor.score(batch.local)[:, 0].numpy())
            estimate_advantages(batch, algorithm, recorder)
            update_critic(models, batch, algorithm, "1/1", recorder)
            update_policy(models, batch, algorithm, "1/1", recorder)
            rows.append(recorder.write(1))
    sizes = {model.name: model.offloader.footprint() for model in models.trained}
    if models.base is not None:
        sizes["base"] = models.base.footprint()
    after = {model.name: state_of(model) for model in models.trained}
    moved = {
        name: {
            key for key, tensor in after[name].items() if not torch.equal(tensor, before[name][key])
        }
        for name in after
    }
    has_reference = models.reference is not None
    return {
        "rows": rows,
        "references": references,
        "policies": policies,
        "moved": moved,
        "reference": has_reference,
        "sizes": sizes,
    }


def test_the_reference_is_the_policy_without_its_adapters(folder: Path) -> None:
    sleeps = {"actor.offload": "always", "critic.offload": "always"}
    (adapted,) = run_ranks(1, two_steps, folder, BOTH | KL | sleeps)
    (whole,) = run_ranks(1, two_steps, folder, KL)
    assert whole["reference"] and not adapted["reference"]
    for step in (0, 1):
        assert adapted["references"][step] == pytest.approx(whole["references"][step], abs=1e-6)
        assert (
            adapted["rows"][step]["actor/grad_norm"] > 0
            and adapted["rows"][step]["critic/grad_norm"] > 0
        )
    assert adapted["policies"][0] == pytest.approx(adapted["references"][0], abs=1e-6)
    assert abs(adapted["policies"][1] - adapted["references"][1]).max() > 1e-3
    assert adapted["rows"][1][names.REFERENCE_KL] > adapted["rows"][0][names.REFERENCE_KL] >= 0


def test_gradients_and_optimizer_are_those_of_adapters(folder: Path) -> None:
    (adapted,) = run_ranks(1, two_steps, folder, BOTH | KL)
    (whole,) = run_ranks(1, two_steps, folder, KL)
    for name in ("actor", "critic"):
        assert {key.rpartition("_")[2] for key in adapted["moved"][name]} >= {"proj.weight"}
        assert not any("norm" in key or "embed" in key for key in adapted["moved"][name])
        for part in ("gradients", "optimizer"):
            little, much = (report["sizes"][name][part] for report in (adapted, whole))
            assert 0 < little.device < 0.35 * much.device


def two_steps_on_two_bases(folder: Path, switches: dict[str, Any]) -> dict[str, Any]:
    TrainConfig.shares_base = property(lambda config: False)  # type: ignore[assignment]
    return two_steps(folder, switches)


@pytest.mark.parametrize("offload", ["always", pytest.param("never", marks=pytest.mark.full)])
def test_one_base_serves_actor_and_critic(folder: Path, offload: str) -> None:
    """To the bit as two would, in less memory, asleep and awake."""
    switches = BOTH | KL | {"actor.offload": offload, "critic.offload": offload}
    (shared,), (apart,) = (
        run_ranks(1, steps, folder, switches) for steps in (two_steps, two_steps_on_two_bases)
    )
    for row, expected in zip(shared["rows"], apart["rows"], strict=True):
        compared = {name for name in expected if not name.startswith(("memory/", "time/", "perf/"))}
        assert {name: row[name] for name in compared} == {name: expected[name] for name in compared}
    assert shared["moved"] == apart["moved"]
    base, critic, whole = (
        report["sizes"][name]["weights"]
        for report, name in ((shared, "base"), (shared, "critic"), (apart, "critic"))
    )
    place = "host" if offload == "always" else "device"
    assert getattr(critic, place) + getattr(base, place) == pytest.approx(
        getattr(whole, place), abs=4096
    )
    assert getattr(critic, place) < 0.5 * getattr(whole, place)
    held = [
        sum(getattr(report["sizes"][name]["weights"], place) for name in report["sizes"])
        for report in (shared, apart)
    ]
    assert held[1] - held[0] == pytest.approx(getattr(base, place), abs=4096)


def test_bases_that_differ_are_not_shared(folder: Path) -> None:
    config = config_of(folder, BOTH)
    assert config.shares_base
    for other in (
        {"critic.kind": "model"},
        {"critic.layout": {"cp": 2}},
        {"critic.model_path": str(folder / "reference")},
    ):
        assert not config_of(folder, BOTH | other).shares_base

"""Every switch of the section critic that a CPU can show, through load_models() and the critic's
own updates.

The others are trained with in test_step_switches.py.
"""

import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import spread, whole_of
from hf_models import read_tensors, write_model
from ranks import run_ranks
from step_formulas import State
from switch_formulas import Iteration
from switch_rollout import (
    Seen,
    config_of,
    iterate,
    load_seen,
    read_rollout,
    responses,
    state_of,
    write_models,
)

from vapo_megatron.config.model import OptimizerSettings, PrecisionConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.megatron.offload import PARTS
from vapo_megatron.megatron.precision import fp8_settings
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import update_critic

OPT = "critic.optimizer."
# Three mini-batches twice: six optimizer steps, by two rollouts' worth.
SIX = {"algorithm.update.critic_updates_per_policy_update": 2}
DECAY = {OPT + "decay_steps": 5, OPT + "min_lr": 1e-3}
# The switch and what else has to be set; and settings that have to give other weights.
OPTIMIZER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": ({OPT + "lr": 2e-3}, {}),
    "warmup_steps": ({OPT + "warmup_steps": 4}, {}),
    "decay=cosine": ({OPT + "decay": "cosine", **DECAY}, {OPT + "decay": "linear", **DECAY}),
    "decay=linear": ({OPT + "decay": "linear", **DECAY}, {}),
    "decay_steps": (
        {OPT + "decay": "linear", OPT + "decay_steps": 6},
        {OPT + "decay": "linear", OPT + "decay_steps": 3},
    ),
    "min_lr": (
        {OPT + "decay": "linear", **DECAY},
        {OPT + "decay": "linear", **DECAY, OPT + "min_lr": 0.0},
    ),
    "weight_decay": ({OPT + "weight_decay": 10.0}, {}),
    "eps": ({OPT + "eps": 1e-2}, {}),
    "clip_grad": ({OPT + "clip_grad": 0.05}, {}),
    "clip_grad=0": ({OPT + "clip_grad": 0.0}, {OPT + "clip_grad": 0.05}),
    "freeze_attention": ({"critic.freeze_attention": True}, {}),
    "max_tokens_per_microbatch": ({"critic.max_tokens_per_microbatch": 64}, {OPT + "lr": 1e-3}),
}
SOURCES = {"reward_model": "SequenceClassification", "value_checkpoint": "TokenClassification"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "vpp": {"pp": 2, "vpp": 2},
    "cp": {"cp": 2},
}
IN_TEST = ("sequence_parallel", "vpp", "cp")  # with all that the other two set


def write_sources(folder: Path) -> None:
    for name, task in SOURCES.items():
        write_model(
            folder / name, "qwen3", task, num_hidden_layers=1, num_labels=1, pad_token_id=0, seed=8
        )


def loaded(folder: Path, switches: dict[str, Any]) -> State:
    critic = load_models(config_of(folder, switches), None).critic
    assert critic is not None
    return state_of(critic)


def microbatches(folder: Path, limit: int) -> list[int]:
    """Padded tokens of each micro-batch of the rollout."""
    critic = load_models(
        config_of(folder, {"critic.max_tokens_per_microbatch": limit}), None
    ).critic
    assert critic is not None
    return [sum(m.lengths) for m in critic.microbatches(read_rollout(folder), range(12))]


def onloaded(folder: Path, offload: str) -> list[bool]:
    """Whether the critic is whole on the device: during its update, while responses are written,
    and as the actor learns."""
    models = load_models(config_of(folder, {"critic.offload": offload}), None)
    assert models.critic is not None
    found = []
    for phase in ("update_critic", "rollout", "update_policy"):
        models.memory.enter(phase)  # type: ignore[arg-type]
        found.append(models.critic.offloader.onloaded == frozenset(PARTS))
    return found


def one_rank(folder: Path) -> dict[str, Any]:
    write_sources(folder)
    seen: dict[str, Any] = {}
    for name, (switches, _) in OPTIMIZER.items():
        try:
            torch.save(iterate(folder, SIX | switches), folder / f"{name}.pt")
        except Exception:
            seen[name] = traceback.format_exc()
    states = {
        "new": loaded(folder, {"critic.head_init_std": 0.0}),
        "noisy": loaded(folder, {"critic.head_init_std": 0.3}),
        "reward_model": loaded(
            folder,
            {"critic.init": "reward_model", "critic.init_path": str(folder / "reward_model")},
        ),
        "value_checkpoint": loaded(
            folder,
            {
                "critic.init": "value_checkpoint",
                "critic.init_path": str(folder / "value_checkpoint"),
            },
        ),
    }
    torch.save(states, folder / "states.pt")
    seen["microbatches"] = {limit: microbatches(folder, limit) for limit in (30, 64, 1000)}
    seen["onloaded"] = {
        offload: onloaded(folder, offload) for offload in ("auto", "always", "never")
    }
    return seen


def on_layouts(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Sizes of the critic's mesh, and its values before and after an update, by layout."""
    found = {}
    for name in names:
        layout = {f"critic.layout.{key}": value for key, value in LAYOUTS.get(name, {}).items()}
        config = config_of(folder, layout | {"model.path": str(folder / "four_layers")})
        models = load_models(config, None)
        rollout = read_rollout(folder)
        rollout.greedy_rewards = None
        batch = spread(rollout)
        assert models.critic is not None
        with Recorder(folder, MonitoringConfig(), is_main_rank=False) as recorder:
            score(models, batch, config.algorithm, recorder)
            estimate_advantages(batch, config.algorithm, recorder)
            before = whole_of(batch).values
            update_critic(models, batch, config.algorithm, "1/1", recorder)
            score(models, batch, config.algorithm, recorder)
        after = whole_of(batch).values
        assert before is not None and after is not None
        mesh = models.critic.mesh
        critic = models.critic
        sizes = (mesh.tp_size, mesh.pp_size, mesh.cp_size, mesh.dp_size, len(critic.chunks))
        found[name] = (
            (*sizes, critic.transformer.sequence_parallel),
            before.tolist(),
            after.tolist(),
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = run_ranks(1, one_rank, folder, deadline=240)[0]
    return answer


class ScheduledAdamW:
    """torch's AdamW with the learning rate of each step written out; decay spares vectors."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], settings: OptimizerSettings, warmup: int
    ) -> None:
        self.parameters = parameters
        self.settings = settings
        self.warmup = warmup
        self.steps = 0
        groups = [
            {
                "params": [p for p in parameters if p.ndim > 1],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=settings.eps)

    def rate(self) -> float:
        settings = self.settings
        step = self.steps
        if step <= self.warmup:
            return settings.lr * step / self.warmup if self.warmup else settings.lr
        if settings.decay == "constant":
            return settings.lr
        assert settings.decay_steps is not None
        part = min((step - self.warmup) / (settings.decay_steps - self.warmup), 1)
        left = 1 - part if settings.decay == "linear" else (1 + math.cos(math.pi * part)) / 2
        return settings.min_lr + left * (settings.lr - settings.min_lr)

    def step(self, loss: torch.Tensor) -> None:
        self.steps += 1
        for group in self.adamw.param_groups:
            group["lr"] = self.rate()
        self.adamw.zero_grad()
        loss.backward()
        if self.settings.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_grad)
        self.adamw.step()


def weights_after(folder: Path, switches: dict[str, Any], seen: Seen) -> State:
    config = config_of(folder, SIX | switches)
    settings = config.critic.optimizer
    iteration = Iteration(folder / "policy", config.algorithm, responses(folder), seen.begin)
    frozen = ".self_attn." if config.critic.freeze_attention else ""
    return iteration.critic_after(
        seen.steps["critic"],
        frozen,
        optimizer=lambda parameters: ScheduledAdamW(parameters, settings, settings.warmup_steps),
    )


def change(after: State, before: State) -> torch.Tensor:
    return torch.cat(
        [(after[name].double() - before[name].double()).flatten() for name in sorted(before)]
    )


@pytest.mark.parametrize("name", OPTIMIZER)
def test_the_critics_optimizer_is_the_one_that_was_asked_for(
    folder: Path, found: dict[str, Any], name: str
) -> None:
    assert name not in found, found[name]
    switches, other = OPTIMIZER[name]
    seen = load_seen(folder / f"{name}.pt")
    assert len(seen.steps["critic"]) == 6
    wanted = change(weights_after(folder, switches, seen), seen.begin["critic"])
    got = change(seen.end["critic"], seen.begin["critic"])
    assert (got - wanted).norm() < 1e-3 * wanted.norm()
    different = change(weights_after(folder, other, seen), seen.begin["critic"])
    assert (different - wanted).norm() > 2e-2 * different.norm(), (
        "the rollout does not tell them apart"
    )


def test_frozen_attention_alone_stands_still(folder: Path, found: dict[str, Any]) -> None:
    seen = load_seen(folder / "freeze_attention.pt")
    for name, before in seen.begin["critic"].items():
        assert torch.equal(before, seen.end["critic"][name]) == (".self_attn." in name), name
    assert not any(torch.equal(t, seen.end["actor"][n]) for n, t in seen.begin["actor"].items()), (
        "the policy's learns"
    )


def test_a_critic_starts_from_where_it_is_told(folder: Path, found: dict[str, Any]) -> None:
    states = torch.load(folder / "states.pt", weights_only=True)
    for name, source in (
        ("new", "policy"),
        ("noisy", "policy"),
        *((n, n) for n in ("reward_model", "value_checkpoint")),
    ):
        tensors = read_tensors(folder / source)
        state = states[name]
        backbone = [n for n in state if n.startswith("model.")]
        assert backbone and all(torch.equal(state[n], tensors[n]) for n in backbone), name
        if source != "policy":
            assert torch.equal(state["score.weight"], tensors["score.weight"])
    assert not states["new"]["score.weight"].any() and not states["noisy"]["score.bias"].any()
    assert 0.15 < float(states["noisy"]["score.weight"].std()) < 0.45


def test_microbatches_hold_no_more_tokens_than_they_may(found: dict[str, Any]) -> None:
    total = sum(found["microbatches"][1000])
    for limit, sizes in found["microbatches"].items():
        assert max(sizes) <= limit and sum(sizes) == total
        assert len(sizes) == 1 if limit == 1000 else len(sizes) >= total / limit > 1


def test_offload_says_whether_the_critic_makes_room(found: dict[str, Any]) -> None:
    assert found["onloaded"] == {
        "always": [True, False, False],
        "never": [True] * 3,
        "auto": [True] * 3,
    }


@pytest.mark.parametrize(
    "names", [IN_TEST, pytest.param(tuple(LAYOUTS), marks=pytest.mark.full)], ids=" ".join
)
def test_a_layout_cuts_the_critic_and_changes_no_value(folder: Path, names: Sequence[str]) -> None:
    write_model(folder / "four_layers", "qwen3")
    (one,) = run_ranks(1, on_layouts, folder, ["one"])
    _, before, after = one["one"]
    assert after != pytest.approx(before, abs=1e-2)
    expected = {  # tp, pp, cp, dp, chunks of a rank, sequence parallel
        "tp": (2, 1, 1, 1, 1, False),
        "sequence_parallel": (2, 1, 1, 1, 1, True),
        "pp": (1, 2, 1, 1, 1, False),
        "vpp": (1, 2, 1, 1, 2, False),
        "cp": (1, 1, 2, 1, 1, False),
    }
    for answer in run_ranks(2, on_layouts, folder, names, deadline=240):
        assert answer.keys() == set(names)
        for name, (sizes, values, updated) in answer.items():
            assert sizes == expected[name]
            assert values == pytest.approx(before, abs=1e-5) and updated == pytest.approx(
                after, abs=1e-4
            )


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"fp8": "blockwise"}, {"fp8_recipe": "blockwise", "fp8": "e4m3"}),
        ({"fp8": "tensorwise"}, {"fp8_recipe": "tensorwise", "fp8": "hybrid"}),
    ],
)
def test_fp8_switches_reach_megatron(section: dict[str, Any], expected: dict[str, Any]) -> None:
    found = fp8_settings(PrecisionConfig.model_validate(section))
    assert {key: found[key] for key in expected} == expected

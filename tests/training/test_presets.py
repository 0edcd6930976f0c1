"""Each preset makes two real steps on a real engine, and its first one changes the weights as its formula says."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from step_formulas import CACHE, FORMULAS, LONGEST, Iteration, State, weights_after
from tiny_runs import make_model, problems, write_config, write_rows
from transformers import AutoModelForCausalLM

import vapo_megatron.training.engines
import vapo_megatron.training.loop
import vapo_megatron.training.rank
from vapo_megatron.config import algorithm
from vapo_megatron.config.load import load_config
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.mcore.trainable import Trainable
from vapo_megatron.rollout.server import EngineAddress, EngineServer
from vapo_megatron.training.run import Run
from vapo_megatron.weights.export import stream_hf

PRESETS = Path(algorithm.__file__).parent / "presets"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
# eps keeps AdamW's first updates from hanging on the sign of gradients that are nothing but rounding.
LR, EPS, EPOCHS = 2e-3, 1e-3, 2
ENGINE = {"max_running_requests": 32, "max_total_tokens": 8192, "context_length": 64}


@dataclass
class World:
    """What all presets share: model, data, one server."""

    folder: Path
    model: Path
    train: Path
    address: EngineAddress


class SharedServer:
    """Stands where a run would start a server of its own."""

    address: EngineAddress

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def start(self) -> None: ...
    def wait_until_ready(self) -> None: ...
    def stop(self) -> None: ...


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("presets")
    model, train = make_model(folder / "model"), write_rows(folder / "train.jsonl", problems(64))
    # A fresh model's padding row is zero: an RMSNorm has a gradient of a thousand there, and nothing else would count.
    fresh = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    fresh.save_pretrained(model)
    with EngineServer(model, RolloutConfig(**ENGINE), "float32", folder / "engine.log") as server:
        yield World(folder, model, train, server.address)


def config_of(world: World, name: str, overrides: dict[str, Any]) -> TrainConfig:
    optimizer = {"lr": LR, "warmup_steps": 0, "eps": EPS}
    user: dict[str, Any] = {
        "preset": name,
        "run": {"name": name, "root": str(world.folder / "runs"), "steps": 2},
        "model": {"path": str(world.model), "dtype": "float32"},
        "actor": {"optimizer": optimizer},
        "data": {"train": str(world.train), "max_prompt_tokens": 16},
        "sampling": {"max_new_tokens": LONGEST},
        "rollout": {"load_format": "dummy", **ENGINE},
        "reward": {"verifier": "function", "function": "parity_verdict:verify", "workers": 1},
        "algorithm": {"update": {"minibatch_size": 64, "epochs": EPOCHS}},
        "monitoring": {"tensorboard": False},
    }
    if "shaping" in (PRESETS / f"{name}.yaml").read_text():
        user["algorithm"]["shaping"] = {"soft_overlong": {"cache_length": CACHE}}
    if FORMULAS[name].advantage == "gae":
        user["critic"] = {"optimizer": optimizer}
        user["value_pretraining"] = {"iterations": 1, "replay_epochs": 1, "minibatch_size": 8}
    path = write_config(world.folder / f"{name}.yaml", user)
    found = load_config(TrainConfig, path, [f"{key}={value}" for key, value in overrides.items()], PRESETS)
    # Papers' sizes are not this machine's; one response a prompt stays one.
    size = {"prompts_per_step": 4, "samples_per_prompt": 4}
    if found.batch.samples_per_prompt == 1:
        size = {"prompts_per_step": 16, "samples_per_prompt": 1}
    return found.model_copy(update={"batch": BatchConfig(**size)})


def state_of(model: Trainable | None) -> State | None:
    if model is None:
        return None
    buckets = stream_hf(model.chunks, model.spec, model.mesh, model.head)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def watched_run(config: TrainConfig, run_dir: Path, address: EngineAddress) -> None:
    """A whole run in a forked rank; what went into and came out of its first step lies in run_dir/first_step.pt."""
    SharedServer.address = address
    vapo_megatron.training.engines.EngineServer = SharedServer  # type: ignore[assignment,misc]
    loop: Any = vapo_megatron.training.loop
    critic_update, policy_update = loop.update_critic, loop.update_policy
    seen: dict[str, Any] = {}

    def update_critic(run: Run, batch: Any) -> None:
        if run.step == 1:
            seen["begin"] = {
                "batch": batch.tensors() | batch.token_fields,
                "actor": state_of(run.actor),
                "critic": state_of(run.critic),
                "reference": state_of(run.reference),
            }
        critic_update(run, batch)

    def update_policy(run: Run, batch: Any) -> None:
        policy_update(run, batch)
        if run.step == 1:
            torch.save(seen | {"end": (state_of(run.actor), state_of(run.critic))}, run_dir / "first_step.pt")

    loop.update_critic, loop.update_policy = update_critic, update_policy
    Run.finish = lambda run: None  # type: ignore[method-assign]
    Run.export = lambda run: None  # type: ignore[method-assign]
    vapo_megatron.training.rank.train_rank(config, run_dir)


def run_preset(world: World, name: str, **overrides: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    config = config_of(world, name, overrides)
    run_dir = Path(config.run.directory)
    run_dir.mkdir(parents=True)
    run_ranks(1, watched_run, config, run_dir, world.address)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows, torch.load(run_dir / "first_step.pt")


def change(after: State, before: State) -> torch.Tensor:
    return torch.cat([(after[name].double() - before[name].double()).flatten() for name in sorted(before)])


def test_every_preset_has_its_formula() -> None:
    assert set(NAMES) == set(FORMULAS)


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_and_the_formula_of_the_first(world: World, name: str) -> None:
    # The optimizer of a pretrained critic has a past that the formula of one step does not know.
    rows, step = run_preset(world, name, **({"value_pretraining.enabled": "false"} if name == "sao" else {}))
    pretrained = [row for row in rows if "value_pretraining/iteration" in row]
    rows = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    formula, begin = FORMULAS[name], Iteration(**step["begin"])
    assert rows[0]["actor/updates"] == EPOCHS
    assert all(row["rollout/sync_logprob_difference"] < 1e-4 for row in rows)
    assert (begin.critic is not None) == (formula.advantage == "gae")
    assert (begin.reference is not None) == (formula.kl is not None) == ("actor/ref_kl" in rows[0])
    if formula.kl is not None:
        assert rows[0]["actor/ref_kl"] < 1e-9 < rows[1]["actor/ref_kl"], "the policy starts from the reference"
    assert 0 < rows[0]["accuracy/mean"] < 1, "the rollout has to have something to learn from"

    actor, critic = weights_after(world.model, name, begin, EPOCHS, LR, EPS)
    compared = [(begin.actor, step["end"][0], actor)]
    if begin.critic is not None and not pretrained:
        compared.append((begin.critic, step["end"][1], critic))
    for before, ours, expected in compared:
        got, wanted = change(ours, before), change(expected, before)
        assert wanted.norm() > 0
        assert (got - wanted).norm() < 1e-3 * wanted.norm(), asdict(formula)

"""Each preset makes two real steps on a real engine, and its first one changes the weights as its
formula says."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attempts import SharedServer
from batches import whole_of
from ranks import run_ranks
from step_formulas import (
    CACHE,
    FORMULAS,
    LONGEST,
    Iteration,
    Policy,
    State,
    responses_of,
    weights_after,
)
from tiny_runs import make_model, problems, write_config, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import vapo_megatron.engines.placement
import vapo_megatron.run.rank
import vapo_megatron.training.loop
from vapo_megatron.checkpoint.resume import Start
from vapo_megatron.config import algorithm
from vapo_megatron.config.load import load_config
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.training.models import Models
from vapo_megatron.weights.export import stream_hf

pytestmark = pytest.mark.full

PRESETS = Path(algorithm.__file__).parent / "presets"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
# eps keeps AdamW's first updates from hanging on the sign of gradients that are nothing but
# rounding.
LR = 2e-3
EPS = 1e-3
EPOCHS = 2
ENGINE = {"max_running_requests": 32, "max_total_tokens": 8192, "context_length": 64}


@dataclass
class World:
    """What all presets share: model, data, one server."""

    folder: Path
    model: Path
    train: Path
    address: EngineAddress


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("presets")
    model = make_model(folder / "model")
    train = write_rows(folder / "train.jsonl", problems(64))
    # A fresh model's padding row is zero: an RMSNorm has a gradient of a thousand there, and
    # nothing else would count.
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
        "reward": {"verifier": "function", "function": "parity_grade:verify", "workers": 1},
        "algorithm": {"update": {"minibatch_size": 64, "epochs": EPOCHS}},
        "monitoring": {"tensorboard": False},
    }
    if "minibatches" in (PRESETS / f"{name}.yaml").read_text():
        user["algorithm"]["update"] = {"minibatches": 1, "epochs": EPOCHS}
    if "soft_overlong" in (PRESETS / f"{name}.yaml").read_text():
        user["algorithm"]["shaping"] = {"soft_overlong": {"cache_length": CACHE}}
    if FORMULAS[name].advantage == "gae":
        user["critic"] = {"optimizer": optimizer}
        user["value_pretraining"] = {"iterations": 1, "replay_epochs": 1, "minibatch_size": 8}
    path = write_config(world.folder / f"{name}.yaml", user)
    found = load_config(
        TrainConfig, path, [f"{key}={value}" for key, value in overrides.items()], PRESETS
    )
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


def move_away(reference: Trainable) -> None:
    """A reference that is the policy would hide the KL penalty of the first step. On one rank:
    weights are whole."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.chunks[0].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def watched_run(
    config: TrainConfig, run_dir: Path, address: EngineAddress, other_reference: bool
) -> None:
    """A whole run in a forked rank; what went into and came out of its first step lies in
    run_dir/first_step.pt."""
    SharedServer.address = address
    vapo_megatron.engines.placement.EngineServer = SharedServer  # type: ignore[assignment,misc]
    loop: Any = vapo_megatron.training.loop
    score = loop.score
    critic_update = loop.update_critic
    policy_update = loop.update_policy
    seen: dict[str, Any] = {}

    def score_first(models: Models, *args: Any) -> None:
        if not seen and models.reference is not None and other_reference:
            move_away(models.reference)
        score(models, *args)

    def update_critic(models: Models, batch: Any, *args: Any) -> None:
        if not seen:
            whole = whole_of(batch)
            seen["begin"] = {
                "batch": {name: tensor.clone() for name, tensor in whole.tensors().items()},
                "actor": state_of(models.actor),
                "critic": state_of(models.critic),
                "reference": state_of(models.reference),
            }
        critic_update(models, batch, *args)

    def update_policy(models: Models, *args: Any) -> None:
        policy_update(models, *args)
        if "end" not in seen:
            seen["end"] = state_of(models.actor), state_of(models.critic)
            if dist.get_rank() == 0:
                torch.save(seen, run_dir / "first_step.pt")

    loop.score = score_first
    loop.update_critic = update_critic
    loop.update_policy = update_policy
    loop.export = loop.export_final = loop.show_end = lambda *args: None
    vapo_megatron.run.rank.train_rank(config, run_dir, Start())


def run_preset(
    world: World, name: str, ranks: int = 1, other_reference: bool = False, **overrides: Any
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    config = config_of(world, name, overrides)
    run_dir = Path(config.run.directory)
    run_dir.mkdir(parents=True)
    run_ranks(ranks, watched_run, config, run_dir, world.address, other_reference)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows, torch.load(run_dir / "first_step.pt", weights_only=True)


def change(after: State, before: State) -> torch.Tensor:
    return torch.cat(
        [(after[name].double() - before[name].double()).flatten() for name in sorted(before)]
    )


def test_every_preset_has_its_formula() -> None:
    missing = set(NAMES) - set(FORMULAS)
    gone = set(FORMULAS) - set(NAMES)
    assert not missing, (
        f"write what {missing} compute in their first step into FORMULAS of "
        "tests/training/step_formulas.py"
    )
    assert not gone, (
        f"vapo_megatron/config/presets/ has no {gone}: take them out of "
        "tests/training/step_formulas.py"
    )


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_and_the_formula_of_the_first(world: World, name: str) -> None:
    # The optimizer of a pretrained critic has a past that the formula of one step does not know.
    overrides = (
        {"value_pretraining.enabled": "false"} if name in ("sao", "bpco", "t_ppo", "tether") else {}
    )
    rows, step = run_preset(world, name, other_reference=True, **overrides)
    pretrained = [row for row in rows if "value_pretraining/iteration" in row]
    rows = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    unpretrained = (
        "vapo_without_value_pretraining",
        "vapo_without_critic",
        "vapo_direct",
        "vapo_direct_groups",
        "vapo_regression",
    )
    assert bool(pretrained) == (name.startswith(("vapo", "vc_ppo")) and name not in unpretrained)
    formula = FORMULAS[name]
    begin = Iteration(**step["begin"])
    assert rows[0]["actor/updates"] == EPOCHS
    assert all(row["rollout/train_infer_logprob_diff"] < 1e-4 for row in rows)
    assert (begin.critic is not None) == (formula.advantage == "gae")
    assert (begin.reference is not None) == (formula.kl is not None) == ("actor/ref_kl" in rows[0])
    assert 0 < rows[0]["accuracy/mean"] < 1, "the rollout has to have something to learn from"
    assert (
        0 < int(begin.batch["truncated"].sum()) < len(begin.batch["truncated"])
        or not formula.window
    )

    check_first_step(world, name, step, bool(pretrained))


def check_first_step(world: World, name: str, step: dict[str, Any], pretrained: bool) -> None:
    begin = Iteration(**step["begin"])
    actor, critic = weights_after(world.model, name, begin, EPOCHS, LR, EPS)
    compared = [(begin.actor, step["end"][0], actor)]
    if begin.critic is not None and not pretrained:
        compared.append((begin.critic, step["end"][1], critic))
    for before, ours, expected in compared:
        got = change(ours, before)
        wanted = change(expected, before)
        assert wanted.norm() > 0
        assert (got - wanted).norm() < 1e-4 * wanted.norm(), asdict(FORMULAS[name])


@pytest.mark.parametrize(
    "name,layouts",
    [
        ("gspo", {"actor.layout.cp": 2}),
        ("remax", {"actor.layout.tp": 2}),
        ("grpo", {}),
        (
            "sao",
            {"actor.layout.cp": 2, "critic.layout.tp": 2, "value_pretraining.enabled": "false"},
        ),
    ],
)
def test_two_ranks_do_the_same(world: World, name: str, layouts: dict[str, Any]) -> None:
    _, step = run_preset(
        world, name, 2, **{"run.name": f"{name}_two_ranks", "run.steps": 1}, **layouts
    )
    check_first_step(world, name, step, pretrained=False)


def test_remax_compares_with_the_greedy_answer(world: World) -> None:
    """Decoded by hand and judged as parity_grade does."""
    _, step = run_preset(world, "remax", **{"run.name": "remax_greedy", "run.steps": 1})
    batch = step["begin"]["batch"]
    policy = Policy(world.model, step["begin"]["actor"])
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    for response in responses_of(batch):
        ids = response.ids[: response.prompt]
        first = response.prompt
        with torch.no_grad():
            while len(ids) - first < LONGEST and (
                len(ids) == first or ids[-1] != tokenizer.eos_token_id
            ):
                ids = torch.cat((ids, policy.model(ids[None]).logits[0, -1:].argmax(-1)))
        words = tokenizer.decode(ids[first:], skip_special_tokens=True).split()
        finished = ids[-1] == tokenizer.eos_token_id
        assert response.greedy == float(finished and len(words) % 2 == 0)


def test_the_reference_is_replaced_when_asked(world: World) -> None:
    rows, _ = run_preset(
        world, "grpo", **{"run.name": "replaced", "algorithm.kl.replace_reference_every": 1}
    )
    assert [row["actor/ref_kl"] < 1e-9 for row in rows if row["step"] > 0] == [True, True]


def test_bins_functions_and_corrections_in_a_whole_run(world: World) -> None:
    """What no preset switches on: a critic of bins, importance weights, a user's advantage, filter
    and mask."""
    functions = "examples.custom_functions.functions"
    rows, step = run_preset(
        world,
        "vapo",
        **{
            "run.name": "switches",
            "algorithm.value_loss": "{kind: hl_gauss, low: -1, high: 1}",
            "algorithm.importance_sampling.kind": "tis",
            "algorithm.advantage.function": f"{functions}:reward_times_surprise",
            "algorithm.filter_function": f"{functions}:finished_and_not_too_short",
            "algorithm.mask_function": "switch_functions:every_second",
        },
    )
    batch = step["begin"]["batch"]
    row = next(row for row in rows if row["step"] == 1)
    assert step["begin"]["critic"]["score.weight"].shape[0] == 51
    assert batch["values"].abs().max() < 1
    lengths = batch["response_cu_seqlens"].diff()
    drawn = batch["cu_seqlens"].diff() - batch["prompt_lengths"]
    assert torch.equal(lengths, (drawn + 1) // 2) and row["response_length/mean"] == float(
        lengths.float().mean()
    )
    assert row["filter/kept"] == pytest.approx(
        float((~batch["truncated"] & (lengths >= 2)).float().mean())
    )
    assert row["importance/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert float(batch["advantages"].std()) > 0 and row["critic/updates"] == EPOCHS

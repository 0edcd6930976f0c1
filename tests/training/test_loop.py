"""The order of a step, and what a step hands from phase to phase: what no single phase's test can
see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers
from batches import spread
from ranks import run_ranks
from switch_rollout import config_of, read_rollout, write_models

from vapo_megatron.algorithms.selection import minibatch_seed, split_minibatches
from vapo_megatron.checkpoint.checkpointer import Checkpointer
from vapo_megatron.config.run import CheckpointConfig, MonitoringConfig, RunConfig
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.training import loop, value_pretraining
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import load_models
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.score import score
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.training.state import RunState
from vapo_megatron.training.updates import update_critic

STEP = [
    "collect",
    "spread",
    "heed_signals",
    "offload",
    "score",
    "estimate_advantages",
    "update_critic",
    "update_policy",
    "replace_reference",
    "sync_weights",
    "advance",
    "evaluate",
    "export",
    "record_step",
    "safe_point",
]
PRETRAINING = ["pretrain_critic", "export_critic", "sync_weights", "end_pretraining"]
# What the loop calls of the other modules of its room.
PHASES = [
    name
    for name, function in vars(loop).items()
    if isfunction(function)
    and function.__module__.startswith("vapo_megatron.training.")
    and function is not loop.train
]


class Run:
    """Stands in for models, rollouts and state; keeps which phase came when, and with what."""

    def __init__(self, new: bool, sound: bool = True) -> None:
        self.calls: list[str] = []
        self.given: dict[str, tuple[Any, ...]] = {}
        self.updates = SimpleNamespace(is_sound=lambda batch: sound)
        self.critic = "critic"
        self.actor = "actor"
        self.memory = "memory"
        self.critic_is_new = "is new"
        self.engines = SimpleNamespace(offload=lambda: self.note("offload"))
        self.step = 0
        self.seed = "seed"
        self.is_new = new
        self.needs_value_pretraining = new
        self.returns = "returns of past steps"

    def note(self, name: str, *given: Any, **named: Any) -> str:
        self.calls.append(name)
        self.given[name] = (*given, *named.values())
        return name

    def steps(self, rollouts: Any) -> Iterator[int]:
        yield from (1, 2)

    @contextmanager
    def saved_if_stopped(self, rollouts: Any) -> Iterator[Callable[[], None]]:
        before = len(self.calls)
        yield lambda: self.note("heed_signals")
        heeded = ["collect", "spread", "heed_signals", "offload", "score"]
        assert self.calls[before:] == heeded, "models and generators are as they were"

    def begin(self, *given: Any) -> None:
        self.given["begin"] = given

    def advance(self) -> None:
        self.note("advance")

    def end_pretraining(self, rollouts: Any) -> None:
        self.note("end_pretraining")

    def safe_point(self, rollouts: Any) -> None:
        self.note("safe_point")


@pytest.mark.parametrize(("new", "sound"), [(True, True), (False, True), (False, False)])
def test_phases_come_in_the_order_of_the_method(
    new: bool, sound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(new, sound)
    config = config_of(tmp_path, {"value_pretraining.enabled": True})
    shaping = config.algorithm.shaping.model_copy(update={"truncated": "window"})  # as with windows
    windows = config.rollout.model_copy(update={"windows": 2})
    whole = config.algorithm
    algorithm = whole.model_copy(update={"shaping": shaping})
    config = config.model_copy(update={"algorithm": algorithm, "rollout": windows})
    for name in PHASES:
        monkeypatch.setattr(loop, name, lambda *given, name=name: run.note(name, *given))
    loop.train(config, run, run, run, "recorder")  # type: ignore[arg-type]
    learning = [
        name
        for name in STEP
        if sound or name not in ("estimate_advantages", "update_critic", "update_policy")
    ]
    before = ["evaluate", *PRETRAINING] if new else []
    assert run.calls == [*before, *learning, *learning, "export_final", "show_end"]
    if sound:
        assert run.given["estimate_advantages"] == (
            "spread",
            config.algorithm,
            "recorder",
            "is new",
            "returns of past steps",
        )


def test_value_pretraining_reads_whole_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, {"value_pretraining.enabled": True})
    whole = config.algorithm
    shaping = whole.shaping.model_copy(update={"truncated": "window"})
    windows = config.rollout.model_copy(update={"windows": 2})
    algorithm = whole.model_copy(update={"shaping": shaping})
    config = config.model_copy(update={"algorithm": algorithm, "rollout": windows})
    given: list[Any] = []
    monkeypatch.setattr(
        value_pretraining, "pretrain_value", lambda *all_given: given.extend(all_given)
    )
    models = SimpleNamespace(critic=Trainable.__new__(Trainable), memory="memory")
    run: Any = "run"
    value_pretraining.pretrain_critic(config, models, run, run, run)  # type: ignore[arg-type]
    assert whole in given and algorithm not in given


def is_new_before_and_after(folder: Path) -> list[bool]:
    """Whether the critic is new: before its first update, after it, and where there is none."""
    config = config_of(folder, {})
    batch = spread(read_rollout(folder))
    models = load_models(config, None)
    seen = []
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        score(models, batch, config.algorithm, recorder)
        seen.append(models.critic_is_new)
        estimate_advantages(batch, config.algorithm, recorder, True)
        seen.append(models.critic_is_new)
        update_critic(models, batch, config.algorithm, "1/1", recorder)
        seen.append(models.critic_is_new)
    models.critic = None
    return [*seen, models.critic_is_new]


def test_a_critic_is_new_until_its_first_update(tmp_path: Path) -> None:
    assert run_ranks(1, is_new_before_and_after, write_models(tmp_path), deadline=240)[0] == [
        True,
        True,
        False,
        False,
    ]


def test_every_step_has_a_seed_of_its_own_in_every_attempt(tmp_path: Path) -> None:
    """It orders the step's mini-batches: the same order in each step would repeat the same
    neighbours."""

    def seeds(run_seed: int, first: int = 1) -> list[str]:
        run = RunConfig(name="run", seed=run_seed, steps=4)
        state = RunState(
            run, CheckpointConfig(), tmp_path, cast(Checkpointer, None), SkippedUpdates()
        )
        state.step = first - 1
        return [state.seed for _ in state.steps(cast(Rollouts, None))]

    assert len({*seeds(1), *seeds(2)}) == 8
    assert seeds(1, first=3) == seeds(1)[2:], "a run resumed at step 2"
    orders = [
        split_minibatches(torch.arange(32), 8, "sample", minibatch_seed(seed, 1, 0))
        for seed in seeds(1)
    ]
    assert len({str(order) for order in orders}) == 4


def logprobs_at(folder: Path, temperature: float) -> Any:
    """What the trainer scores a rollout with, by its config alone, and transformers' log-probs at
    that temperature."""
    config = config_of(folder, {"sampling.temperature": temperature})
    batch = spread(read_rollout(folder))
    models = load_models(config, None)
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        score(models, batch, config.algorithm, recorder)
    own = batch.local
    expected = []
    policy = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "policy", dtype=torch.float32
    )
    for sample in range(own.samples):
        ids = own.tokens[int(own.cu_seqlens[sample]) : int(own.cu_seqlens[sample + 1])].long()
        with torch.no_grad():
            logprobs = F.log_softmax(policy(ids[None]).logits[0, :-1] / temperature, dim=-1)
        chosen = logprobs.gather(1, ids[1:, None])[:, 0]
        expected.append(chosen[int(own.prompt_lengths[sample]) - 1 :])
    assert own.old_logprobs is not None
    return float((own.old_logprobs - torch.cat(expected)).abs().max())


def test_a_run_trains_at_the_temperature_that_it_samples_at(tmp_path: Path) -> None:
    assert run_ranks(1, logprobs_at, write_models(tmp_path), 0.7, deadline=240)[0] < 1e-4

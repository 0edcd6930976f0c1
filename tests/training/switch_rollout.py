"""The rollout that switches are tested on, the models beside it, and the trainer's own iteration
over it."""

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from batches import spread
from hf_models import VOCAB, read_tensors, write_model, write_tensors
from step_formulas import Policy, Response, State, responses_of
from switch_formulas import ADAM

from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring.recorder import Advance, Recorder
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.models import Models, load_models
from vapo_megatron.training.score import score
from vapo_megatron.training.updates import update_critic, update_policy
from vapo_megatron.weights.export import stream_hf

# Four prompts with three responses each: length, reward, correct, truncated. Groups agree or not,
# cut responses are right or wrong, rewards tie, and no two facts go together throughout.
RESPONSES = [
    [(1, 1.0, True, False), (9, -1.0, False, False), (24, 1.0, True, True)],
    [(5, -1.0, False, True), (6, -0.5, False, False), (13, 1.0, True, False)],
    [(2, 1.0, True, False), (17, 1.0, True, False), (7, 0.25, True, False)],
    [(11, -1.0, False, False), (3, 0.5, False, False), (20, -1.0, False, True)],
]
GREEDY = [0.75, -0.25, 1.0, -1.0]
# What every case starts from: lambda adapts at these lengths, a rollout is three mini-batches, the
# last one smaller.
BASE: dict[str, Any] = {
    "algorithm.advantage.length_adaptive_alpha": 0.3,
    "algorithm.update.minibatch_size": 5,
    "value_pretraining.enabled": False,
    "critic.head_init_std": 0.3,
}


def write_models(folder: Path) -> Path:
    """A policy, and near it the reference policy."""
    policy = write_model(folder / "policy", "qwen3", num_hidden_layers=1)
    reference = write_model(folder / "reference", "qwen3", num_hidden_layers=1)

    def move(tensors: State) -> None:
        generator = torch.Generator().manual_seed(4)
        for name, tensor in tensors.items():
            tensors[name] = tensor + 0.05 * torch.randn(tensor.shape, generator=generator)

    write_tensors(reference, move)
    torch.save(make_rollout(policy).tensors(), folder / "rollout.pt")
    return folder


@cache
def models_of_this_process() -> Path:
    """Written once, for mutants (tools/mutants.py): they are forks of the process that has them."""
    return write_models(Path(tempfile.mkdtemp()))


def make_rollout(policy: Path) -> ExperienceBatch:
    """The engine's log-probs lie around the policy's, on both sides of every bound."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    model = Policy(policy, read_tensors(policy))
    for group, members in enumerate(RESPONSES):
        prompt = Prompt(
            str(group),
            "",
            "",
            tuple(torch.randint(0, VOCAB, (2 + group,), generator=generator).tolist()),
        )
        for index, (length, reward, correct, truncated) in enumerate(members):
            ids = torch.randint(0, VOCAB, (length,), generator=generator)
            whole = torch.cat((torch.tensor(prompt.token_ids), ids))
            empty = Response(
                whole, len(prompt.token_ids), 0.0, False, False, 0, torch.zeros(0), 0.0
            )
            with torch.no_grad():
                logprobs = (
                    model.logprobs(empty) + 0.4 * torch.randn(length, generator=generator).double()
                )
            reason = "length" if truncated else "stop"
            sample = Sample(prompt, group, index, 0, ids.numpy(), logprobs.numpy(), reason, 0, 0)  # type: ignore[arg-type]
            sample.reward = reward
            sample.correct = correct
            samples.append(sample)
    batch = from_samples(samples)
    batch.greedy_rewards = torch.tensor(GREEDY)[batch.group_ids]
    return batch


def config_of(folder: Path, switches: dict[str, Any]) -> TrainConfig:
    """BASE with switches, by dotted key."""
    optimizer = {"lr": ADAM["lr"], "eps": ADAM["eps"], "warmup_steps": 0}
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "actor": {"optimizer": optimizer, "max_tokens_per_microbatch": 40},
        "critic": {"optimizer": dict(optimizer), "max_tokens_per_microbatch": 40},
        "data": {"train": "unread.jsonl"},
        "batch": {"prompts_per_step": len(RESPONSES), "samples_per_prompt": 3},
        "sampling": {"max_new_tokens": 24},
        "reward": {"correct": 1.0, "incorrect": -1.0},
    }
    for key, value in (BASE | switches).items():
        if value == "unset":
            continue
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return TrainConfig.model_validate(tree)


@dataclass
class Seen:
    """What the trainer did with the rollout: weights before and after, and the responses of each
    optimizer step."""

    begin: dict[str, State]
    end: dict[str, State] = field(default_factory=dict)
    steps: dict[str, list[list[int]]] = field(default_factory=dict)
    row: dict[str, float] = field(default_factory=dict)
    progress: dict[str, tuple[int | None, int]] = field(default_factory=dict)


class Watched(Recorder):
    """Keeps how far each phase said that it was, beside how far there was to go."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, MonitoringConfig(), is_main_rank=False)
        self.progress: dict[str, tuple[int | None, int]] = {}

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Advance]:
        steps: list[int] = []
        with super().phase(name, total):
            yield steps.append
        self.progress[name] = total, sum(steps)


def load_seen(path: Path) -> Seen:
    """What another process has saved."""
    with torch.serialization.safe_globals([Seen]):
        seen: Seen = torch.load(path, weights_only=True)
    return seen


def state_of(model: Trainable) -> State:
    """On one rank: all weights, by their names on the hub."""
    buckets = stream_hf(model.chunks, model.spec, model.mesh, model.head)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def watch_steps(model: Trainable, batch: ExperienceBatch) -> list[list[int]]:
    """Note from now on which responses of the batch each optimizer step of a model is made on."""
    known = {tokens_of(batch, s): s for s in range(batch.samples)}
    steps: list[list[int]] = []
    train_step = model.train_step

    def noted(minibatch: ExperienceBatch, samples: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append([known[tokens_of(minibatch, s)] for s in samples])
        return train_step(minibatch, samples, *args, **kwargs)

    model.train_step = noted  # type: ignore[method-assign]
    return steps


def tokens_of(batch: ExperienceBatch, sample: int) -> tuple[int, ...]:
    return tuple(batch.tokens[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1]].tolist())


def read_rollout(folder: Path) -> ExperienceBatch:
    return ExperienceBatch(**torch.load(folder / "rollout.pt", weights_only=True))


def iterate(folder: Path, switches: dict[str, Any]) -> Seen:
    """On one rank: the trainer's phases from scoring to the policy's update, in the order of its
    loop."""
    config = config_of(folder, switches)
    models = load_models(config, None)
    whole = read_rollout(folder)
    if models.reference is not None:
        take_weights(models, folder)
    held = {
        model.name: model
        for model in (models.actor, models.critic, models.reference)
        if model is not None
    }
    seen = Seen({name: state_of(model) for name, model in held.items()})
    seen.steps = {model.name: watch_steps(model, whole) for model in models.trained}
    algorithm = config.algorithm
    if algorithm.advantage.estimator != "remax":
        whole.greedy_rewards = None
    batch = spread(whole)
    with Watched(folder) as recorder:
        score(models, batch, algorithm, recorder)
        estimate_advantages(batch, algorithm, recorder)
        update_critic(models, batch, algorithm, "1/1", recorder)
        update_policy(models, batch, algorithm, "1/1", recorder)
        seen.row = recorder.write(1)
        seen.progress = recorder.progress
    seen.end = {model.name: state_of(model) for model in models.trained}
    return seen


def take_weights(models: Models, folder: Path) -> None:
    """The reference gets other weights: were they the policy's, its penalty would be 0 in the
    first step."""
    assert models.reference is not None
    other = config_of(folder, {"model.path": str(folder / "reference")})
    models.reference.copy_from(load_models(other, None).actor)


def iterate_all(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """On one rank: every case, what was seen of it in a file; the tracebacks of those that
    failed."""
    failed = {}
    for name, switches in cases.items():
        try:
            torch.save(iterate(folder, switches), folder / f"{name}.pt")
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


def responses(folder: Path) -> list[Response]:
    return responses_of(read_rollout(folder).tensors())

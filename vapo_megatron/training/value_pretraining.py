"""Value pretraining (VAPO, section 4.1; VC-PPO): the critic learns the returns of a fixed policy.

Rollouts are recorded once, in files (checkpoint/recorded_rollouts.py), and replayed. Targets are
Monte-Carlo returns (lambda = 1), so they do not depend on the critic. Part of the record is held
out; on it explained variance and the bias along the response are measured, since a critic can
explain no variance and still be free of bias, or the other way round.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vapo_megatron.algorithms.gae import monte_carlo_returns
from vapo_megatron.algorithms.segments import place_terminal
from vapo_megatron.checkpoint.manifest import FileFacts
from vapo_megatron.checkpoint.recorded_rollouts import RecordedRollouts, write_rollout
from vapo_megatron.collectives import on_rank_zero
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import BatchConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.config.value import HELD_OUT_SHARE, ValueLossConfig, ValuePretrainingConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.records import Records
from vapo_megatron.errors import RunFailed
from vapo_megatron.megatron.offload import MemoryPlan
from vapo_megatron.megatron.probe import Probe
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.rollout.ledger import StepRule
from vapo_megatron.training.collect import collect
from vapo_megatron.training.credit import returns_of
from vapo_megatron.training.exchange import rank_and_world
from vapo_megatron.training.losses import values_of
from vapo_megatron.training.metrics import mean_of, value_metrics
from vapo_megatron.training.models import Models
from vapo_megatron.training.rollouts import Rollouts
from vapo_megatron.training.score import score_samples
from vapo_megatron.training.shards import (
    ShardedBatch,
    partition_by_tokens,
    read_local,
)
from vapo_megatron.training.skipped_updates import SkippedUpdates
from vapo_megatron.training.state import RunState
from vapo_megatron.training.token_rewards import returns_known, shaped_rewards
from vapo_megatron.training.updates import critic_step

_CHECKS = 50


def pretrain_critic(
    config: TrainConfig, models: Models, rollouts: Rollouts, state: RunState, recorder: Recorder
) -> None:
    """Collective: value pretraining of a training run. Its responses are written whole, also in a
    run of windows."""
    assert models.critic is not None and not isinstance(models.critic, Probe), (
        "the config refuses value pretraining otherwise"
    )
    settings = config.value_pretraining
    records = None
    if settings.records:
        records = Records(config, rollouts.tokenizer, models.actor.spec.vocab_size)
    pretrain_value(
        models.critic,
        models.memory,
        rollouts,
        settings,
        config.pretraining_algorithm,
        config.batch,
        state,
        recorder,
        records,
    )


def pretrain_value(
    critic: Trainable,
    memory: MemoryPlan,
    rollouts: Rollouts | None,
    config: ValuePretrainingConfig,
    algorithm: AlgorithmConfig,
    size: BatchConfig,
    state: RunState,
    recorder: Recorder,
    records: Records | None,
) -> None:
    """Collective: record rollouts, and replay them until the critic is good enough or the replay
    ends.

    A resumed run continues with the recorded rollouts, after the updates already made. size: the
    size of a rollout; at most that many groups are held out. records: earlier rollouts, in place of
    fresh ones; rollouts is None in a run without actor and engines.

    Raises:
        RunFailed: no held-out response has a return: the critic could not be judged, nor could it
            learn much.
    """
    if records is not None:
        with recorder.timer("import_records"):
            import_records(records, rollouts, state)
    else:
        assert rollouts is not None, "without records, engines draw the rollouts"
        iterations = config.rollouts(size.prompts_per_step * size.samples_per_prompt)
        record_rollouts(rollouts, iterations, algorithm, size, state, recorder)
    if rollouts is not None:
        rollouts.engines.offload()
    memory.enter("update_critic")
    targets = Targets(state.recorded, algorithm)
    record = state.recorded
    train, held_out = split_prompts(
        record.prompt_ids, record.table.group_ids, size.prompts_per_step, state.run_seed
    )
    updates = replay_order(train, config, state.run_seed)
    value_loss = for_pretraining(algorithm.value_loss)
    check_every = max(1, len(updates) // _CHECKS)
    if not targets.known[held_out].any():
        raise RunFailed(
            f"{state.run_dir}: none of the {len(held_out)} held-out responses of value pretraining "
            "has a return, all are truncated "
            f"(algorithm.shaping.truncated={algorithm.shaping.truncated}): start a new run with a "
            "larger sampling.max_new_tokens, or terminal",
            shared=True,
        )
    metrics = measure(critic, targets.select(held_out), algorithm.value_loss)
    done = number = state.pretraining.updates
    if done == 0:
        recorder.add(metrics)
        recorder.write_pretraining(0, 0)
    results: list[dict[str, float]] = []
    with recorder.phase("value_pretraining", total=len(updates)) as advance:
        advance(done)
        for number, samples in enumerate(updates[done:], done + 1):
            results += _update(critic, targets.select(samples), value_loss, state.updates)
            advance(1)
            if number % check_every and number < len(updates):
                continue
            metrics = measure(critic, targets.select(held_out), algorithm.value_loss)
            recorder.add(
                metrics | {f"critic/{key}": value for key, value in mean_of(results).items()}
            )
            recorder.add(state.updates.metrics())
            recorder.write_pretraining(number, number * config.minibatch_size)
            results = []
            if good_enough(metrics, config):
                break
            state.pretraining = state.pretraining.model_copy(update={"updates": number})
            state.safe_point(rollouts)
    state.pretraining = state.pretraining.model_copy(update={"updates": number})
    recorder.console.note(
        f"value pretraining: {number} updates, explained variance "
        f"{metrics[names.EXPLAINED_VARIANCE]:.3f} (free baselines "
        f"{max(metrics[names.BASELINE_LOO], metrics[names.BASELINE_POSITION], 0.0):.3f}), largest "
        f"bias {largest_bias(metrics):.3f} on held-out responses"
    )


def _update(
    critic: Trainable, minibatch: ShardedBatch, value_loss: ValueLossConfig, updates: SkippedUpdates
) -> list[dict[str, float]]:
    """Make an update of a mini-batch, if there is anything to learn from it; returns its figures,
    or nothing where it was skipped."""
    learnt = minibatch.table.selected
    assert learnt is not None, "the targets say what carries loss"
    if not updates.has_signal(learnt, learnt):
        return []
    result = critic_step(critic, minibatch, value_loss)
    if not result.updated:
        return []
    loss = result.metrics["value_loss"]
    return [{"value_loss": loss, "grad_norm": result.grad_norm, "lr": result.lr}]


def record_rollouts(
    rollouts: Rollouts,
    iterations: int,
    algorithm: AlgorithmConfig,
    size: BatchConfig,
    state: RunState,
    recorder: Recorder,
) -> None:
    """Collective: append rollouts of the fixed policy to state.recorded, up to this many."""
    rule = StepRule(size.prompts_per_step, iterations)
    rollouts.begin(rule, size.samples_per_prompt, state.pretraining.iterations, fixed_policy=True)
    for done in range(state.pretraining.iterations + 1, iterations + 1):
        with state.saved_if_stopped(rollouts):
            batch = collect(rollouts, algorithm, state.step, recorder)
        name = state.recorded.next_name
        state.recorded.add(name, on_rank_zero(partial(_write, batch, state.run_dir / name)))
        del batch
        state.pretraining = state.pretraining.model_copy(update={"iterations": done})
        state.safe_point(rollouts, milestone=done == iterations)
        rollouts.advance()
    rollouts.end()


def import_records(records: Records, rollouts: Rollouts | None, state: RunState) -> None:
    """Collective: append earlier rollouts to state.recorded; a resumed run has them already.

    Raises:
        BadInput: as Records.batches, on every rank.
    """
    if state.pretraining.iterations:
        return
    batches = records.batches()
    while True:
        name = state.recorded.next_name
        facts = on_rank_zero(partial(_write_next, batches, state.run_dir / name))
        if facts is None:
            break
        state.recorded.add(name, facts)
    iterations = len(state.recorded.files)
    state.pretraining = state.pretraining.model_copy(update={"iterations": iterations})
    state.safe_point(rollouts, milestone=True)


def _write_next(batches: Iterator[ExperienceBatch], path: Path) -> FileFacts | None:
    batch = next(batches, None)
    if batch is None:
        return None
    return write_rollout(batch, path)


def _write(batch: ExperienceBatch | None, path: Path) -> FileFacts:
    assert batch is not None, "rank 0 has the batch"
    return write_rollout(batch, path)


def for_pretraining(config: ValueLossConfig) -> ValueLossConfig:
    """Without the clip of the value loss: it holds values near old ones, and there are none worth
    staying near yet."""
    if config.kind == "clipped":
        return config.model_copy(update={"kind": "mse"})
    return config


class Targets:
    """Recorded samples with their value targets, read from files when they are selected.

    known: bool [S], the samples that have a return.
    """

    def __init__(self, record: RecordedRollouts, config: AlgorithmConfig) -> None:
        self._record = record
        self._rewards = shaped_rewards(record.table, config.shaping)
        self.known = returns_known(record.table.truncated, config.shaping)
        self._advantage = config.advantage

    def select(self, samples: Sequence[int]) -> ShardedBatch:
        """Some of the samples, with their returns and whether they carry loss; each rank reads its
        local ones."""
        chosen = torch.tensor(samples, dtype=torch.int64)
        table = self._record.table.select(chosen)
        table.shaped_rewards = self._rewards[chosen]
        table.selected = self.known[chosen]

        def read(own: Tensor) -> ExperienceBatch:
            batch = table.select(own).batch(**self._record.tokens_of(chosen[own]))
            rewards = self._rewards[chosen[own]]
            batch.returns = self._returns(batch, rewards)
            return batch

        return read_local(table, partition_by_tokens(table, rank_and_world()[1]), read)

    def _returns(self, batch: ExperienceBatch, rewards: Tensor) -> Tensor:
        bounds = batch.response_cu_seqlens
        earlier = batch.turn_rewards
        if self._advantage.credit == "turn":
            placed = place_terminal(rewards, bounds, batch.response_tokens, earlier)
            return returns_of(batch, placed, self._advantage)
        return monte_carlo_returns(rewards, bounds, self._advantage.gamma, earlier)


def split_prompts(
    prompt_ids: Tensor, group_ids: Tensor, most_groups: int, seed: int
) -> tuple[list[int], list[int]]:
    """Samples to train on and to measure on: an eighth of the prompts is held out, with all samples
    of all rollouts.

    Fewer where they have more than most_groups groups. prompt_ids and group_ids: int64 [S].
    """
    groups: dict[int, set[int]] = {}
    for prompt, group in zip(prompt_ids.tolist(), group_ids.tolist(), strict=True):
        groups.setdefault(prompt, set()).add(group)
    prompts = sorted(groups)
    random.Random(seed).shuffle(prompts)
    held: set[int] = set()
    measured = 0
    for prompt in prompts[: max(1, round(len(prompts) * HELD_OUT_SHARE))]:
        if held and measured + len(groups[prompt]) > most_groups:
            break
        held.add(prompt)
        measured += len(groups[prompt])
    members = prompt_ids.tolist()
    if len(held) == len(prompts):
        return list(range(len(members))), list(range(len(members)))
    return [s for s, p in enumerate(members) if p not in held], [
        s for s, p in enumerate(members) if p in held
    ]


def replay_order(samples: list[int], config: ValuePretrainingConfig, seed: int) -> list[list[int]]:
    """Mini-batches over all epochs, each epoch in a different order."""
    steps = []
    for epoch in range(config.replay_epochs):
        order = list(samples)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        steps += [
            order[i : i + config.minibatch_size]
            for i in range(0, len(order), config.minibatch_size)
        ]
    return steps[: config.most_steps]


def measure(critic: Trainable, held_out: ShardedBatch, config: ValueLossConfig) -> dict[str, float]:
    """Collective: quality of the critic on held-out samples with their returns."""
    home = held_out.local
    selected = held_out.table.selected
    assert home.returns is not None and selected is not None, "no value targets to compare with"
    measured = score_samples(critic, held_out, read=partial(values_of, config=config))[:, 0]
    return value_metrics(held_out, measured, home.returns, selected)


def largest_bias(metrics: dict[str, float]) -> float:
    """The largest |mean V - R| over the positions that are measured."""
    return max(abs(metrics[f"{names.VALUE_BIAS}{position}"]) for position in names.BIAS_POSITIONS)


def good_enough(metrics: dict[str, float], config: ValuePretrainingConfig) -> bool:
    """Whether every stop that is set has been reached; false if none is set."""
    reached = []
    if config.stop_explained_variance is not None:
        reached.append(metrics[names.EXPLAINED_VARIANCE] >= config.stop_explained_variance)
    if config.stop_bias is not None:
        reached.append(largest_bias(metrics) <= config.stop_bias)
    return bool(reached) and all(reached)

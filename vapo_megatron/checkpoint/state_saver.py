"""Writing the state of a run as a checkpoint, to one place: the run directory, or host memory."""

import errno
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from vapo_megatron.checkpoint.background_save import BackgroundSave, CheckpointJob, Outcome, Problem
from vapo_megatron.checkpoint.checkpoints import CHECKPOINT_FOLDER, CheckpointName, open_checkpoint
from vapo_megatron.checkpoint.dist_saver import ModelSaver
from vapo_megatron.checkpoint.manifest import PROGRESS_FILE, FileFacts, Manifest, Progress, write_json
from vapo_megatron.checkpoint.nodes import Nodes
from vapo_megatron.checkpoint.resume import RUN_FILES, Resumed, SavedModel, layouts
from vapo_megatron.collectives import on_rank_zero
from vapo_megatron.config.atomic import atomic_write, sync
from vapo_megatron.config.load import dump_config
from vapo_megatron.config.run import RetentionConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.megatron.dist_optimizer import rng_state
from vapo_megatron.megatron.mesh import world_timeout
from vapo_megatron.monitoring.names import EVALUATION
from vapo_megatron.weights.adapters import adapter_parameter_count, base_identity
from vapo_megatron.weights.spec import ModelSpec
from vapo_megatron.weights.torch_dist import write_model_card

# What other users of host memory are left with.
_ROOM_BYTES = 64 << 20


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds besides models, generators and files. metrics: rank 0's of the last step; record:
    files of what value pretraining has recorded, until it is over; contents: of files by name, graded groups that wait
    for the trainer and a critic that is a probe; empty ones are not written."""

    progress: Progress
    metrics: Mapping[str, float]
    record: Mapping[str, FileFacts] = field(default_factory=dict)
    contents: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> CheckpointName:
        """Of the checkpoint."""
        pretraining = self.progress.pretraining
        return (
            CheckpointName(self.progress.step, pretraining.count) if self.record else CheckpointName(self.progress.step)
        )


@dataclass(frozen=True)
class SavedRun:
    """What of a run stays the same from save to save; run_id is the same over all attempts."""

    settings: TrainConfig | SftConfig
    kind: Literal["train", "sft", "pretrain-critic"]
    run_dir: Path
    models: Mapping[str, SavedModel]
    run_id: str


def run_id_of(resumed: Resumed | None) -> str:
    """That of a run that goes on from a checkpoint; of a new one a new one."""
    return resumed.manifest.run_id if resumed is not None else secrets.token_hex(8)


class StateSaver:
    """Saves of a run in one place, one after the other. All methods are collective, its making included. place: has
    the folder of checkpoints, of which `keep` stay; in_memory: it is host memory, of which some is left free."""

    def __init__(self, run: SavedRun, place: Path, keep: RetentionConfig, in_memory: bool = False) -> None:
        self._run, self._place, self._keep, self._in_memory = run, place, keep, in_memory
        self._running: BackgroundSave | None = None
        self._unopened: Problem | None = None
        self._nodes = Nodes.of(place)
        self._models = {key: ModelSaver(saved.model) for key, saved in run.models.items()}
        # Threads of saves meet in here, undisturbed by what training sends.
        self._group = dist.new_group(timeout=world_timeout(), backend="gloo")

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._running is not None and self._running.is_busy

    @property
    def has_failed(self) -> bool:
        """Whether it is known on this rank that the last save failed."""
        return self._unopened is not None or (self._running is not None and self._running.has_failed)

    def begin(self, snapshot: Snapshot, making_room: Callable[[], AbstractContextManager[None]]) -> None:
        """Copy what is saved and begin to write it; finish() has ended the save before. making_room: entered while
        tensors are gathered, which takes memory of the device."""
        run, name, rank = self._run, snapshot.name, dist.get_rank()
        opened = on_rank_zero(partial(self._open, name))
        if isinstance(opened, Problem):
            self._unopened = opened
            return
        folder = self._place / CHECKPOINT_FOLDER / opened
        if self._nodes.count > 1:
            with suppress(OSError):  # writing will say so
                self._make_parts(folder)
        with making_room():
            plans = {}
            for key, saved in run.models.items():
                onloaded = saved.model.onloaded
                plans[key] = self._models[key].plan(folder / key)
                saved.model.onload_only(*onloaded)
            writers: list[Callable[[Path], None]] = [partial(_write_generators, rank, rng_state())]
            if rank == 0:
                writers += self._rank_zero_writers(snapshot)
        if self._in_memory:
            copies = 1 if self._nodes.count == 1 else 2
            needed = sum(plan.bytes for plan in plans.values()) * len(self._nodes.own) * copies
            writers.insert(0, partial(_check_room, needed))
        manifest = Manifest(
            checkpoint_id=secrets.token_hex(8),
            run_id=run.run_id,
            step=snapshot.progress.step,
            kind=run.kind,
            models=tuple(run.models),
            world_size=dist.get_world_size(),
            layouts=layouts(run.models),
            metrics=_metrics_to_keep(snapshot.metrics, run.settings.checkpoint.keep.best),
            files={},
            record=dict(snapshot.record),
        )
        job = CheckpointJob(self._place, name, folder, plans, writers, manifest, self._keep, self._nodes)
        self._running = BackgroundSave(job, self._group)

    def finish(self) -> Outcome | Problem | None:
        """Wait for the save that is under way, if there is one: how it ended, or why it failed."""
        running, self._running = self._running, None
        problem, self._unopened = self._unopened, None
        if running is None:
            return problem
        outcome = running.wait()
        return outcome.problem or outcome

    def _open(self, name: CheckpointName) -> str | Problem:
        """The name of the folder that a checkpoint is written into."""
        try:
            folder = open_checkpoint(self._place, name)
            self._make_parts(folder)
            return folder.name
        except OSError as error:
            return Problem.of(error)

    def _make_parts(self, folder: Path) -> None:
        for part in ("ranks", *self._run.models):
            (folder / part).mkdir(parents=True, exist_ok=True)

    def _rank_zero_writers(self, snapshot: Snapshot) -> list[Callable[[Path], None]]:
        run = self._run
        copies = {name: path.read_bytes() for name in RUN_FILES if (path := run.run_dir / name).is_file()}

        def write_small(folder: Path) -> None:
            dump_config(run.settings, folder / "config.yaml")
            write_json(folder / PROGRESS_FILE, snapshot.progress.model_dump(mode="json"))
            for name, content in snapshot.contents.items():
                if content:
                    with atomic_write(folder / name, "wb") as file:
                        file.write(content)
            for name, content in copies.items():
                (folder / name).write_bytes(content)
                sync(folder / name)

        def write_cards(folder: Path) -> None:
            for key, saved in run.models.items():
                model = saved.model
                dtype = str(model.dtype).removeprefix("torch.")
                base = None if model.adapter is None else base_identity(saved.source_dir)
                write_model_card(folder / key, model.spec, model.head, saved.source_dir, dtype, base)

        return [write_small, write_cards]


def _metrics_to_keep(metrics: Mapping[str, float], best: str | None) -> dict[str, float]:
    """Those of evaluations, and the one that says which checkpoint is the best; numbers alone can be compared."""
    return {
        name: value
        for name, value in metrics.items()
        if (name.startswith(EVALUATION) or name == best) and math.isfinite(value)
    }


def _check_room(needed: int, folder: Path) -> None:
    if min(shutil.disk_usage(folder).free, psutil.virtual_memory().available) < needed + _ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_generators(rank: int, state: dict[str, Any], folder: Path) -> None:
    path = folder / "ranks" / f"{rank:05d}.pt"
    torch.save(state, path)
    sync(path)


# Of a parameter, saved: the main weight and both moments in fp32; float32 models save their weights twice so.
OPTIMIZER_BYTES = 12


def bytes_per_weight(dtype: str) -> int:
    """Bytes of one weight in a checkpoint."""
    return 2 if dtype == "bfloat16" else 4


def checkpoint_bytes(config: TrainConfig, parameters: Mapping[str, int]) -> int:
    """Bytes of one checkpoint: weights and optimizer of what is trained of actor and critic, counted by name
    (trained_parameters), and weights of a reference that is replaced."""
    width = bytes_per_weight(config.model.dtype)
    reference = parameters["actor"] * width if config.algorithm.saves_reference else 0
    return sum(parameters.values()) * (width + OPTIMIZER_BYTES) + reference


def trained_parameters(config: TrainConfig, specs: Mapping[str, ModelSpec]) -> dict[str, int]:
    """Parameters of actor and critic, by name, that are trained: all, or adapters and a critic's head."""
    return {
        name: adapter_parameter_count(spec, config.model.adapter, "value" if name == "critic" else "lm")
        if config.trainable(name).kind == "adapter"
        else spec.parameter_count()
        for name, spec in specs.items()
    }


def run_bytes(config: TrainConfig, specs: Mapping[str, ModelSpec]) -> int:
    """Bytes that the last export and the checkpoints take at least, the one being written too; specs: by model's
    name."""
    saves, trained = config.checkpoint, trained_parameters(config, specs)
    exported = sum(spec.parameter_count() for name, spec in specs.items() if name == "actor" or config.export.critic)
    checkpoints = saves.keep.last + 1 if saves.saves else 0
    return exported * bytes_per_weight(config.model.dtype) + checkpoints * checkpoint_bytes(config, trained)

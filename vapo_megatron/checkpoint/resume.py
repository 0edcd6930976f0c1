"""Going on from a checkpoint: it is proven whole while it is read, and then the run directory is put back to where the
checkpoint was saved."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.checkpoint.checkpoints import CheckpointName, remove_leftovers
from vapo_megatron.checkpoint.dist_saver import load_training_state
from vapo_megatron.checkpoint.manifest import (
    Manifest,
    check_contents,
    check_structure,
    needed_files,
    read_manifest,
)
from vapo_megatron.checkpoint.nodes import NodeCopy
from vapo_megatron.checkpoint.progress import GROUPS_FILE, Progress, read_progress
from vapo_megatron.checkpoint.recorded_rollouts import remove_unneeded
from vapo_megatron.checkpoint.verified_reader import refuse_together
from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.base import Section
from vapo_megatron.config.load import dump_config
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.megatron.rng import set_rng_state
from vapo_megatron.megatron.trainable import Trainable

# Files of the run directory that go along with a checkpoint, so that a resumed run has them as they were.
RUN_FILES = ("metrics.jsonl", "evaluation.json")
_STEP_FILE = re.compile(r"step_(\d+)[_.].*")


@dataclass(frozen=True)
class Start:
    """Where a run begins, and what outlives its ranks.

    Attributes:
        checkpoint: the saved state; None for a new run.
        finished: there is nothing to do.
        memory: where copies of the run's state are kept in host memory; None for none.
        home: socket of the process that keeps the engines; None where ranks do.
        copy: the saved state, where it is a copy of which each node holds a part.
    """

    checkpoint: Path | None = None
    finished: bool = False
    memory: Path | None = None
    home: Path | None = None
    copy: NodeCopy | None = None

    @property
    def is_copy(self) -> bool:
        """Whether the saved state is a copy in host memory."""
        return self.checkpoint is not None and self.memory is not None and self.checkpoint.is_relative_to(self.memory)


@dataclass(frozen=True)
class SavedModel:
    """A model of a run, and the Hugging Face directory that it started from."""

    model: Trainable
    source_dir: Path


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that is proven whole, but for the models, which are as they are loaded."""

    checkpoint: Path
    name: CheckpointName
    manifest: Manifest
    progress: Progress
    copy: NodeCopy | None = None

    def load(self, model: Trainable, name: str) -> None:
        """Collective: fill a prepared (or frozen) model.

        Raises:
            BadInput: on every rank, naming what is wrong with the checkpoint.
            TryAgain: likewise, with a copy: nobody can mend one, and the last checkpoint is there.
        """
        copy, own = self.copy, f"{name}/"
        if copy is not None:  # every byte was compared when it was found
            try:
                load_training_state(
                    model, self.checkpoint / name, {}, lambda files: copy.fetch(own + file for file in files)
                )
            except BadInput as error:
                raise TryAgain(str(error), shared=error.shared) from None
            return
        files = {path: facts for path, facts in self.manifest.files.items() if path.startswith(own) and facts.pieces}
        load_training_state(
            model, self.checkpoint / name, {path.removeprefix(own): facts for path, facts in files.items()}
        )

    @property
    def graded_groups(self) -> bytes:
        """Of groups that wait for the trainer (engines/stream.py); empty where there are none."""
        return (self.checkpoint / GROUPS_FILE).read_bytes() if GROUPS_FILE in self.manifest.files else b""

    def restore_generators(self, models: Mapping[str, SavedModel]) -> None:
        """This rank's random generators, where this rank holds what it held: at another layout they start afresh."""
        if dist.get_world_size() == self.manifest.world_size and layouts(models) == self.manifest.layouts:
            path = self.checkpoint / "ranks" / f"{dist.get_rank():05d}.pt"
            state: dict[str, Any] = torch.load(path, weights_only=True)
            set_rng_state(state)


def layouts(models: Mapping[str, SavedModel]) -> dict[str, str]:
    """How each model is cut over the ranks."""
    return {name: saved.model.config.layout.model_dump_json() for name, saved in models.items()}


def open_resumed(checkpoint: Path, copy: NodeCopy | None = None) -> Resumed:
    """Collective: read a checkpoint but for the models, and compare every byte with its manifest, each rank a share
    of the files. Resumed.load does so with the models.

    copy: what it is of a copy on several nodes, where all of that was done when it was found.

    Raises:
        BadInput: on every rank, naming what is wrong with the checkpoint.
    """
    name = CheckpointName.parse(checkpoint.name)
    assert name is not None
    if copy is not None:
        return Resumed(checkpoint, name, copy.manifest, read_progress(checkpoint, copy.manifest), copy)
    manifest = read_manifest(checkpoint)
    check_structure(checkpoint, manifest)
    rank, world = dist.get_rank(), dist.get_world_size()
    files = {path: facts for path, facts in needed_files(checkpoint, manifest).items() if not facts.pieces}
    by_size = sorted(files, key=lambda path: (files[path].bytes, path))
    wrong = check_contents(checkpoint, {path: files[path] for path in by_size[rank::world]})
    refuse_together(checkpoint, wrong)
    return Resumed(checkpoint, name, manifest, read_progress(checkpoint, manifest))


def restore_run_files(run_dir: Path, resumed: Resumed, settings: Section) -> None:
    """On rank 0: config.yaml is of this attempt, metrics and evaluation as they were at the checkpoint; what came
    later goes.

    Exported models stay: the same step writes the same ones again.
    """
    remove_leftovers(run_dir)
    dump_config(settings, run_dir / "config.yaml")
    for name in RUN_FILES:
        if name in resumed.manifest.files:
            with atomic_write(run_dir / name, "wb") as file:
                file.write((resumed.checkpoint / name).read_bytes())
        else:
            (run_dir / name).unlink(missing_ok=True)
    for folder in ("samples", "evaluation"):
        for path in (run_dir / folder).glob("step_*"):
            found = _STEP_FILE.fullmatch(path.name)
            if found is not None and int(found[1]) > resumed.progress.step:
                path.unlink()
    remove_unneeded(run_dir)

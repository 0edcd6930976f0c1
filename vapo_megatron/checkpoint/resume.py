"""Resuming from a checkpoint: its config is compared, its files are verified and loaded, and the
run directory is reset to its state when the checkpoint was saved."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from pydantic import ValidationError

from vapo_megatron.checkpoint.checkpoints import CheckpointName, remove_leftovers
from vapo_megatron.checkpoint.dist_saver import load_training_state
from vapo_megatron.checkpoint.manifest import (
    Manifest,
    Progress,
    check_contents,
    check_structure,
    damaged,
    needed_files,
    read_manifest,
    read_progress,
)
from vapo_megatron.checkpoint.nodes import NodeCopy
from vapo_megatron.checkpoint.recorded_rollouts import remove_unneeded
from vapo_megatron.collectives import gather_values
from vapo_megatron.config.base import Section, differences
from vapo_megatron.config.load import dump_config
from vapo_megatron.errors import BadInput, TryAgain
from vapo_megatron.files import atomic_write, refusals_interrupt
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.megatron.training_state import set_rng_state

# Files of the run directory that go along with a checkpoint, so that a resumed run has them as they
# were.
RUN_FILES = ("metrics.jsonl", "evaluation.json")
_STEP_FILE = re.compile(r"step_(\d+)[_.].*")


@dataclass(frozen=True)
class Start:
    """Where a run begins, and what outlives its ranks: the saved state (None for a new run);
    whether nothing is left to do; where copies in host memory are kept; and the saved state as a
    copy of which each node holds a part."""

    checkpoint: Path | None = None
    finished: bool = False
    memory: Path | None = None
    copy: NodeCopy | None = None

    @property
    def is_copy(self) -> bool:
        """Whether the saved state is a copy in host memory."""
        return (
            self.checkpoint is not None
            and self.memory is not None
            and self.checkpoint.is_relative_to(self.memory)
        )


@dataclass(frozen=True)
class SavedModel:
    """A model of a run, and the Hugging Face directory that it started from."""

    model: Trainable
    source_dir: Path


@dataclass(frozen=True)
class Resumed:
    """A checkpoint whose files are verified."""

    checkpoint: Path
    name: CheckpointName
    manifest: Manifest
    progress: Progress
    copy: NodeCopy | None = None

    def load(self, model: Trainable, name: str) -> None:
        """Collective: fill a prepared (or frozen) model. Raises BadInput, on every rank, naming
        the checkpoint's fault; TryAgain with a copy: nobody can repair one, and the last checkpoint
        still exists."""
        copy = self.copy
        fetch = (
            (lambda files: copy.fetch(f"{name}/{file}" for file in files))
            if copy is not None
            else None
        )
        try:
            load_training_state(model, self.checkpoint / name, fetch)
        except BadInput as error:
            if copy is None:
                raise
            raise TryAgain(str(error), shared=error.shared) from None

    def read(self, name: str) -> bytes:
        """One of Snapshot.contents; empty where there is none."""
        if name in self.manifest.files:
            return (self.checkpoint / name).read_bytes()
        return b""

    def restore_generators(self, models: Mapping[str, SavedModel]) -> None:
        """Restore this rank's random generators if its layout is unchanged; at another layout they
        start afresh."""
        if (
            dist.get_world_size() == self.manifest.world_size
            and layouts(models) == self.manifest.layouts
        ):
            path = self.checkpoint / "ranks" / f"{dist.get_rank():05d}.pt"
            state: dict[str, Any] = torch.load(path, weights_only=True)
            set_rng_state(state)


def layouts(models: Mapping[str, SavedModel]) -> dict[str, str]:
    """How each model is sharded over the ranks."""
    return {name: saved.model.config.layout.model_dump_json() for name, saved in models.items()}


def open_resumed(checkpoint: Path, copy: NodeCopy | None = None) -> Resumed:
    """Collective: compare every byte of a checkpoint with its manifest, each rank a share of the
    files; a copy on several nodes was compared when it was found. Raises BadInput on every rank,
    naming the fault."""
    name = CheckpointName.parse(checkpoint.name)
    assert name is not None
    if copy is not None:
        return Resumed(
            checkpoint, name, copy.manifest, read_progress(checkpoint, copy.manifest), copy
        )
    manifest = read_manifest(checkpoint)
    check_structure(checkpoint, manifest)
    rank = dist.get_rank()
    world = dist.get_world_size()
    files = needed_files(checkpoint, manifest)
    by_size = sorted(files, key=lambda path: (files[path].bytes, path))
    faults = gather_values(
        check_contents(checkpoint, {path: files[path] for path in by_size[rank::world]})
    )
    if (fault := next(filter(None, faults), None)) is not None:
        error = damaged(checkpoint, fault)
        error.shared = True
        raise error
    return Resumed(checkpoint, name, manifest, read_progress(checkpoint, manifest))


@refusals_interrupt()
def restore_run_files(run_dir: Path, resumed: Resumed, settings: Section) -> None:
    """On rank 0: config.yaml is of this attempt, metrics and evaluation as they were at the
    checkpoint; what came later goes. Exported models stay: the same step writes the same ones
    again. Raises TryAgain, or OSError."""
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
            match = _STEP_FILE.fullmatch(path.name)
            if match is not None and int(match[1]) > resumed.progress.step:
                path.unlink()
    remove_unneeded(run_dir)


SectionT = TypeVar("SectionT", bound=Section)

# Keys that change length, place, speed or output of a run, but not its training data: layouts
# change only rounding. All other keys define the run.
_HARMLESS = (
    "preset",
    "run.name",
    "run.root",
    "run.steps",
    "run.overwrite",
    "run.resume",
    "run.allow_config_change",
    "run.profile",
    "robustness",
    "cluster",
    "evaluation",
    "data.eval",
    "data.steps",
    "data.epochs",
    "export",
    "monitoring",
    "checkpoint",
    "actor.layout",
    "actor.recompute",
    "actor.max_tokens_per_microbatch",
    "actor.share_prompts",
    "critic.layout",
    "critic.recompute",
    "critic.max_tokens_per_microbatch",
    "critic.share_prompts",
    "reference.layout",
    "rollout.num_engines",
    "rollout.tp",
    "rollout.max_running_requests",
    "rollout.max_total_tokens",
    "rollout.share_prompts",
    "rollout.sync",
    "rollout.mem_fraction_static",
    "rollout.start_timeout_s",
    "rollout.collect_timeout_s",
    "rollout.load_format",
    "rollout.context_length",
    "rollout.external_urls",
    "rollout.api_key_variable",
    "reward.workers",
    "reward.response_timeout_s",
    "reward.memory_mib",
)


def check_config_change(now: SectionT, checkpoint: Path, allowed: Sequence[str]) -> None:
    """Raises BadInput, naming every such key, where the config is not the one that a checkpoint was
    saved with.
    allowed: keys, or sections, in which a change is meant (run.allow_config_change)."""
    path = checkpoint / "config.yaml"
    try:
        before = type(now).model_validate(
            OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}: continue with the "
            "version of vapo_megatron that saved it"
        ) from None
    changes = differences(before.model_dump(mode="json"), now.model_dump(mode="json"))
    changed = [
        (key, old, new) for key, old, new in changes if not _within(key, (*_HARMLESS, *allowed))
    ]
    if changed:
        reason = "; ".join(
            f"{key}={new}: the run was saved with {old}" for key, old, new in changed
        )
        it = "it" if len(changed) == 1 else "them"
        keys = ",".join(key for key, _, _ in changed)
        raise BadInput(
            f"{reason} ({checkpoint}); set {it} back, start another run, or allow {it} by "
            f"run.allow_config_change=[{keys}]"
        )


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)

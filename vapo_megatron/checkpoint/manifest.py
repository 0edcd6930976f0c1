"""The manifest of a checkpoint, with size and digest of each file so that a damaged file can be
named; and the progress of the run."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from vapo_megatron.checkpoint.checkpoints import CHECKPOINT_HELP, CheckpointName, list_checkpoints
from vapo_megatron.config.base import Section
from vapo_megatron.errors import BadInput
from vapo_megatron.files import parse_json

MANIFEST_FILE = "manifest.json"
FORMAT = 3
# Of a parameter, saved: the main weight and both moments in fp32; float32 models save their weights
# twice so.
OPTIMIZER_BYTES = 12


class Damaged(BadInput):
    """A checkpoint differs from what its manifest says was saved."""


class FileFacts(Section):
    """A file of a checkpoint."""

    bytes: int = Field(ge=0, description="size")
    sha256: str = Field(description="hexadecimal digest of the content")


class Manifest(Section):
    """The files of a checkpoint, and the run that they belong to."""

    checkpoint_id: str = Field(description="of this checkpoint alone")
    run_id: str = Field(description="of the run, the same over all its lives")
    step: int = Field(ge=0, description="steps done when it was saved")
    format: int = Field(FORMAT, description="of the checkpoint; another one is refused")
    kind: Literal["train", "sft", "pretrain-critic"] = Field(description="command that saved it")
    models: tuple[str, ...] = Field(description="folders of the checkpoint that hold models")
    world_size: int = Field(ge=1, description="ranks that saved it")
    layouts: dict[str, str] = Field(description="how each model was cut over them")
    seconds: float = Field(0.0, ge=0, description="what saving took")
    metrics: dict[str, float] = Field(
        description="metrics of the step: evaluations, and the metric of checkpoint.keep.best"
    )
    files: dict[str, FileFacts] = Field(
        description="every file but the manifest, by its path in the checkpoint"
    )
    record: dict[str, FileFacts] = Field(
        default_factory=dict,
        description=(
            "rollouts of value pretraining that a resume needs, by path in the run directory"
        ),
    )


class DigestedFile:
    """A new file whose size and digest are known once it is written, without reading it again. As
    much of a binary stream as torch.save writes into: bytes go to its end alone. Use as a context
    manager. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.tell = self._file.tell
        self.flush = self._file.flush

    def write(self, data: Any) -> int:
        """Append bytes, or what has their buffer."""
        self._digest.update(data)
        return self._file.write(data)

    def finish(self) -> FileFacts:
        """Close the file once it is on the disk; its size and digest."""
        self.flush()
        os.fsync(self._file.fileno())
        return FileFacts(bytes=self.tell(), sha256=self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def file_facts(root: Path, paths: Iterable[Path]) -> dict[str, FileFacts]:
    """Size and digest of files below root, by their path from there. Raises OSError where one
    cannot be read."""
    return {path.relative_to(root).as_posix(): _facts_of(path) for path in paths}


def _facts_of(path: Path) -> FileFacts:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return FileFacts(bytes=size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a committed checkpoint. Raises BadInput where it is missing, unreadable or of
    a newer format."""
    path = checkpoint / MANIFEST_FILE
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise BadInput(
                f"{path}: format {content['format']!r}, this version reads format {FORMAT}: "
                "continue with the version of vapo_megatron that saved it"
            )
        return Manifest.model_validate(content)
    except FileNotFoundError:
        raise damaged(checkpoint, f"{MANIFEST_FILE} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise damaged(
            checkpoint, f"{MANIFEST_FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    except (OSError, ValueError) as error:
        raise damaged(
            checkpoint, f"{MANIFEST_FILE} cannot be read ({' '.join(str(error).split())})"
        ) from None


def readable_manifests(run_dir: Path) -> dict[CheckpointName, Manifest]:
    """The manifests of a run's checkpoints, oldest first, except damaged ones, which a resume will
    name."""
    manifests = {}
    for name, path in list_checkpoints(run_dir).items():
        with suppress(BadInput):
            manifests[name] = read_manifest(path)
    return manifests


def needed_files(checkpoint: Path, manifest: Manifest) -> dict[Path, FileFacts]:
    """The files of a checkpoint with their paths: its own, and those it needs of the run
    directory."""
    files = {checkpoint / name: facts for name, facts in manifest.files.items()}
    return files | {checkpoint.parents[1] / name: facts for name, facts in manifest.record.items()}


def check_structure(checkpoint: Path, manifest: Manifest) -> None:
    """Raises BadInput where a file is missing, cut short or not of the manifest, or where the
    folder's name gives another step."""
    named = CheckpointName.parse(checkpoint.name)
    if named is not None and named.step != manifest.step:
        raise damaged(
            checkpoint, f"the folder's name says step {named.step}, its manifest {manifest.step}"
        )
    known = {*manifest.files, MANIFEST_FILE}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name not in known and not path.name.startswith(".nfs"):
            raise damaged(checkpoint, f"its manifest does not know {name}, which would be loaded")
    for path, facts in needed_files(checkpoint, manifest).items():
        try:
            size = path.stat().st_size
        except OSError:
            raise damaged(checkpoint, f"{_shown(path, checkpoint)} is missing") from None
        if size != facts.bytes:
            raise damaged(
                checkpoint,
                f"{_shown(path, checkpoint)} has {size} bytes, its manifest says {facts.bytes}",
            )


def check_contents(checkpoint: Path, files: Mapping[Path, FileFacts]) -> str | None:
    """The fault of the first file that differs from its digest; None if none does."""
    for path, facts in files.items():
        name = _shown(path, checkpoint)
        try:
            actual = _facts_of(path)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if actual != facts:
            return (
                f"the content of {name} has changed since it was saved (sha256 "
                f"{actual.sha256[:12]}…, the manifest says {facts.sha256[:12]}…)"
            )
    return None


def check_model(folder: Path) -> None:
    """Raises BadInput where a file of a model in a run's checkpoint has changed since it was
    saved."""
    checkpoint = folder.parent
    if not (checkpoint / MANIFEST_FILE).is_file():
        return
    files = read_manifest(checkpoint).files.items()
    own = {checkpoint / name: facts for name, facts in files if name.startswith(f"{folder.name}/")}
    if (fault := check_contents(checkpoint, own)) is not None:
        raise damaged(checkpoint, fault)


def _shown(path: Path, checkpoint: Path) -> str:
    """A file as messages about a checkpoint name it."""
    if path.is_relative_to(checkpoint):
        return path.relative_to(checkpoint).as_posix()
    return str(path)


def damaged(checkpoint: Path, fault: str) -> "Damaged":
    """The error for a checkpoint that must not be loaded."""
    return Damaged(f"{checkpoint}: {fault}: the checkpoint is damaged; {CHECKPOINT_HELP}")


PROGRESS_FILE = "progress.json"
# Groups that were graded and not trained yet.
GROUPS_FILE = "graded_groups.safetensors"


class PretrainingProgress(Section):
    """Progress of value pretraining."""

    iterations: int = Field(0, ge=0, description="rollouts recorded")
    updates: int = Field(0, ge=0, description="critic updates of the replay that are made")
    finished: bool = Field(False, description="the critic is as good as it is to be")

    @property
    def count(self) -> int:
        """Grows with every bit of progress."""
        return self.iterations + self.updates


class Progress(Section):
    """Progress of a run. sft has no engines, prompts or value pretraining, but demonstrations."""

    step: int = Field(ge=0, description="steps done")
    pretraining: PretrainingProgress = PretrainingProgress()
    prompts: dict[str, Any] = Field(default_factory=dict, description="PromptSource.state()")
    groups: dict[str, Any] = Field(
        default_factory=dict, description="Ledger.state(), of a run that works ahead"
    )
    demonstrations: str | None = Field(None, description="fingerprint of sft's data")
    weight_version: int = Field(
        0, description="weight syncs to the engines; samples are marked with it"
    )
    updates: dict[str, Any] = Field(default_factory=dict, description="SkippedUpdates.state()")
    returns: list[Any] = Field(
        default_factory=list, description="ReturnHistory.state(), of calibrated values"
    )
    probe: list[list[int]] = Field(
        default_factory=list, description="sequences on which engines are compared next"
    )


def read_progress(checkpoint: Path, manifest: Manifest) -> Progress:
    """Progress of the run when a checkpoint was saved. Raises BadInput if its file is missing or
    damaged."""
    path = checkpoint / PROGRESS_FILE
    facts = manifest.files.get(PROGRESS_FILE)
    if facts is not None:
        wrong = check_contents(checkpoint, {path: facts})
    else:
        wrong = f"its manifest knows no {PROGRESS_FILE}"
    if wrong is not None:
        raise damaged(checkpoint, wrong)
    try:
        return Progress.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except (ValidationError, ValueError) as error:
        raise damaged(
            checkpoint, f"{PROGRESS_FILE} cannot be read ({' '.join(str(error).split())[:200]})"
        ) from None

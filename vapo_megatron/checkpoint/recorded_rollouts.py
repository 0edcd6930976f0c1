"""The rollouts that value pretraining records: immutable files, of which only requested parts are
read into memory.

At 32B scale a record has some 10^9 tokens, too many for every rank to hold. Each recorded rollout
is one file in the run directory, written once by rank 0. Every rank maps it: all ranks of a node
share its pages in the page cache, and the kernel drops them when memory is short. Only a few
numbers per sample are held in memory. Saved checkpoints name the files and their digests
(checkpoint/manifest.py) and hold no copy.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vapo_megatron.checkpoint.checkpoints import RECORD_FOLDER, list_checkpoints
from vapo_megatron.checkpoint.host_memory import host_memory_of
from vapo_megatron.checkpoint.manifest import FileFacts, read_manifest
from vapo_megatron.data.batch import OVER, ExperienceBatch, SampleTable
from vapo_megatron.errors import BadInput
from vapo_megatron.files import CannotWrite, atomic_write, cannot_write, sync

# On the disk: token and rollout log-prob.
BYTES_PER_TOKEN = 8
_OVER_TOKENS = (
    "tokens",
    "rollout_logprobs",
    "loss_mask",
    "segment_starts",
    "turn_rewards",
    "privileged_tokens",
)


class RecordedRollouts:
    """Recorded rollouts in the order in which they were recorded; groups of different rollouts stay
    apart.

    Attributes:
        files: size and digest of each, by its path from the run directory.
        table: the fields by samples, of all rollouts.
        prompt_ids: int64 [S], a digest of each sample's prompt, the same in every rollout.
    """

    def __init__(self, run_dir: Path, files: Mapping[str, FileFacts] | None = None) -> None:
        """files: written by an earlier attempt and complete. Raises as add() does."""
        self._run_dir = run_dir
        self.files: dict[str, FileFacts] = {}
        self._rollouts: list[ExperienceBatch] = []
        none = torch.zeros(0, dtype=torch.int64)
        # For each sample its rollout, and where it begins in the fields there.
        self._rollout = self.prompt_ids = none
        self._starts = {OVER[name]: none for name in _OVER_TOKENS}
        self.table = SampleTable(none, none, none.float(), none.bool(), none.bool(), none)
        for name, facts in sorted((files or {}).items()):
            self.add(name, facts)

    @property
    def next_name(self) -> str:
        """The file of the next rollout."""
        return f"{RECORD_FOLDER}/rollouts_{len(self.files):05d}.safetensors"

    def add(self, name: str, facts: FileFacts) -> None:
        """Append a rollout that write_rollout() wrote. Raises BadInput where it is missing or
        damaged, CannotWrite where the file system refuses to map it."""
        rollout = _mapped(self._run_dir / name)
        table = rollout.table()
        if self.files:
            table.group_ids += int(self.table.group_ids.max()) + 1
        self._rollout = torch.cat((self._rollout, torch.full((rollout.samples,), len(self.files))))
        self._starts = {
            over: torch.cat((s, rollout.bounds(over)[:-1])) for over, s in self._starts.items()
        }
        self.prompt_ids = torch.cat((self.prompt_ids, _prompt_ids(rollout)))
        self.table = self.table.followed_by(table)
        self.files[name] = facts
        self._rollouts.append(rollout)

    def tokens_of(self, samples: Tensor) -> dict[str, Tensor]:
        """A copy of the fields over tokens of some samples, int64 [n], in that order: those that
        any rollout has."""
        fields = {}
        for name in _OVER_TOKENS:
            starts = self._starts[OVER[name]]
            lengths = self.table.rows(OVER[name])
            held = [getattr(rollout, name) for rollout in self._rollouts]
            like = next((tensor for tensor in held if tensor is not None), None)
            if like is None:
                continue
            parts = [like[:0]]
            places = (samples, self._rollout[samples], starts[samples], lengths[samples])
            for sample, number, start, length in zip(
                *(place.tolist() for place in places), strict=True
            ):
                tensor = held[number]
                if tensor is not None:
                    parts.append(tensor[start : start + length])
                elif name == "loss_mask":
                    parts.append(torch.arange(length) >= self.table.prompt_lengths[sample])
                else:
                    parts.append(like.new_zeros(length))
            fields[name] = torch.cat(parts)
        return fields


def _prompt_ids(rollout: ExperienceBatch) -> Tensor:
    starts = rollout.cu_seqlens[:-1].tolist()
    lengths = rollout.prompt_lengths.tolist()
    prompts = (
        rollout.tokens[start : start + length]
        for start, length in zip(starts, lengths, strict=True)
    )
    digests = [
        hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).digest() for prompt in prompts
    ]
    return torch.tensor(
        [int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64
    )


def write_rollout(batch: ExperienceBatch, path: Path) -> FileFacts:
    """On rank 0: write a rollout to a file, which is on the disk when this returns; its size and
    digest. Fields that phases fill in, and routed_experts, are left out. Raises CannotWrite if it
    cannot be written, tried twice."""
    content = save(batch.rollout_tensors())
    try:
        _write(path, content)
    except CannotWrite:
        _write(path, content)
    return FileFacts(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path, "wb") as file:
        file.write(content)
    try:
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from None


def remove_unneeded(run_dir: Path) -> None:
    """On rank 0, while nothing is being written or recorded: remove the files that no checkpoint or
    copy in host memory names. If a checkpoint cannot be read nothing is removed, since it may name
    any of them."""
    folder = run_dir / RECORD_FOLDER
    try:
        if not folder.is_dir():
            return
        needed = {
            run_dir / name
            for place in (run_dir, host_memory_of(run_dir))
            for checkpoint in list_checkpoints(place).values()
            for name in read_manifest(checkpoint).record
        }
        for path in folder.iterdir():
            if path not in needed:
                path.unlink()
        if not needed:
            folder.rmdir()
    except (BadInput, OSError):
        return


def _mapped(path: Path, tries: int = 2) -> ExperienceBatch:
    """A file as a batch: fields over tokens are mapped, the others read."""
    tensors: dict[str, Tensor] = {}
    try:
        # What the file system says: safe_open calls any refusal a missing file
        path.open("rb").close()
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensors[name] = file.get_tensor(name)
    except (FileNotFoundError, PermissionError, SafetensorError) as error:
        raise BadInput(
            f"{path}: cannot be read ({' '.join(str(error).split())}): every rank has to see the "
            "same run.root"
        ) from None
    except OSError as error:
        if tries > 1:
            return _mapped(path, tries - 1)
        raise CannotWrite(
            f"{path}: cannot be read ({error.strerror}), tried twice: mend that disk"
        ) from None
    fields: dict[str, Any] = {
        name: t if name in _OVER_TOKENS else t.clone() for name, t in tensors.items()
    }
    return ExperienceBatch(**fields)

"""The rollouts that value pretraining records: immutable files, of which only what is asked for comes into memory.

At 32B scale a record has some 10^9 tokens, more than every rank could hold. Each recorded rollout is one file below the
run directory, written once by rank 0. Every rank maps it: its pages are in the page cache once for all ranks of a node,
and the kernel lets go of them where memory is short. In memory are a few numbers a sample. Saved checkpoints name
the files and their digests (checkpoint/manifest.py) and hold no copy.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vapo_megatron.checkpoint.checkpoints import RECORD_FOLDER, list_checkpoints
from vapo_megatron.checkpoint.host_memory import host_memory_of
from vapo_megatron.checkpoint.manifest import FileFacts, read_manifest
from vapo_megatron.config.atomic import atomic_write, sync
from vapo_megatron.data.batch import ExperienceBatch, SampleTable
from vapo_megatron.errors import BadInput

# On the disk: token and rollout log-prob.
BYTES_PER_TOKEN = 8
_OVER_TOKENS = ("tokens", "rollout_logprobs", "loss_mask", "segment_starts", "turn_rewards")


class RecordedRollouts:
    """Recorded rollouts in the order in which they were recorded; groups of several rollouts stay apart. `files` has
    the size and digest of each by its path from the run directory, `table` what goes by samples, and prompt_ids, int64
    [S], is the same for samples of one prompt in whichever rollout: a digest of its tokens."""

    def __init__(self, run_dir: Path, files: Mapping[str, FileFacts] | None = None) -> None:
        """files: of an earlier attempt of the run, found whole. Raises BadInput where one cannot be mapped."""
        self._run_dir = run_dir
        self.files: dict[str, FileFacts] = {}
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._masks: list[Tensor | None] = []
        self._segment_starts: list[Tensor | None] = []
        self._turn_rewards: list[Tensor | None] = []
        none = torch.zeros(0, dtype=torch.int64)
        # Of each sample: its file, and where it and its response begin there.
        self._file = self._start = self._response_start = self.prompt_ids = none
        self.table = SampleTable(none, none, none.float(), none.bool(), none.bool(), none)
        for name, facts in sorted((files or {}).items()):
            self.add(name, facts)

    @property
    def next_name(self) -> str:
        """Of the next rollout's file."""
        return f"{RECORD_FOLDER}/rollouts_{len(self.files):05d}.safetensors"

    def add(self, name: str, facts: FileFacts) -> None:
        """Append a rollout that write_rollout() wrote. Raises BadInput where it cannot be mapped."""
        rollout = _mapped(self._run_dir / name)
        table = rollout.table()
        if self.files:
            table.group_ids += int(self.table.group_ids.max()) + 1
        file = torch.full((rollout.samples,), len(self.files), dtype=torch.int64)
        self.files[name] = facts
        self._tokens.append(rollout.tokens)
        self._logprobs.append(rollout.rollout_logprobs)
        self._masks.append(rollout.loss_mask)
        self._segment_starts.append(rollout.segment_starts)
        self._turn_rewards.append(rollout.turn_rewards)
        self._file = torch.cat((self._file, file))
        self._start = torch.cat((self._start, rollout.cu_seqlens[:-1]))
        self._response_start = torch.cat((self._response_start, rollout.response_cu_seqlens[:-1]))
        self.prompt_ids = torch.cat((self.prompt_ids, _prompt_ids(rollout)))
        self.table = self.table.followed_by(table)

    def tokens_of(self, samples: Tensor) -> dict[str, Tensor]:
        """Tokens, rollout log-probs and, where any has them, the loss mask and the rewards of turns: a copy."""
        responses, lengths, files = (
            self.table.response_lengths[samples],
            self.table.lengths[samples],
            self._file[samples],
        )
        tensors = {
            "tokens": _joined(self._tokens, files, self._start[samples], lengths),
            "rollout_logprobs": _joined(self._logprobs, files, self._response_start[samples], responses),
        }
        if self.table.observation_lengths is not None:
            rows = zip(samples.tolist(), files.tolist(), self._start[samples].tolist(), lengths.tolist(), strict=True)
            masks = [self._mask(*row) for row in rows]
            tensors["loss_mask"] = torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
        for name, held, starts, counts in (
            ("segment_starts", self._segment_starts, self._start, lengths),
            ("turn_rewards", self._turn_rewards, self._response_start, responses),
        ):
            if (like := next((tensor for tensor in held if tensor is not None), None)) is not None:
                stretches = zip(files.tolist(), starts[samples].tolist(), counts.tolist(), strict=True)
                sources = ((held[file], start, length) for file, start, length in stretches)
                parts = [like.new_zeros(n) if of is None else of[start : start + n] for of, start, n in sources]
                tensors[name] = torch.cat([like[:0], *parts])
        return tensors

    def _mask(self, sample: int, file: int, start: int, length: int) -> Tensor:
        mask = self._masks[file]
        if mask is not None:
            return mask[start : start + length]
        return torch.arange(length) >= self.table.prompt_lengths[sample]


def _joined(sources: Sequence[Tensor], files: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """A copy of one stretch after another; files, starts and lengths int64 [S] say where each lies."""
    stretches = zip(files.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    return torch.cat([sources[0][:0], *(sources[file][start : start + length] for file, start, length in stretches)])


def _prompt_ids(rollout: ExperienceBatch) -> Tensor:
    starts, lengths = rollout.cu_seqlens[:-1].tolist(), rollout.prompt_lengths.tolist()
    prompts = (rollout.tokens[start : start + length] for start, length in zip(starts, lengths, strict=True))
    digests = [hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).digest() for prompt in prompts]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.int64)


def write_rollout(batch: ExperienceBatch, path: Path) -> FileFacts:
    """On rank 0: a rollout as a file, whole and on the disk when this returns; its size and digest. What phases fill in
    and routed_experts are left out. Raises BadInput where it cannot be written."""
    content = save(batch.rollout_tensors())
    with atomic_write(path, "wb") as file:
        file.write(content)
    try:
        sync(path.parent)
    except OSError as error:
        raise BadInput(f"{path.parent}: cannot be synced ({error.strerror}): check that disk") from None
    return FileFacts(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def remove_unneeded(run_dir: Path) -> None:
    """On rank 0, while nothing is being written or recorded: remove the files that no checkpoint names, nor copy in
    host memory. Nothing goes where a checkpoint cannot be read: it may name any of them."""
    folder = run_dir / RECORD_FOLDER
    if not folder.is_dir():
        return
    try:
        needed = {
            run_dir / name
            for place in (run_dir, host_memory_of(run_dir))
            for checkpoint in list_checkpoints(place).values()
            for name in read_manifest(checkpoint).record
        }
    except BadInput:
        return
    with suppress(OSError):
        for path in folder.iterdir():
            if path not in needed:
                path.unlink()
        if not needed:
            folder.rmdir()


def _mapped(path: Path) -> ExperienceBatch:
    """A file as a batch: what is large is mapped, the rest read."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensors[name] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise BadInput(
            f"{path}: cannot be read ({' '.join(str(error).split())}): every rank has to see the same run.root"
        ) from None
    fields: dict[str, Any] = {name: t if name in _OVER_TOKENS else t.clone() for name, t in tensors.items()}
    return ExperienceBatch(**fields)

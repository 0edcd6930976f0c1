"""Between Hugging Face directories and torch_dist checkpoints, in streams: memory of one file, not of the model.

Both directions write into a WorkFolder: an interrupted conversion goes on from its finished files, and the output has
its name only once it is whole and verified.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vapo_megatron.config.atomic import follow_umask
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.bucket import batches
from vapo_megatron.weights.hf_card import (
    CONFIG,
    carried_files,
    copy_carried,
    exported_config,
    shard_names,
    write_index,
    write_json,
)
from vapo_megatron.weights.hf_source import HFSource
from vapo_megatron.weights.mapping import Entry, entries
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.saved_keys import place_of
from vapo_megatron.weights.spec import Head, ModelSpec, read_spec
from vapo_megatron.weights.torch_dist import CONTENT_METADATA, read_model_card, write_model_card
from vapo_megatron.weights.torch_dist_files import METADATA_FILE, Digests, PartReader, PartWriter
from vapo_megatron.weights.verify import check_saved_model, compare_with_checkpoint, compare_with_hf
from vapo_megatron.weights.work_folder import WorkFolder

_VERSION = 1

Check = Callable[[Path], None]
"""Looks at the finished directory before it gets its name; raises where something is wrong."""

Advance = Callable[[int], None]
BeginStage = Callable[[str, int], Advance]
"""From the name of a stage and its bytes to a function that takes the number of bytes done."""


@dataclass(frozen=True)
class Converted:
    """What was made: parameters, bytes of their tensors, files of weights, how many of these an earlier start left; a
    line on layers that were left out."""

    parameters: int
    nbytes: int
    files: int
    resumed: int
    left_out: str = ""

    @property
    def described(self) -> str:
        """For the person who asked for it."""
        earlier = f" ({self.resumed} of them by an earlier start)" if self.resumed else ""
        size = f"{self.parameters:,} parameters, {self.nbytes / 2**30:.2f} GiB"
        left_out = f"\n{self.left_out}" if self.left_out else ""
        return f"{size} in {self.files} file{'s' if self.files > 1 else ''}{earlier}{left_out}"


def hf_to_megatron(
    hf_dir: Path,
    out: Path,
    progress: BeginStage,
    *,
    head: Head = "lm",
    value_outputs: int = 1,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 << 30,
    verify: bool = True,
    check: Check | None = None,
) -> Converted:
    """Write a torch_dist checkpoint, with its model card, that loads at any layout.

    Args:
        hf_dir: a language, reward or value model, see weights.load.load_hf; of one without a head of values a value
            model is made with a new one, of zeros.
        out: the directory to make.
        progress: for people.
        head: of the checkpoint.
        value_outputs: numbers that a value head gives, see ModelSpec.
        dtype: of the checkpoint; None keeps each tensor's.
        shard_bytes: bound on a file's tensors, and so on memory; a larger parameter has a file of its own.
        verify: read everything back and compare it, bit by bit.
        check: a further look at the result.

    Raises:
        BadInput: hf_dir cannot be used, out exists or cannot be written. Nothing is left.
        RunFailed: the verification found a difference. Nothing is left.
    """
    spec = read_spec(hf_dir, value_outputs=value_outputs)
    source = HFSource(hf_dir, spec, head, dtype)
    parts = _parts(spec, head, source.dtype, shard_bytes)
    request = _request("hf_to_megatron", hf_dir, sorted(hf_dir.glob("*.safetensors")), spec, head, dtype, shard_bytes)
    total = _total(spec, parts, source.dtype)
    with WorkFolder(out, request) as work:
        work.check_space(total)
        advance = progress("writing", total)
        layout = [[(place_of(entry, spec), source.dtype(entry)) for entry in part] for part in parts]
        writer = PartWriter(work.path, layout)
        resumed, notes = work.resumed, []
        for number, part in enumerate(parts):
            notes.append(_written_part(work, writer, number, part, source, advance))
        try:
            writer.close(notes, {"content_metadata": CONTENT_METADATA})
        except (OSError, RuntimeError) as error:
            raise work.refused(error) from None
        write_model_card(work.path, spec, head, hf_dir, _name(source.dtype(entries(spec, head)[0])))
        if verify:
            compare_with_hf(PartReader(work.path), source, progress("verifying", total))
        if check is not None:
            check(work.path)
    return Converted(spec.parameter_count(head), total, len(parts), resumed, source.left_out)


def _written_part(
    work: WorkFolder, writer: PartWriter, number: int, part: list[Entry], source: HFSource, advance: Advance
) -> list[dict[str, Any]]:
    """Write a part unless an earlier start did. Returns where its tensors are."""
    name = writer.file_name(number)
    note = work.note_of(name)
    if note is not None:
        for entry in part:
            advance(_nbytes(entry, source.spec, source.dtype(entry)))
        return note

    def tensor(index: int) -> Tensor:
        entry = part[index]
        advance(_nbytes(entry, source.spec, source.dtype(entry)))
        return source.parameter(entry).reshape(place_of(entry, source.spec).sizes)

    try:
        note = writer.write(number, tensor)
    except (OSError, RuntimeError) as error:
        raise work.refused(error) from None
    work.finish(name, note)
    return note


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    progress: BeginStage,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 << 30,
    verify: bool = True,
    check: Check | None = None,
    digests: Digests | None = None,
) -> Converted:
    """Write a Hugging Face directory that transformers and SGLang load, from a checkpoint saved at any layout.

    A language model becomes ...ForCausalLM, a value model ...ForTokenClassification with a label for each of its
    numbers.

    Args:
        checkpoint: a saved model, with its card.
        out: the directory to make.
        progress: for people.
        dtype: of the tensors; None keeps each one's.
        shard_bytes: bound on a file, and so on memory.
        verify: read everything back and compare it, bit by bit.
        check: a further look at the result.
        digests: what the checkpoint's files were saved as, where that is known.

    Raises:
        BadInput: checkpoint cannot be used, out exists or cannot be written. Nothing is left.
        RunFailed: the verification found a difference. Nothing is left.
    """
    card = read_model_card(checkpoint)
    if card.base is not None:
        raise BadInput(
            f"{checkpoint}: holds adapters and not the weights that they adapt: take the merged model that the run has "
            "exported, in hf/ of its directory, or resume it with export.every=1"
        )
    spec, head = replace(card.spec, vocab_divisible_by=1), card.head
    config = read_config(card.hf_dir)
    reader = PartReader(checkpoint, digests)
    check_saved_model(reader, spec, head)

    def dtype_of(entry: Entry) -> torch.dtype:
        return entry.rule.cast(dtype, reader.dtype(place_of(entry, spec).key))

    parts = _parts(spec, head, dtype_of, shard_bytes)
    names = shard_names(len(parts))
    total = _total(spec, parts, dtype_of)
    request = _request("megatron_to_hf", checkpoint, [checkpoint / METADATA_FILE], spec, head, dtype, shard_bytes)
    with WorkFolder(out, request) as work:
        work.check_space(total)
        resumed = work.resumed
        advance = progress("writing", total)
        for name, part in zip(names, parts, strict=True):
            if work.note_of(name) is None:
                _write_shard(work, name, part, reader, spec, dtype)
                work.finish(name, True)
            advance(_total(spec, [part], dtype_of))
        try:
            write_index(work.path, [[name for entry in part for name in entry.hf] for part in parts], total)
            write_json(work.path / CONFIG, exported_config(config, spec, head, dtype_of(parts[0][0])))
            copy_carried(card.hf_dir, work.path, carried_files(head))
        except OSError as error:
            raise work.refused(error) from None
        if verify:
            compare_with_checkpoint(work.path, reader, spec, head, dtype, progress("verifying", total))
        if check is not None:
            check(work.path)
    return Converted(spec.parameter_count(head), total, len(parts), resumed)


def _write_shard(
    work: WorkFolder, name: str, part: list[Entry], reader: PartReader, spec: ModelSpec, dtype: torch.dtype | None
) -> None:
    tensors: dict[str, Tensor] = {}
    for entry in part:
        parameter = reader.read(place_of(entry, spec))
        for hf_name, tensor in zip(entry.hf, entry.rule.to_hf([parameter], spec), strict=True):
            # A copy also where the dtype is kept: two tensors of one parameter may share its memory.
            tensors[hf_name] = tensor.to(entry.rule.cast(dtype, tensor.dtype), copy=True)
    try:
        save_file(tensors, work.path / name, metadata={"format": "pt"})
        follow_umask(work.path / name)
    except (SafetensorError, OSError) as error:
        raise work.refused(error) from None


def _parts(spec: ModelSpec, head: Head, dtype: Callable[[Entry], torch.dtype], shard_bytes: int) -> list[list[Entry]]:
    """The entries of each file."""
    return list(batches(entries(spec, head), lambda entry: _nbytes(entry, spec, dtype(entry)), shard_bytes))


def _nbytes(entry: Entry, spec: ModelSpec, dtype: torch.dtype) -> int:
    return entry.rule.count(spec) * dtype.itemsize


def _total(spec: ModelSpec, parts: Sequence[list[Entry]], dtype: Callable[[Entry], torch.dtype]) -> int:
    return sum(_nbytes(entry, spec, dtype(entry)) for part in parts for entry in part)


def _request(
    kind: str, source: Path, files: list[Path], spec: ModelSpec, head: Head, dtype: torch.dtype | None, shard_bytes: int
) -> dict[str, Any]:
    """All that decides what the files of a conversion hold; a changed source is another one."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return {
        "version": _VERSION,
        "kind": kind,
        "source": str(source.resolve()),
        "files": stats,
        "spec": repr(spec),
        "head": head,
        "dtype": None if dtype is None else _name(dtype),
        "shard_bytes": shard_bytes,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

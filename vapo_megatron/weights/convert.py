"""Between Hugging Face directories and torch_dist checkpoints, in streams: memory of one file, not of the model.

Both directions write into a WorkFolder: an interrupted conversion goes on from its finished files, and the output has
its name only once it is whole and equals what it was made from: every name, every shape, every bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vapo_megatron.config.atomic import follow_umask
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.weights.bucket import batches
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.hf_writer import (
    CONFIG,
    carried_files,
    copy_carried,
    exported_config,
    shard_names,
    write_index,
    write_json,
)
from vapo_megatron.weights.load import checked_names, left_out_layers, new_head, score_names
from vapo_megatron.weights.mapping import Entry, entries
from vapo_megatron.weights.model_files import read_config
from vapo_megatron.weights.rules import Vocabulary
from vapo_megatron.weights.spec import Head, ModelSpec, read_spec
from vapo_megatron.weights.torch_dist import CONTENT_METADATA, OPTIMIZER_PREFIX, read_model_card, write_model_card
from vapo_megatron.weights.torch_dist_files import METADATA_FILE, Digests, PartReader, PartWriter, place_of, places
from vapo_megatron.weights.work_folder import WorkFolder

_VERSION = 1

Check = Callable[[Path], None]
"""Looks at the finished directory before it gets its name; raises where something is wrong."""

Advance = Callable[[int], None]
BeginStage = Callable[[str, int], Advance]
"""From the name of a stage and its bytes to a function that takes the number of bytes done."""


@dataclass(frozen=True)
class Converted:
    """What was made. files: of weights; resumed: of these, left by an earlier start; left_out: layers, in one line."""

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
        hf_dir: a language, reward or value model (weights.load.load_hf); of a language model a value model is made with
            a new head, of zeros.
        out: the directory to make.
        progress: shows how far it is.
        head, value_outputs: of the checkpoint, see ModelSpec.
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
    work: WorkFolder, writer: PartWriter, number: int, part: list[Entry], source: "HFSource", advance: Advance
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

    Arguments and errors are those of hf_to_megatron, the other way round. A language model becomes ...ForCausalLM, a
    value model ...ForTokenClassification with a label for each of its numbers. digests: what the checkpoint's files
    were saved as, where that is known.
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


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HFSource:
    """Every parameter of a model, whole, from a directory whose names and shapes are checked on opening.

    Raises BadInput for what load_hf refuses and, where no dtype is asked for, tensors of one Megatron key that differ
    in theirs.
    """

    def __init__(self, hf_dir: Path, spec: ModelSpec, head: Head, dtype: torch.dtype | None) -> None:
        """dtype: of what comes out; None leaves each tensor as it is. A new value head has the spec's."""
        self.spec, self.head = spec, head
        self._tensors = HFTensors(hf_dir)
        value_head: Literal["new", "saved"] = "saved" if head == "value" and score_names(self._tensors) else "new"
        self._names = checked_names(self._tensors, spec, head, value_head)
        self.left_out = left_out_layers(self._tensors, spec)
        self._dtypes: dict[str, torch.dtype] = {}
        for entry in entries(spec, head):
            for kept in {entry.rule.cast(dtype, self._dtype(name)) for name in entry.hf}:
                key = place_of(entry, spec).key
                if self._dtypes.setdefault(key, kept) != kept:
                    raise BadInput(
                        f"{hf_dir}: tensor {entry.hf[0]} is {kept}, others like it are {self._dtypes[key]}, expected "
                        "one dtype: give --dtype"
                    )

    def _dtype(self, name: str) -> torch.dtype:
        if name not in self._names:
            return self.spec.torch_dtype
        return _DTYPES[self._tensors[self._names[name]].dtype]

    def dtype(self, entry: Entry) -> torch.dtype:
        """Of what parameter() and tensors() give."""
        return self._dtypes[place_of(entry, self.spec).key]

    def tensors(self, entry: Entry) -> list[Tensor]:
        """The entry's Hugging Face tensors, whole. A new head's are zeros."""
        shapes = entry.rule.hf_shapes(self.spec)
        tensors = []
        for name, shape in zip(entry.hf, shapes, strict=True):
            tensor = self._tensors[self._names[name]][:] if name in self._names else torch.zeros(shape)
            tensors.append(tensor.to(self.dtype(entry)))
        return tensors

    def parameter(self, entry: Entry) -> Tensor:
        """The entry's Megatron parameter, whole."""
        if entry.hf[0] not in self._names:
            return new_head(entry, self.spec, 0.0, 0).to(self.dtype(entry))
        sources = [self._tensors[self._names[name]] for name in entry.hf]
        return entry.rule.to_shard(sources, self.spec, 0, 1).to(self.dtype(entry))


def check_saved_model(reader: PartReader, spec: ModelSpec, head: Head) -> None:
    """Raises BadInput where a checkpoint's keys and shapes are not those of the model, its optimizer's aside.

    A vocabulary's table may be longer than the vocabulary: it is padded to suit the layout that it was saved at.
    """
    wanted = places(spec, head)
    expected = {place.key: place.full for place in wanted.values()}
    padded = {place.key for entry, place in wanted.items() if isinstance(entry.rule, Vocabulary)}
    saved = {key for key in reader.tensors if not key.startswith(OPTIMIZER_PREFIX)}
    missing = [key for key in expected if key not in saved]
    if missing:
        raise BadInput(
            f"{reader.folder}: key {missing[0]} is missing ({len(missing)} of {len(expected)} are), expected by "
            "model.json: copy or save the checkpoint again"
        )
    extra = sorted(saved - expected.keys())
    if extra:
        raise BadInput(
            f"{reader.folder}: key {extra[0]} is not known ({len(extra)} are not), expected only those of a "
            f"{spec.family} model (head {head}) and of its optimizer: model.json is not of this checkpoint"
        )
    for key, full in expected.items():
        shape = tuple(reader.tensors[key].size)
        longer = key in padded and shape[0] >= full[0] and shape[1:] == full[1:]
        if shape != full and not longer:
            raise BadInput(
                f"{reader.folder}: key {key} has shape {list(shape)}, expected {list(full)} by model.json; the two do "
                "not belong together"
            )


def compare_with_hf(reader: PartReader, source: "HFSource", advance: Advance) -> None:
    """Raises RunFailed where a checkpoint is not, bit by bit, what its Hugging Face directory has."""
    spec = source.spec
    check_saved_model(reader, spec, source.head)
    for entry in entries(spec, source.head):
        tensors = entry.rule.to_hf([reader.read(place_of(entry, spec))], spec)
        for name, saved, original in zip(entry.hf, tensors, source.tensors(entry), strict=True):
            _same(name, saved, original)
            advance(original.numel() * original.element_size())


def compare_with_checkpoint(
    hf_dir: Path, reader: PartReader, spec: ModelSpec, head: Head, dtype: torch.dtype | None, advance: Advance
) -> None:
    """Raises RunFailed where a Hugging Face directory is not, bit by bit, what its checkpoint has (in dtype)."""
    tensors = HFTensors(hf_dir)
    expected = {name for entry in entries(spec, head) for name in entry.hf}
    if tensors.names != expected:
        raise RunFailed(
            f"{hf_dir}: tensors {sorted(tensors.names ^ expected)[:3]} are in the model or in the files only"
        )
    for entry in entries(spec, head):
        saved = reader.read(place_of(entry, spec))
        written = entry.rule.to_shard([tensors[name] for name in entry.hf], spec, 0, 1)
        _same(entry.hf[0], written, saved.to(entry.rule.cast(dtype, saved.dtype)))
        advance(written.numel() * written.element_size())


def _same(name: str, written: Tensor, original: Tensor) -> None:
    same = written.dtype == original.dtype and written.shape == original.shape
    if not same or not torch.equal(_bits(written), _bits(original)):
        raise RunFailed(
            f"tensor {name}: what was written ({written.dtype}, {list(written.shape)}) differs from what it was made "
            f"of ({original.dtype}, {list(original.shape)}); nothing was kept: check the disk and convert again"
        )


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, in which a NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)

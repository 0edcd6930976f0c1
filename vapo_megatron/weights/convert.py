"""Streaming conversion between Hugging Face directories and torch_dist checkpoints, in the memory
of one file, not of the model.

Names, shapes and dtypes are checked before anything is written, and the output gets its name only
when it is complete.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from vapo_megatron.errors import BadInput
from vapo_megatron.files import cannot_write
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.registry import read_spec
from vapo_megatron.models.rules import Vocabulary
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.adapters import (
    adapter_entries,
    base_identity,
    is_finite,
    merged_weight,
    not_finite,
    read_peft,
    write_peft,
)
from vapo_megatron.weights.bucket import batches
from vapo_megatron.weights.carried import export_form, open_weights
from vapo_megatron.weights.hf_writer import (
    add_carried,
    carried_files,
    exported_config,
    hf_writer,
    new_directory,
)
from vapo_megatron.weights.load import checked_names, new_head, notes_on_files, score_names
from vapo_megatron.weights.mapping import Entry, by_tensors, entries
from vapo_megatron.weights.torch_dist import (
    CONTENT_METADATA,
    OPTIMIZER_PREFIX,
    ModelCard,
    read_model_card,
    write_model_card,
)
from vapo_megatron.weights.torch_dist_files import LazyTensor, PartReader, place_of, write_parts

Advance = Callable[[int], None]
BeginStage = Callable[[str, int], Advance]
"""From the name of a stage and its bytes to a function that takes the number of bytes done."""


@dataclass(frozen=True)
class Converted:
    """The result: parameters, their bytes, files of weights, and lines on what in the source's
    files is not as it was."""

    parameters: int
    nbytes: int
    files: int
    notes: Sequence[str] = ()

    @property
    def described(self) -> str:
        """A summary for the user."""
        size = f"{self.parameters:,} parameters, {self.nbytes / 2**30:.2f} GiB"
        files = f"{self.files} file{'s' if self.files > 1 else ''}"
        return "\n".join((f"{size} in {files}", *self.notes))


def hf_to_megatron(
    hf_dir: Path,
    out: Path,
    progress: BeginStage,
    *,
    head: Head = "lm",
    value_outputs: int = 1,
    adapter_dir: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 << 30,
) -> Converted:
    """Write a torch_dist checkpoint, with its model card, that loads at any layout.

    Args:
        hf_dir: a language, reward or value model (weights.load.load_hf); of a language model a
            value model is made with a new head, of zeros.
        out: the directory to make.
        progress: shows how far it is.
        head, value_outputs: of the checkpoint, see ModelSpec.
        adapter_dir: a PEFT directory of adapters of hf_dir, which the checkpoint then holds in
            place of the model.
        dtype: of the checkpoint; None keeps each tensor's.
        shard_bytes: bound on a file's tensors, and so on memory; a larger parameter has a file of
            its own.

    Raises:
        BadInput: hf_dir cannot be used, out exists or cannot be written. Nothing is left.
    """
    spec = read_spec(hf_dir, value_outputs=value_outputs, converting=True)
    adapters = None if adapter_dir is None else PeftSource(adapter_dir, spec, dtype)
    source = adapters or HFSource(hf_dir, spec, head, dtype)
    model = source.entries
    total = sum(map(source.nbytes, model))
    with new_directory(out, replace=False) as folder:
        advance = progress("writing", total)

        def parameter(entry: Entry) -> Tensor:
            advance(source.nbytes(entry))
            value = source.parameter(entry)
            if not is_finite(value):
                held = zip(entry.hf, source.tensors(entry), strict=True)
                name = next((name for name, tensor in held if not is_finite(tensor)), entry.hf[0])
                raise not_finite(hf_dir, name)
            return value

        parts = [
            [
                LazyTensor(place_of(entry, spec), source.dtype(entry), partial(parameter, entry))
                for entry in part
            ]
            for part in batches(model, source.nbytes, shard_bytes)
        ]
        try:
            write_parts(folder, parts, {"content_metadata": CONTENT_METADATA})
        except RuntimeError as error:
            raise cannot_write(out, error) from None
        base = None if adapters is None else (base_identity(hf_dir), adapters.config)
        write_model_card(
            folder, spec, head, hf_dir, str(source.dtype(model[0])).removeprefix("torch."), base
        )
    count = sum(entry.rule.count() for entry in model)
    return Converted(count, total, len(parts), source.notes)


def megatron_to_hf(
    checkpoint: Path,
    out: Path,
    progress: BeginStage,
    *,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 << 30,
) -> Converted:
    """Write a Hugging Face directory that transformers and SGLang load, from a checkpoint saved at
    any layout. Arguments and errors are as in hf_to_megatron, in the other direction. A language
    model becomes ...ForCausalLM, a value model ...ForTokenClassification with a label for each
    output. Adapters are merged into base, a Hugging Face directory of the weights that they adapt;
    without base the output is a PEFT directory."""
    card = read_model_card(checkpoint)
    card = replace(card, spec=replace(card.spec, vocab_divisible_by=1))
    reader = PartReader(checkpoint)
    check_saved_model(reader, card)
    spec = card.spec
    head = card.head

    tensors: _SavedTensors | _MergedTensors = _SavedTensors(reader, spec)
    if card.adapter is not None:
        trained: dict[str, Tensor] = {}
        for group in by_tensors(card.entries):
            trained |= zip(group[0].hf, tensors.whole(group), strict=True)
        if base is None:
            return _write_adapters(out, trained, card, dtype)
        if base_identity(base) != card.base:
            raise BadInput(
                f"--base {base}: its weights are not those that the adapters in {checkpoint} "
                "belong to"
            )
        scale = card.adapter.alpha / card.adapter.rank
        tensors = _MergedTensors(HFSource(base, spec, head, None), trained, scale)
    elif base is not None:
        raise BadInput(
            f"--base {base}: {checkpoint} holds a whole model and no adapters: leave it out"
        )

    def dtype_of(entry: Entry) -> torch.dtype:
        return entry.rule.cast(dtype, tensors.dtype(entry))

    model = entries(spec, head)
    total = sum(entry.rule.count() * dtype_of(entry).itemsize for entry in model)
    form = export_form(read_config(card.hf_dir), card.carried, spec, head)
    exported = exported_config(form, spec, head, dtype_of(model[0]))
    with hf_writer(
        out, exported, card.hf_dir, carried_files(head), shard_bytes, replace=False
    ) as writer:
        advance = progress("writing", total)
        for group in by_tensors(model):
            dtype_of_group = dtype_of(group[0])
            for name, tensor in zip(group[0].hf, tensors.whole(group), strict=True):
                writer.add(form.name(name), tensor.to(dtype_of_group))
                advance(tensor.numel() * dtype_of_group.itemsize)
        for name, shape in spec.empty_tensors().items():
            writer.add(name, torch.empty(shape, dtype=dtype_of(model[0])))
        add_carried(writer, form)
    notes = [form.left_out] if form.left_out else []
    return Converted(spec.parameter_count(head), total, writer.count, notes)


def _whole_tensors(group: list[Entry], reader: PartReader, spec: ModelSpec) -> list[Tensor]:
    """The Hugging Face tensors that entries fill together (mapping.by_tensors)."""
    first = group[0]
    place = place_of(first, spec)
    if first.rule.file_shapes() == first.rule.hf_shapes():
        return first.rule.to_hf([reader.read(place)])
    wholes = [
        torch.empty(shape, dtype=reader.dtype(place.key)) for shape in first.rule.file_shapes()
    ]
    for entry in group:
        shard = reader.read(place_of(entry, spec))
        entry.rule.place(shard, [entry.part(whole) for whole in wholes], 0, 1)
    return wholes


def _write_adapters(
    out: Path, tensors: dict[str, Tensor], card: ModelCard, dtype: torch.dtype | None
) -> Converted:
    assert card.adapter is not None
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    base = str(read_config(card.hf_dir).get("_name_or_path", ""))
    with new_directory(out, replace=False) as folder:
        write_peft(folder, tensors, card.adapter, card.spec, card.head, base)
    sizes = [(tensor.numel(), tensor.nbytes) for tensor in tensors.values()]
    return Converted(sum(count for count, _ in sizes), sum(nbytes for _, nbytes in sizes), 1)


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HFSource:
    """Whole parameters of a model from a directory, whose names and shapes are checked on opening.
    Raises BadInput as load_hf does and, if no dtype is given, where tensors of one Megatron key
    have different dtypes."""

    def __init__(
        self, hf_dir: Path, spec: ModelSpec, head: Head, dtype: torch.dtype | None
    ) -> None:
        """dtype: of the output; None keeps each tensor's. A new value head has the spec's."""
        self.spec = spec
        self.head = head
        self._tensors = open_weights(hf_dir, spec)
        value_head: Literal["new", "saved"] = (
            "saved" if head == "value" and score_names(self._tensors) else "new"
        )
        self._names = checked_names(self._tensors, spec, head, value_head)
        self.notes = notes_on_files(self._tensors, spec)
        self.entries = entries(spec, head)
        self._dtypes: dict[str, torch.dtype] = {}
        for entry in self.entries:
            for kept in {entry.rule.cast(dtype, self._dtype(name)) for name in entry.hf}:
                key = place_of(entry, spec).key
                if self._dtypes.setdefault(key, kept) != kept:
                    raise BadInput(
                        f"{hf_dir}: tensor {entry.hf[0]} is {kept}, others like it are "
                        f"{self._dtypes[key]}, expected one dtype: give --dtype"
                    )

    def _dtype(self, name: str) -> torch.dtype:
        if name not in self._names:
            return self.spec.torch_dtype
        return _DTYPES[self._tensors[self._names[name]].dtype]

    def dtype(self, entry: Entry) -> torch.dtype:
        """dtype of parameter()."""
        return self._dtypes[place_of(entry, self.spec).key]

    def nbytes(self, entry: Entry) -> int:
        """Bytes of a parameter."""
        return entry.rule.count() * self.dtype(entry).itemsize

    def tensors(self, entry: Entry) -> list[Tensor]:
        """The entry's Hugging Face tensors, whole, as in the files."""
        return [self._tensors[self._names[name]][:] for name in entry.hf]

    def parameter(self, entry: Entry) -> Tensor:
        """The entry's Megatron parameter, whole."""
        if entry.hf[0] not in self._names:
            return new_head(entry, 0.0, 0).to(self.dtype(entry))
        sources = [entry.part(self._tensors[self._names[name]]) for name in entry.hf]
        return entry.rule.to_shard(sources, 0, 1).to(self.dtype(entry))


class PeftSource(HFSource):
    """The adapters of a PEFT directory."""

    def __init__(self, folder: Path, spec: ModelSpec, dtype: torch.dtype | None) -> None:
        self.spec = spec
        self.notes: list[str] = []
        self.config, self._halves = read_peft(folder, spec)
        self.entries = adapter_entries(spec, self.config)
        self._cast = dtype

    @override
    def dtype(self, entry: Entry) -> torch.dtype:
        return self._cast or self._halves[entry.hf[0]].dtype

    @override
    def parameter(self, entry: Entry) -> Tensor:
        return entry.rule.to_shard([self._halves[name] for name in entry.hf], 0, 1).to(
            self.dtype(entry)
        )


def check_saved_model(reader: PartReader, card: ModelCard) -> None:
    """Raises BadInput where a checkpoint's keys and shapes, its optimizer's aside, are not
    the model's. The table of a vocabulary may be longer than the vocabulary, padded for the layout
    it was saved at."""
    expected_places = {entry: place_of(entry, card.spec) for entry in card.entries}
    expected = {place.key: place.full for place in expected_places.values()}
    padded = {
        place.key for entry, place in expected_places.items() if isinstance(entry.rule, Vocabulary)
    }
    saved = {key for key in reader.tensors if not key.startswith(OPTIMIZER_PREFIX)}
    missing = [key for key in expected if key not in saved]
    if missing:
        raise BadInput(
            f"{reader.folder}: key {missing[0]} is missing ({len(missing)} of {len(expected)} "
            "are), expected by model.json and hf/config.json: copy or save the checkpoint again"
        )
    extra = sorted(saved - expected.keys())
    if extra:
        raise BadInput(
            f"{reader.folder}: key {extra[0]} is not known ({len(extra)} are not), expected only "
            f"those of a {card.spec.family} model (head {card.head}) and of its optimizer: "
            "model.json is not of this checkpoint"
        )
    for key, full in expected.items():
        shape = tuple(reader.tensors[key].size)
        longer = key in padded and shape[0] >= full[0] and shape[1:] == full[1:]
        if shape != full and not longer:
            raise BadInput(
                f"{reader.folder}: key {key} has shape {list(shape)}, expected {list(full)} by "
                "hf/config.json; the two do not belong together"
            )


class _SavedTensors:
    """The tensors of a checkpoint, for entries of its model."""

    def __init__(self, reader: PartReader, spec: ModelSpec) -> None:
        self._reader = reader
        self._spec = spec

    def dtype(self, entry: Entry) -> torch.dtype:
        """In which an entry is saved."""
        return self._reader.dtype(place_of(entry, self._spec).key)

    def whole(self, group: list[Entry]) -> list[Tensor]:
        """The Hugging Face tensors that entries fill together (mapping.by_tensors)."""
        return _whole_tensors(group, self._reader, self._spec)


class _MergedTensors:
    """The tensors of a base model, adapters merged into those that they adapt."""

    def __init__(self, base: HFSource, trained: dict[str, Tensor], scale: float) -> None:
        """trained: what a checkpoint of adapters holds, by Hugging Face name; a head among it
        takes the place of the base's."""
        self._base = base
        self._trained = trained
        self._scale = scale

    def dtype(self, entry: Entry) -> torch.dtype:
        """In which the base has an entry."""
        return self._base.dtype(entry)

    def whole(self, group: list[Entry]) -> list[Tensor]:
        """The Hugging Face tensors that entries fill together (mapping.by_tensors)."""
        entry = group[0]
        if entry.hf[0] in self._trained:
            return [self._trained[name] for name in entry.hf]
        weights = zip(entry.hf, self._base.tensors(entry), strict=True)
        return [merged_weight(name, weight, self._trained, self._scale) for name, weight in weights]

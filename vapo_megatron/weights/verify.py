"""What was written against what it was made from: every name, every shape, every bit."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.hf_source import HFSource
from vapo_megatron.weights.mapping import entries
from vapo_megatron.weights.rules import Vocabulary
from vapo_megatron.weights.saved_keys import place_of, places
from vapo_megatron.weights.spec import Head, ModelSpec
from vapo_megatron.weights.torch_dist import OPTIMIZER_PREFIX
from vapo_megatron.weights.torch_dist_files import PartReader

Advance = Callable[[int], None]


def check_saved_model(reader: PartReader, spec: ModelSpec, head: Head) -> None:
    """Raises BadInput where a checkpoint's keys and shapes are not those of the model, its optimizer's aside.

    A vocabulary's table may be longer than the vocabulary: it is padded to suit the layout that it was saved at.
    """
    known = places(spec, head)
    expected = {place.key: place.full for place in known.values()}
    padded = {place.key for entry, place in known.items() if isinstance(entry.rule, Vocabulary)}
    there = {key for key in reader.tensors if not key.startswith(OPTIMIZER_PREFIX)}
    missing = [key for key in expected if key not in there]
    if missing:
        raise BadInput(
            f"{reader.folder}: key {missing[0]} is missing ({len(missing)} of {len(expected)} are), expected by "
            "model.json: copy or save the checkpoint again"
        )
    extra = sorted(there - expected.keys())
    if extra:
        raise BadInput(
            f"{reader.folder}: key {extra[0]} is not known ({len(extra)} are not), expected only those of a "
            f"{spec.family} model (head {head}) and of its optimizer: model.json is not of this checkpoint"
        )
    for key, full in expected.items():
        found = tuple(reader.tensors[key].size)
        longer = key in padded and found[0] >= full[0] and found[1:] == full[1:]
        if found != full and not longer:
            raise BadInput(
                f"{reader.folder}: key {key} has shape {list(found)}, expected {list(full)} by model.json; the two do "
                "not belong together"
            )


def compare_with_hf(reader: PartReader, source: HFSource, advance: Advance) -> None:
    """Raises RunFailed where a checkpoint is not, bit by bit, what its Hugging Face directory has."""
    spec = source.spec
    check_saved_model(reader, spec, source.head)
    for entry in entries(spec, source.head):
        found = entry.rule.to_hf([reader.read(place_of(entry, spec))], spec)
        for name, saved, original in zip(entry.hf, found, source.tensors(entry), strict=True):
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

"""Tensors of a model directory that are not trained, and that exports copy from it.

A vision-language directory has the language model's tensors under a prefix, the vision part's
beside them, and the language model's config.json as text_config. A model with sparse attention has
indexers, which choose all tokens of an input as short as it is trained with. An export of a policy
gets these tensors from the source directory, unchanged, if they are still the ones that the model
came with; otherwise it is the model without them.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from vapo_megatron.errors import BadInput
from vapo_megatron.models.registry import config_alone, language_config
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.hf_files import BlockTensor, FileTensor, HFTensors
from vapo_megatron.weights.mxfp4 import Mxfp4Tensor

_MODEL = "model."
_LANGUAGE = "model.language_model."
_VISION = ("model.visual.", "visual.")
_INDEXER = re.compile(r"(?P<indexer>model\.layers\.(?P<layer>\d+)\.self_attn\.indexer)\..+")
_INDEXER_PARTS = ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
# One tensor of a layer's experts; the name, and the names of one expert's tensors in its rows.
_STACKED = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class _ExpertRows(FileTensor):
    """Rows of one expert in a tensor of all experts, [experts, rows, columns]."""

    def __init__(
        self, whole: FileTensor | BlockTensor | Mxfp4Tensor, expert: int, start: int, rows: int
    ) -> None:
        self._whole = whole
        self._expert = expert
        self._start = start
        self.shape = (rows, whole.shape[2])
        self.dtype = whole.dtype

    @override
    def __getitem__(self, index: Any) -> Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.shape[0])
        inside = slice(self._start + start, self._start + max(start, stop))
        return self._whole[(self._expert, inside, *others)]


class LanguageTensors(HFTensors):
    """The tensors of a language model under the names that its family's rules have, whatever prefix
    the files give them and whether they have the experts of a layer in one tensor; without a
    vision part."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._sources: dict[str, tuple[str, int, int, int]] = {}
        for stored in super().names:
            if stored.startswith(_VISION):
                continue
            name = stored
            if stored.startswith(_LANGUAGE):
                name = _MODEL + stored.removeprefix(_LANGUAGE)
            stacked = _STACKED.fullmatch(name)
            if stacked is None:
                self._sources[name] = (stored, -1, 0, 0)
            else:
                self._unstack(stored, stacked["experts"], _PARTS[stacked["part"]])

    def _unstack(self, stored: str, experts: str, parts: tuple[str, ...]) -> None:
        shape = super().__getitem__(stored).shape
        if len(shape) != 3 or shape[1] % len(parts):
            raise BadInput(
                f"{self.directory}: tensor {stored} has shape {list(shape)}, expected [experts, "
                "rows, columns]: fetch it again"
            )
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            for place, part in enumerate(parts):
                name = f"{experts}.{expert}.{part}.weight"
                self._sources[name] = (stored, expert, place * rows, rows)

    @property
    @override
    def names(self) -> set[str]:
        return set(self._sources)

    @override
    def __getitem__(self, name: str) -> FileTensor | BlockTensor | Mxfp4Tensor:
        stored, expert, start, rows = self._sources[name]
        whole = super().__getitem__(stored)
        return whole if expert < 0 else _ExpertRows(whole, expert, start, rows)

    @override
    def check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._sources[name][0]
        if stored in self._scaled:
            self._check_scales(stored)
        self._check(self[name], self._places[stored], name, shape)


def _is_carried(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor of the files is not trained, and belongs to the model all the same."""
    if spec.nested and name.startswith(_VISION):
        return True
    indexer = _INDEXER.fullmatch(name) if spec.indexed else None
    # Layers after the last predict ahead, and are left out.
    return indexer is not None and int(indexer["layer"]) < spec.num_layers


class TrainedTensors(HFTensors):
    """The tensors of a directory without those that exports carry. Raises BadInput where a part of
    an indexer is missing, too."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        super().__init__(directory)
        self._spec = spec
        found = super().names
        carried = filter(None, map(_INDEXER.fullmatch, found))
        for indexer in sorted({match["indexer"] for match in carried}):
            for part in _INDEXER_PARTS:
                name = f"{indexer}.{part}"
                if name not in found:
                    raise BadInput(
                        f"{directory}: tensor {name} is missing, and others of this indexer are "
                        "there: fetch the model again"
                    )

    @property
    @override
    def names(self) -> set[str]:
        return {name for name in super().names if not _is_carried(name, self._spec)}


def open_weights(directory: Path, spec: ModelSpec) -> HFTensors:
    """The tensors of a directory under the names of the spec's rules. Raises BadInput as
    HFTensors."""
    if spec.nested:
        return LanguageTensors(directory)
    return TrainedTensors(directory, spec) if spec.indexed else HFTensors(directory)


class CarriedTensors(HFTensors):
    """The tensors of a directory that exports carry."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        super().__init__(directory)
        self._spec = spec

    @property
    @override
    def names(self) -> set[str]:
        return {name for name in super().names if _is_carried(name, self._spec)}

    @property
    def digest(self) -> str:
        """Of each tensor's name, shape and first row."""
        digest = hashlib.sha256()
        for name in sorted(self.names):
            tensor = self[name]
            digest.update(f"{name} {list(tensor.shape)}".encode())
            first = tensor[:1].float().contiguous()
            digest.update(first.numpy().tobytes())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class CarriedSource:
    """A directory with tensors that exports carry, and a digest by which they are recognised."""

    path: Path
    digest: str

    def found(self, spec: ModelSpec) -> CarriedTensors | None:
        """The tensors, or None where they are gone or others."""
        try:
            tensors = CarriedTensors(self.path, spec)
        except BadInput:
            return None
        return tensors if tensors.digest == self.digest else None


@cache
def carried_of(directory: Path, spec: ModelSpec) -> CarriedSource | None:
    """The tensors beside those that are trained; None where there are none."""
    if not (spec.nested or spec.indexed):
        return None
    try:
        tensors = CarriedTensors(directory, spec)
    except BadInput:
        return None
    return CarriedSource(directory.resolve(), tensors.digest) if tensors.names else None


@dataclass(frozen=True)
class ExportForm:
    """How a model is written.

    Attributes:
        config: what config.json follows from.
        carried: tensors written beside those that were trained; None: there are none.
        left_out: a line on tensors that are missing; empty where none is.
    """

    config: Mapping[str, Any]
    carried: CarriedTensors | None = None
    left_out: str = ""

    @property
    def is_nested(self) -> bool:
        """Whether it is the language model of a vision-language directory."""
        return "text_config" in self.config

    def name(self, name: str) -> str:
        """A tensor's name in the files."""
        if not self.is_nested or not name.startswith(_MODEL):
            return name
        return _LANGUAGE + name.removeprefix(_MODEL)


def export_form(
    config: Mapping[str, Any], source: CarriedSource | None, spec: ModelSpec, head: Head
) -> ExportForm:
    """The form of an export of a model whose source has this config.json. A value model never has
    a vision part."""
    language = language_config(config)
    alone = config_alone(config)
    is_nested = language.get("model_type") != config.get("model_type")
    if alone.get("model_type") == config.get("model_type") or (is_nested and head != "lm"):
        return ExportForm(alone)
    kind = "vision tensors" if is_nested else "indexers"
    without = (
        "the language model is exported alone"
        if is_nested
        else f"it is exported as {alone['model_type']}, which is the same up to "
        f"{spec.max_position_embeddings} tokens"
    )
    if source is None:
        return ExportForm(alone, left_out=f"the model came without {kind}: {without}")
    carried = source.found(spec)
    if carried is None:
        return ExportForm(
            alone,
            left_out=f"the {kind} of {source.path} are gone or others than those the model came "
            f"with: {without}",
        )
    return ExportForm(config, carried)

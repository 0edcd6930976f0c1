"""The language model of a vision-language directory: its names, and the vision
tensors that exports copy.

Such a directory has the language model's tensors under a prefix, the vision part's beside
them, and the language model's config.json as text_config. Only the language model is trained. An
export of a policy gets the vision tensors from the source directory, unchanged, if these are still
the ones that the model came with; otherwise it is the language model alone.
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
from vapo_megatron.models.registry import language_config
from vapo_megatron.models.spec import Head, ModelSpec
from vapo_megatron.weights.hf_files import BlockTensor, FileTensor, HFTensors
from vapo_megatron.weights.mxfp4 import Mxfp4Tensor

_MODEL = "model."
_LANGUAGE = "model.language_model."
_VISION = ("model.visual.", "visual.")
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
        self._check(self[name], self._places[self._sources[name][0]], name, shape)


def open_weights(directory: Path, spec: ModelSpec) -> HFTensors:
    """The tensors of a directory under the names of the spec's rules. Raises BadInput as
    HFTensors."""
    return LanguageTensors(directory) if spec.nested else HFTensors(directory)


@dataclass(frozen=True)
class VisionSource:
    """A directory with a vision part, and a digest by which its tensors are recognised."""

    path: Path
    digest: str

    def found(self) -> "VisionTensors | None":
        """The tensors, or None where they are gone or others."""
        try:
            tensors = VisionTensors(self.path)
        except BadInput:
            return None
        return tensors if tensors.digest == self.digest else None


class VisionTensors(HFTensors):
    """The vision part's tensors of a directory."""

    @property
    @override
    def names(self) -> set[str]:
        return {name for name in self._places if name.startswith(_VISION)}

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


@cache
def vision_of(directory: Path, nested: str) -> VisionSource | None:
    """The vision part beside a language model; None where there is none. nested: ModelSpec's."""
    if not nested:
        return None
    try:
        tensors = VisionTensors(directory)
    except BadInput:
        return None
    return VisionSource(directory.resolve(), tensors.digest) if tensors.names else None


@dataclass(frozen=True)
class ExportForm:
    """How a language model is written.

    Attributes:
        config: what config.json follows from.
        vision: tensors written beside it; None: it is written alone.
        left_out: a line on a vision part that is missing; empty where none is.
    """

    config: Mapping[str, Any]
    vision: VisionTensors | None = None
    left_out: str = ""

    def name(self, name: str) -> str:
        """A tensor's name in the files."""
        if self.vision is None or not name.startswith(_MODEL):
            return name
        return _LANGUAGE + name.removeprefix(_MODEL)


def export_form(config: Mapping[str, Any], source: VisionSource | None, head: Head) -> ExportForm:
    """The form of an export of a model whose source has this config.json. A value model is always
    the language model alone."""
    alone = language_config(config)
    if head != "lm" or alone.get("model_type") == config.get("model_type"):
        return ExportForm(alone)
    if source is None:
        left_out = "the model came without vision tensors: the language model is exported alone"
        return ExportForm(alone, left_out=left_out)
    vision = source.found()
    if vision is None:
        left_out = (
            f"the vision tensors of {source.path} are gone or others than those the model came "
            "with: the language model is exported alone"
        )
        return ExportForm(alone, left_out=left_out)
    return ExportForm(config, vision)

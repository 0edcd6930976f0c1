"""A Hugging Face directory as the source of a Megatron model, parameter by parameter."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vapo_megatron.errors import BadInput
from vapo_megatron.weights.hf_files import HFTensors
from vapo_megatron.weights.load import checked_names, left_out_layers, new_head, score_names
from vapo_megatron.weights.mapping import Entry, entries
from vapo_megatron.weights.saved_keys import place_of
from vapo_megatron.weights.spec import Head, ModelSpec

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HFSource:
    """Every parameter of a model, whole, from a directory whose names and shapes are checked on opening.

    Raises:
        BadInput: what weights.load.load_hf refuses; or, where no dtype is asked for, tensors of one Megatron key that
            differ in theirs.
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
            for found in {entry.rule.cast(dtype, self._dtype(name)) for name in entry.hf}:
                key = place_of(entry, spec).key
                if self._dtypes.setdefault(key, found) != found:
                    raise BadInput(
                        f"{hf_dir}: tensor {entry.hf[0]} is {found}, others like it are {self._dtypes[key]}, expected "
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
        found = []
        for name, shape in zip(entry.hf, shapes, strict=True):
            tensor = self._tensors[self._names[name]][:] if name in self._names else torch.zeros(shape)
            found.append(tensor.to(self.dtype(entry)))
        return found

    def parameter(self, entry: Entry) -> Tensor:
        """The entry's Megatron parameter, whole."""
        if entry.hf[0] not in self._names:
            return new_head(entry, self.spec, 0.0, 0).to(self.dtype(entry))
        sources = [self._tensors[self._names[name]] for name in entry.hf]
        return entry.rule.to_shard(sources, self.spec, 0, 1).to(self.dtype(entry))

"""The experts that an engine reports for each token, decoded and checked in its server instead of
on rank 0 for all engines."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.models.spec import ModelSpec


@dataclass(frozen=True)
class ExpertChoices:
    """The shape of a model's routing: layers, experts of a layer, and experts chosen per token.
    start: the first token of a request whose experts are wanted."""

    layers: int
    experts: int
    per_token: int
    start: int = 0

    @classmethod
    def of(cls, spec: ModelSpec) -> "ExpertChoices":
        """The shape for a model."""
        return cls(spec.num_layers, spec.num_experts, spec.experts_per_token)

    @property
    def dtype(self) -> type[np.uint8] | type[np.int16]:
        """The smallest type that holds the number of every expert."""
        return np.uint8 if self.experts <= 256 else np.int16

    def decode(self, flat: NDArray[Any] | None, rows: int) -> NDArray[Any]:
        """In a server: SGLang's experts of `rows` tokens, integers, layer by layer, as uint8 or
        int16 [rows * layers * per_token]. Raises ValueError with the reason where they are
        invalid."""
        flat = self._all(flat, rows)
        if int(flat.min()) < 0 or int(flat.max()) >= self.experts:
            raise ValueError(
                f"routed experts {int(flat.min())}..{int(flat.max())} came, the model has "
                f"0..{self.experts - 1}"
            )
        return flat.astype(self.dtype)

    def read(self, sent: NDArray[Any] | None, rows: int) -> Tensor:
        """In the trainer: decode()'s result for `rows` tokens, as uint8 or int16 [rows, layers *
        per_token]. Raises ValueError with the reason where it is invalid."""
        sent = self._all(sent, rows)
        if sent.dtype != self.dtype:
            raise ValueError(
                f"routed experts came as {sent.dtype}, expected {np.dtype(self.dtype)}"
            )
        return torch.from_numpy(sent.copy()).view(rows, -1)

    def _all(self, flat: NDArray[Any] | None, rows: int) -> NDArray[Any]:
        if flat is None:
            raise ValueError("no routed experts came")
        width = self.layers * self.per_token
        if len(flat) != rows * width:
            raise ValueError(
                f"{len(flat)} routed experts came for {rows} tokens, expected {width} for each "
                f"({self.layers} layers x {self.per_token})"
            )
        return flat

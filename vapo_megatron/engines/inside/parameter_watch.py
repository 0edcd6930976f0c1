"""Watches what a model's loader writes into its parameters, or compares it with them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vapo_megatron.engines.inside.replay import Placement

_COPY = torch.ops.aten.copy_.default
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class ParameterWatch(TorchDispatchMode):
    """Counts the elements written into each of a model's parameters; with compare, compares instead
    of writing.

    Fills of a scalar count; larger ones count only with count_fills, as loaders pad with them,
    which may hide a tensor that is too short.

    written: engine parameter name -> elements. differs: whether a compared element was not equal.
    placement: all that was done since start(); outside: between tensors.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], compare: bool, count_fills: bool
    ) -> None:
        super().__init__()
        self._names = {
            tensor.untyped_storage().data_ptr(): name for name, tensor in parameters.items()
        }
        self._compare = compare
        self._count_fills = count_fills
        self.outside = Placement(None)
        self.start(None)

    def start(self, tensor: torch.Tensor | None) -> None:
        """Begin to count for the next tensor; None: the one before is placed."""
        self.written: Counter[str] = Counter()
        self.differs = False
        self.placement = self.outside if tensor is None else Placement(tensor)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = None
        if func is _COPY or func in _FILLS:
            name = self._names.get(args[0].untyped_storage().data_ptr())
            if name is not None:
                if func is _COPY or self._count_fills or args[0].numel() == 1:
                    self.written[name] += args[0].numel()
                if self._compare:
                    expected = torch.empty_like(args[0])
                    func(expected, *args[1:], **(kwargs or {}))
                    self.differs |= not _equal(args[0], expected)
                    return args[0]
        self.placement.saw(func, args, name is not None, bool(kwargs))
        return func(*args, **(kwargs or {}))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1:  # torch compares no float8
        a = a.view(torch.uint8)
        b = b.view(torch.uint8)
    return torch.equal(a, b)

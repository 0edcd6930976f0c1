"""Whether weights are finite, seen in little memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vapo_megatron.weights.adapters import _BLOCK, is_finite


class Copies(TorchDispatchMode):
    """The most bytes that a new tensor has; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch with each operation."""
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and not func.is_view:
            self.most = max(self.most, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_one_number_among_many_is_found(dtype: torch.dtype) -> None:
    weights = torch.zeros(3, _BLOCK // 2 + 7).to(dtype)
    assert is_finite(weights)
    for place in (0, _BLOCK, weights.numel() - 1):
        damaged = weights.clone()
        damaged.view(-1)[place] = torch.nan
        assert not is_finite(damaged)


def test_infinity_is_found_and_nothing_is_finite() -> None:
    assert not is_finite(torch.tensor([1.0, -torch.inf]))
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.tensor(1.0))


def test_a_large_parameter_is_not_copied_in_float32() -> None:
    weights = torch.zeros(8, _BLOCK, dtype=torch.bfloat16)
    with Copies() as copies:
        assert is_finite(weights)
    assert 0 < copies.most <= 4 * _BLOCK

"""All random generators of a rank, as plain tensors and numbers."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from vapo_megatron.megatron.platform import current_platform


def rng_state() -> dict[str, Any]:
    """The state of Python's, numpy's, torch's and Megatron's generators; torch.load(weights_only=True) reads it."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if current_platform().is_cuda:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on from rng_state() of a rank at the same place."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])

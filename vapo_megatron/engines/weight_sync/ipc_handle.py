"""GPU memory in a pickle: its CUDA IPC handle, with the GPU named in a way that another process understands."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

# Of what torch.multiprocessing.reductions.reduce_tensor gives rebuild_cuda_tensor: the GPU's index in this process.
_DEVICE = 6


class IpcHandle:
    """Stands for a CUDA tensor where something is pickled for an engine, which finds the tensor in its place.

    Sender and engine may number GPUs differently, so that the UUID takes the place of the index; SGLang's processes
    look it up (sglang/srt/utils/patch_torch.py). Its patch of torch is not applied on this side: tensors in host memory
    could then not be sent to other processes any more.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])

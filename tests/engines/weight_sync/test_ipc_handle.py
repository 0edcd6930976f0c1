"""A CUDA IPC handle as SGLang's processes read it, with what CUDA itself would say put in by
hand."""

import pickle
from io import BytesIO
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.utils import patch_torch
from sglang.srt.utils.common import SafeUnpickler
from torch.multiprocessing import reductions

from vapo_megatron.engines.weight_sync.transports import IpcHandle

GPUS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]  # as the sender counts them


def properties(order: list[str]) -> object:
    return lambda index: SimpleNamespace(uuid=order[index])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The handle of a tensor on the sender's third GPU."""
    tensor = torch.arange(24, dtype=torch.uint8)

    def reduce_tensor(shared: torch.Tensor) -> tuple:
        assert shared is tensor
        storage = shared._typed_storage()
        place = (
            type(shared),
            shared.size(),
            shared.stride(),
            shared.storage_offset(),
            type(storage),
            shared.dtype,
        )
        return reductions.rebuild_cuda_tensor, (
            *place,
            2,
            b"handle",
            24,
            0,
            False,
            b"counter",
            0,
            b"event",
            True,
        )

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(GPUS))
    return pickle.dumps({"buffer": IpcHandle(tensor), "size": 24})


def test_an_engine_finds_the_gpu_by_its_uuid(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(["GPU-d", "GPU-c"]))
    monkeypatch.setattr(
        reductions,
        "_rebuild_cuda_tensor_original",
        lambda *args: opened.append(args),
        raising=False,
    )
    # As in an engine, where SGLang has put its own in torch's place.
    monkeypatch.setattr(
        reductions, "rebuild_cuda_tensor", patch_torch._rebuild_cuda_tensor_modified
    )
    message = SafeUnpickler(BytesIO(sent)).load()
    assert message["size"] == 24
    (arguments,) = opened
    assert arguments[6] == 1  # GPU-c there
    assert arguments[:2] == (torch.Tensor, torch.Size([24])) and arguments[7] == b"handle"


def test_sending_leaves_torch_as_it_was(sent: bytes) -> None:
    assert not hasattr(reductions, "_reduce_tensor_original")

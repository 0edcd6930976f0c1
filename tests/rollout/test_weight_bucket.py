import pickle

import pytest
import torch

from vapo_megatron.rollout.weight_bucket import SharedMemoryBuffer, lay_out, unpack


@pytest.fixture
def bucket() -> list[tuple[str, torch.Tensor]]:
    return [
        ("odd", torch.arange(3, dtype=torch.int8)),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("transposed", torch.randn(4, 6, dtype=torch.bfloat16).t()),
        ("empty", torch.empty(0, 5)),
    ]


def test_tensors_of_any_dtype_and_layout_come_back(bucket: list[tuple[str, torch.Tensor]]) -> None:
    buffer = SharedMemoryBuffer()
    received = dict(unpack(pickle.loads(buffer.pack(bucket, "load"))))
    assert list(received) == [name for name, _ in bucket]
    for name, tensor in bucket:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
    buffer.close()


def test_entries_do_not_overlap_and_can_be_viewed_as_any_dtype(bucket: list[tuple[str, torch.Tensor]]) -> None:
    entries, size = lay_out(bucket)
    ends = [entry.start for entry in entries[1:]] + [size]
    for entry, end, (_, tensor) in zip(entries, ends, bucket, strict=True):
        assert entry.start % 16 == 0
        assert entry.start + tensor.nbytes <= end


def test_a_buffer_is_filled_again_with_a_larger_and_a_smaller_bucket() -> None:
    buffer = SharedMemoryBuffer()
    for count in (10, 1000, 3):
        weights = torch.randn(count)
        [(_, received)] = unpack(pickle.loads(buffer.pack([("w", weights)], "load")))
        assert torch.equal(received, weights)
    buffer.close()


def test_the_end_of_a_hand_over_may_be_empty() -> None:
    buffer = SharedMemoryBuffer()
    payload = pickle.loads(buffer.pack([], "load", last=True))
    assert unpack(payload) == []
    assert payload["last"] and not payload["first"]
    buffer.close()

import torch

from vapo_megatron.weights.bucket import DeviceSlots, SharedSlots, announce, pack, unpack

Tensors = list[tuple[str, torch.Tensor]]

BUCKET: Tensors = [
    ("odd", torch.arange(3, dtype=torch.int8)),
    ("scalar", torch.tensor(2.5, dtype=torch.float64)),
    ("transposed", torch.randn(4, 6, dtype=torch.bfloat16).t()),
    ("empty", torch.empty(0, 5)),
    ("eight bits", torch.randn(5, 3).to(torch.float8_e4m3fn)),
]


def receive(slots: SharedSlots, index: int, tensors: Tensors) -> Tensors:
    """What another process sees of a bucket."""
    bucket = pack(tensors, slots, index)
    message = announce(bucket, "load", first=True, last=False) | {"path": bucket.memory.path}
    return unpack(message)


def test_tensors_of_any_dtype_and_layout_come_back() -> None:
    slots = SharedSlots()
    received = dict(receive(slots, 0, BUCKET))
    assert list(received) == [name for name, _ in BUCKET]
    for name, tensor in BUCKET:
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert torch.equal(received[name].float(), tensor.float())
    slots.close()


def test_bytes_may_come_as_a_buffer() -> None:
    bucket = pack(BUCKET, DeviceSlots(torch.device("cpu")))
    received = unpack(announce(bucket, "load", first=True, last=False), bucket.buffer.clone())
    assert all(torch.equal(a.float(), b.float()) for (_, a), (_, b) in zip(received, BUCKET, strict=True))


def test_places_are_filled_again_with_larger_and_smaller_buckets() -> None:
    slots = SharedSlots()
    for index, count in enumerate((10, 7, 1000, 2000, 3, 5000)):
        weights = torch.randn(count)
        [(_, received)] = receive(slots, index, [("w", weights)])
        assert torch.equal(received, weights)
    slots.close()


def test_a_file_under_the_name_of_an_earlier_one_is_not_taken_for_it() -> None:
    for _ in range(3):  # each time the descriptors, and so the paths, are those of the last
        slots = SharedSlots()
        weights = torch.randn(50)
        [(_, received)] = receive(slots, 0, [("w", weights)])
        assert torch.equal(received, weights)
        slots.close()


def test_the_end_of_a_weight_sync_is_empty() -> None:
    message = announce(None, "load", first=False, last=True)
    assert unpack(message) == []
    assert message["last"] and not message["first"]

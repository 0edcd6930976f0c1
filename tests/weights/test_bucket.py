from collections.abc import Mapping
from typing import Any

import pytest
import torch

from vapo_megatron.weights import bucket as buckets
from vapo_megatron.weights.bucket import (
    DeviceSlots,
    SharedSlots,
    announce,
    buffer_of,
    pack,
    places_of,
    sum_of_words,
    sums_of_places,
    view,
)

Tensors = list[tuple[str, torch.Tensor]]

BUCKET: Tensors = [
    ("odd", torch.arange(3, dtype=torch.int8)),
    ("scalar", torch.tensor(2.5, dtype=torch.float64)),
    ("transposed", torch.randn(4, 6, dtype=torch.bfloat16).t()),
    ("empty", torch.empty(0, 5)),
    ("eight bits", torch.randn(5, 3).to(torch.float8_e4m3fn)),
]


def unpack(message: Mapping[str, Any], buffer: torch.Tensor | None = None) -> Tensors:
    received = buffer_of(message, buffer)
    return [(place.name, view(received, place)) for place in places_of(message)]


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
    assert all(
        torch.equal(a.float(), b.float()) for (_, a), (_, b) in zip(received, BUCKET, strict=True)
    )


def test_places_are_filled_again_with_larger_and_smaller_buckets() -> None:
    slots = SharedSlots()
    for index, count in enumerate((10, 7, 1000, 2000, 3, 5000)):
        weights = torch.randn(count)
        [(_, received)] = receive(slots, index, [("w", weights)])
        assert torch.equal(received, weights)
    slots.close()


def test_file_under_an_earlier_name_is_not_confused_with_it() -> None:
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


@pytest.mark.parametrize("words_at_once", [1, 3, 8 << 20])
def test_sums_in_one_pass_are_those_of_each_tensor(
    words_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_WORDS_AT_ONCE", words_at_once)
    slots = DeviceSlots(torch.device("cpu"))
    slots.take(0, 4096).buffer.fill_(255)  # what was there before
    packed = pack([*BUCKET, ("long", torch.randn(100)), ("last", torch.randn(3))], slots)
    expected = [int(sum_of_words(tensor.flatten().view(torch.uint8))) for _, tensor in packed]
    assert packed.checksums() == sums_of_places(packed.buffer, packed.places) == expected
    words = packed.buffer.view(torch.int64)
    starts = [place.start // 8 for place in packed.places if place.nbytes]
    on_gpus = buckets._differences_of_prefixes(words, starts)
    assert on_gpus == [
        total for total, place in zip(expected, packed.places, strict=True) if place.nbytes
    ]
    for place in packed.places:
        if place.nbytes:
            packed.buffer[place.start + place.nbytes - 1] ^= 1
            changed = sums_of_places(packed.buffer, packed.places)
            assert [a != b for a, b in zip(changed, expected, strict=True)].count(True) == 1
            packed.buffer[place.start + place.nbytes - 1] ^= 1

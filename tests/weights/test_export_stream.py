"""The stream of buckets: the same at every layout, and bounded in memory."""

import gc
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import megatron, read_tensors, write_model
from ranks import run_ranks
from specs import spec_of

from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.models.registry import FAMILIES, read_spec
from vapo_megatron.models.rules import Rule
from vapo_megatron.weights import export, gather
from vapo_megatron.weights.bucket import DeviceSlots, SharedSlots, lay_out, pack, sum_of_words
from vapo_megatron.weights.export import make_slots, stream_hf
from vapo_megatron.weights.load import load_hf
from vapo_megatron.weights.mapping import entries

LAYOUTS = [LayoutConfig(), LayoutConfig(tp=2), LayoutConfig(pp=2), LayoutConfig(tp=2, pp=2)]
LIMIT = 20_000  # bytes: no parameter is larger, and the model is several times as large
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), "qwen2", num_hidden_layers=2)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def streams(model_dir: Path, layout: LayoutConfig) -> dict[str, list[tuple[str, str]]]:
    """What a rank sees of the model: in places that engines can map, and in memory of its own."""
    spec = read_spec(model_dir)
    chunks, mesh = megatron(spec, layout, "lm")
    load_hf(chunks, spec, model_dir, mesh, "lm")
    slots = make_slots(CPU)
    seen = {}
    for name, places in (("shared", slots), ("own", None)):
        found = []
        for bucket in stream_hf(chunks, spec, mesh, "lm", LIMIT, slots=places):
            assert bucket.buffer.numel() <= LIMIT
            assert all(tensor.is_contiguous() for _, tensor in bucket)
            found += [(tensor_name, digest(tensor)) for tensor_name, tensor in bucket]
        seen[name] = found
    dist.barrier()
    slots.close()
    return seen


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe(layout.model_size))
def test_names_order_and_bytes_are_those_of_the_checkpoint(
    model_dir: Path, layout: LayoutConfig
) -> None:
    expected = {name: digest(tensor) for name, tensor in read_tensors(model_dir).items()}
    order = [name for entry in entries(read_spec(model_dir), "lm") for name in entry.hf]
    for answer in run_ranks(layout.model_size, streams, model_dir, layout):
        for seen in answer.values():
            assert [name for name, _ in seen] == order
            assert dict(seen) == expected


def live_bytes(shards: set[int]) -> int:
    """Bytes of all storages on the CPU that a tensor holds, but for those that were there at
    gc.freeze().

    shards: addresses of the parameters, of which the copying thread may hold a view at any moment.
    """
    storages = {}
    for candidate in gc.get_objects():
        if isinstance(candidate, torch.Tensor) and candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for address, nbytes in storages.items() if address not in shards)


def most_bytes_beyond_the_shards(
    model_dir: Path, layout: LayoutConfig, limit: int, shared: bool
) -> int:
    spec = read_spec(model_dir)
    chunks, mesh = megatron(spec, layout, "lm")
    load_hf(chunks, spec, model_dir, mesh, "lm")
    slots = make_slots(CPU) if shared else DeviceSlots(CPU)
    shards = {
        parameter.untyped_storage().data_ptr()
        for chunk in chunks
        for parameter in chunk.parameters()
    }
    most = 0
    gc.collect()
    gc.freeze()
    gather_piece = gather._gather

    def watched(*arguments: Any) -> torch.Tensor:
        nonlocal most
        gathered = gather_piece(*arguments)
        most = max(most, live_bytes(shards))  # a piece has come, the bucket before is still there
        return gathered

    gather._gather = watched
    for _ in stream_hf(chunks, spec, mesh, "lm", limit, slots=slots):
        most = max(most, live_bytes(shards))
    dist.barrier()
    slots.close()
    return most


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "gathered"])
def test_no_rank_holds_more_than_two_buckets_beyond_its_shards(
    tmp_path: Path, shared: bool
) -> None:
    model_dir = write_model(tmp_path, "qwen2", num_hidden_layers=16, vocab_size=64)
    spec = read_spec(model_dir)
    largest = 4 * max(entry.rule.count() for entry in entries(spec, "lm"))
    limit = export.PIECES * largest
    assert 4 * spec.parameter_count() > 2 * limit, "the stream would not fill two buckets"
    for most in run_ranks(
        4, most_bytes_beyond_the_shards, model_dir, LayoutConfig(tp=2, pp=2), limit, shared
    ):
        assert limit < most <= 2 * limit, f"{most / limit:.2f} buckets"


def rules() -> list[tuple[str, Rule]]:
    found = {
        (family, entry.rule.megatron): entry.rule
        for family in FAMILIES
        for entry in entries(spec_of(family), "lm")
    }
    return [(f"{family}:{name}", rule) for (family, name), rule in found.items()]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("rule", [rule for _, rule in rules()], ids=[name for name, _ in rules()])
def test_shards_fill_their_places_whatever_their_order(rule: Rule, tp_size: int) -> None:
    """The inverse of to_shard; every element is written."""
    wholes = [torch.randn(shape) for shape in rule.hf_shapes()]
    shards = [rule.to_shard(wholes, rank, tp_size) for rank in range(tp_size)]
    filled = [torch.full_like(whole, torch.nan) for whole in wholes]
    for rank in reversed(range(tp_size)):
        rule.place(shards[rank], filled, rank, tp_size)
    assert all(torch.equal(a, b) for a, b in zip(filled, wholes, strict=True))


def test_a_checksum_tells_any_changed_byte() -> None:
    for nbytes in (132, 14, 3, 21):
        raw = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        expected = sum_of_words(raw)
        for byte in range(len(raw)):
            changed = raw.clone()
            changed[byte] ^= 1 << (byte % 8)
            assert sum_of_words(changed) != expected


def test_places_do_not_overlap_and_can_be_viewed_as_any_dtype() -> None:
    tensors = [
        ("a", torch.randn(3).to(torch.bfloat16)),
        ("b", torch.randn(2, 5)),
        ("c", torch.tensor(1.0).double()),
    ]
    places, size = lay_out((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
    ends = [place.start for place in places[1:]] + [size]
    assert all(
        place.start % 16 == 0 and place.start + place.nbytes <= end
        for place, end in zip(places, ends, strict=True)
    )
    slots = SharedSlots()
    packed = pack(tensors, slots)
    assert size == len(packed.buffer)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(packed, tensors, strict=True))
    slots.close()

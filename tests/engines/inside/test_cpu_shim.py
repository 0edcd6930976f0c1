import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vapo_megatron.engines.inside.cpu_shim import (
    decode_attention,
    extend_attention,
    murmur_hash32,
    murmur_hash32_blocks,
    padded_slots,
)


def hash_bytes(message: bytes) -> int:
    words = struct.unpack(f"<{len(message) // 4}I", message)
    return int(murmur_hash32_blocks([np.array([word], dtype=np.uint32) for word in words])[0])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"\x00\x00\x00\x00", 0x2362F9DE),
        (b"\x21\x43\x65\x87", 0xF55B516B),
        (b"test", 0xBA6BD213),
    ],
)
def test_murmur_gives_the_published_hashes(message: bytes, expected: int) -> None:
    assert hash_bytes(message) == expected


def reference_murmur(words: list[int]) -> int:
    """MurmurHash3_x86_32, seed 0, on Python's unbounded integers."""
    mask = 0xFFFFFFFF
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        state ^= word * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16


def test_murmur_hashes_seed_position_and_column() -> None:
    seeds = [0, 1, 2**40 + 7, 2**63 - 1]
    positions = [0, 5, 4095, 2**31 - 1]
    columns = [0, 3, 151935]
    hashes = murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashes.dtype == torch.uint32
    expected = [
        [reference_murmur([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashes.tolist() == expected


@pytest.fixture
def cache() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [slots, kv_heads, d]; the slots of four requests, out of order; their places
    in the pool."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 200, 2, 16)
    req_to_token = torch.randperm(200)[: 4 * 40].view(4, 40).to(torch.int32)
    return keys, values, req_to_token, torch.tensor([2, 0, 3, 1])


def attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prefix: int
) -> torch.Tensor:
    """Causal attention of one request's new tokens [t, heads, d], head by head."""
    visible = torch.arange(len(keys))[None, :] <= prefix + torch.arange(len(query))[:, None]
    group = query.shape[1] // keys.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = 0.3 * query[:, head] @ keys[:, head // group].T
        heads.append(
            F.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ values[:, head // group]
        )
    return torch.stack(heads, 1)


def test_batched_decode_equals_attention_request_by_request(
    cache: tuple[torch.Tensor, ...],
) -> None:
    keys, values, req_to_token, pool = cache
    lengths = torch.tensor([1, 17, 40, 5])
    query = torch.randn(4, 4, 16)
    batched = decode_attention(
        query, keys, values, *padded_slots(req_to_token, pool, lengths), scaling=0.3
    )
    for i in range(4):
        slots = req_to_token[pool[i], : lengths[i]].long()
        alone = attend_one(query[i : i + 1], keys[slots], values[slots], prefix=int(lengths[i]) - 1)
        torch.testing.assert_close(batched[i : i + 1], alone)


def test_batched_extend_equals_attention_request_by_request(
    cache: tuple[torch.Tensor, ...],
) -> None:
    keys, values, req_to_token, pool = cache
    prefixes = torch.tensor([0, 7, 0, 30])
    new = torch.tensor([12, 1, 3, 10])
    query = torch.randn(int(new.sum()), 4, 16)
    batched = extend_attention(
        query, keys, values, req_to_token, pool, prefixes + new, prefixes, new, scaling=0.3
    )
    start = 0
    for i in range(4):
        end = start + int(new[i])
        slots = req_to_token[pool[i], : int(prefixes[i] + new[i])].long()
        alone = attend_one(query[start:end], keys[slots], values[slots], prefix=int(prefixes[i]))
        torch.testing.assert_close(batched[start:end], alone)
        start = end

"""Sums of long responses, where sums of tiles are themselves cut into tiles: the same to the bit in
every part."""

import pytest
import torch

from vapo_megatron.algorithms.suffix_scan import suffix_scan_


@pytest.mark.parametrize("decay", [0.9999, 1.0])
def test_long_responses_have_same_sums_in_every_part_of_a_batch(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(30_000, 130_000, (21,), generator=generator)
    lengths[5] = 2_300_000  # with the first ones in a slab, whose own mean cuts otherwise
    x = torch.randn(int(lengths.sum()), generator=generator)
    decays = torch.full((21,), decay, dtype=torch.float64)
    (whole,) = suffix_scan_(x.clone(), lengths, [decays], None)
    ends = lengths.cumsum(0)
    for first, end in ((0, 5), (1, 2), (3, 9), (5, 6), (6, 21)):
        part = slice(int(ends[first] - lengths[first]), int(ends[end - 1]))
        (found,) = suffix_scan_(
            x[part].clone(), lengths[first:end], [decays[first:end]], of=lengths
        )
        assert torch.equal(found, whole[part])
    if decay == 1:
        for terms, sums in zip(
            x.double().split(lengths.tolist()), whole.split(lengths.tolist()), strict=True
        ):
            expected = terms.flip(0).cumsum(0).flip(0)
            assert (sums - expected).abs().max() <= 1e-6 * expected.abs().max()

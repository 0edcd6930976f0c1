"""Sums of long responses, where sums of tiles are themselves cut into tiles: the same to the bit in every part."""

import pytest
import torch

from vapo_megatron.algorithms.suffix_scan import suffix_scan_


@pytest.mark.parametrize("decay", [0.9999, 1.0])
def test_long_responses_have_the_same_sums_in_every_part_of_a_batch(decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2_300_000, *torch.randint(30_000, 130_000, (20,), generator=generator).tolist()])
    x = torch.randn(int(lengths.sum()), generator=generator)
    decays = torch.full((21,), decay, dtype=torch.float64)
    (whole,) = suffix_scan_(x.clone(), lengths, [decays])
    ends = lengths.cumsum(0)
    for first, end in ((0, 1), (1, 2), (1, 21), (3, 9)):
        part = slice(int(ends[first] - lengths[first]), int(ends[end - 1]))
        (found,) = suffix_scan_(x[part].clone(), lengths[first:end], [decays[first:end]], of=lengths)
        assert torch.equal(found, whole[part])
    if decay == 1:
        for terms, sums in zip(x.double().split(lengths.tolist()), whole.split(lengths.tolist()), strict=True):
            expected = terms.flip(0).cumsum(0).flip(0)
            assert (sums - expected).abs().max() <= 1e-6 * expected.abs().max()

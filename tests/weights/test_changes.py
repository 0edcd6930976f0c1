"""Changed words between two buckets, and what is made of them."""

import pytest
import torch

from vapo_megatron.weights import changes as module
from vapo_megatron.weights.changes import apply_changes, changed_words, placed_sum


def bucket(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", [16, 4096, 600_000])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2])
@pytest.mark.parametrize("piece", [None, 1000, 65_536])
def test_changes_make_the_new_bucket_of_the_old(
    size: int, share: float, piece: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600,000 bytes hold gaps of more than 16 bits."""
    if piece is not None:
        monkeypatch.setattr(module, "_PIECE", piece)
    before = bucket(size, seed=1)
    after = before.clone()
    words = after.view(torch.int16)
    changed = torch.rand(len(words), generator=torch.Generator().manual_seed(2)) < share
    words[changed] += 1
    changes = changed_words(before, after)
    assert changes is not None
    # The first word, and one for each 65,535
    assert len(changes) <= 4 * (int(changed.sum()) + 1 + len(words) // 65_535)
    apply_changes(before, changes)
    assert torch.equal(before, after)


def test_only_the_last_word_changed() -> None:
    before = torch.zeros(500_000, dtype=torch.uint8)
    after = before.clone()
    after[-1] = 1
    changes = changed_words(before, after)
    assert changes is not None and len(changes) == 4 * (4 + 1)
    apply_changes(before, changes)
    assert torch.equal(before, after)


def test_a_bucket_that_changed_all_over_is_sent_whole() -> None:
    before = bucket(4096, seed=1)
    assert changed_words(before, before + 1) is None
    few = before.clone()
    few.view(torch.int16)[1::4] += 1  # a quarter of the words, and the first
    assert changed_words(before, few) is None
    few.view(torch.int16)[1] -= 1
    assert changed_words(before, few) is not None


@pytest.mark.parametrize("size", [64, 100_000])
def test_changes_of_a_larger_bucket_are_refused(size: int) -> None:
    before = torch.zeros(200_000, dtype=torch.uint8)
    after = before.clone()
    after[-1] = 1
    changes = changed_words(before, after)
    assert changes is not None
    with pytest.raises(ValueError, match=f"not of a bucket of {size} bytes"):
        apply_changes(torch.zeros(size, dtype=torch.uint8), changes)


def test_a_sum_by_place_sees_every_change_and_every_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = bucket(800, seed=1)
    words = raw.view(torch.int64)
    before = placed_sum(raw)
    monkeypatch.setattr(module, "_PIECE", 7)
    assert placed_sum(raw) == before, "its pieces"
    for place in range(len(words)):
        words[place] ^= 1 << 40
        assert placed_sum(raw) != before
        words[place] ^= 1 << 40
    for place in range(len(words) - 1):
        words[[place, place + 1]] = words[[place + 1, place]]
        assert placed_sum(raw) != before
        words[[place, place + 1]] = words[[place + 1, place]]
    assert placed_sum(raw) == before

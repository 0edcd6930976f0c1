"""Parts of samples, on a case small enough to write out; tests/training/test_context_parts.py
packs them."""

import torch

from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.parts import Parts, cut, joined
from vapo_megatron.data.sample import Prompt, Sample


def two_samples() -> ExperienceBatch:
    """Tokens 0 to 3, one of them a response, and tokens 10 to 19, of which 13 to 19 are."""
    samples = []
    for group, (first, prompt, response) in enumerate([(0, 3, 1), (10, 3, 7)]):
        ids = list(range(first, first + prompt + response))
        said = Prompt(str(group), "", "", tuple(ids[:prompt]))
        logprobs = [-float(token) for token in ids[prompt:]]
        fields = (ids[prompt:], logprobs, "stop", 0, 0)
        samples.append(Sample(said, group, 0, 0, *fields, reward=1.0, correct=True))  # type: ignore[arg-type]
    return from_samples(samples)


def second_cut(batch: ExperienceBatch) -> Parts:
    """Of nine positions, padded to twelve: chunks of three, the last of them all padding."""
    return cut(batch, [1], torch.tensor([12]), 2)


def test_a_part_has_two_chunks_with_the_token_behind_each() -> None:
    batch = two_samples()
    parts = second_cut(batch)
    assert parts.chunks.tolist() == [2, 2]
    tokens = parts.take(batch.tokens, "tokens").tolist()
    assert tokens == [10, 11, 12, 13, 19, 13, 14, 15, 16, 16, 17, 18, 19]
    assert parts.sizes.tolist() == [[4, 1], [1, 0], [4, 3], [4, 3]]
    logprobs = parts.take(batch.rollout_logprobs, "response_tokens").tolist()
    assert logprobs == [-13, -14, -15, -16, -17, -18, -19]


def test_a_part_has_the_experts_of_its_positions() -> None:
    batch = two_samples()
    # Numbered as their tokens are, none for a sample's last
    experts = torch.tensor([0, 1, 2, 10, 11, 12, 13, 14, 15, 16, 17, 18])
    rows = second_cut(batch).take(experts, "positions").tolist()
    # The fourth and the eighth are behind a chunk: no position goes through them
    assert len(rows) == 4 + 7
    assert rows[:3] == [10, 11, 12]
    assert rows[4:7] == [13, 14, 15] and rows[8:] == [16, 17, 18]


def test_windows_count_the_earlier_tokens_of_a_part() -> None:
    batch = two_samples()
    starts = batch.response_cu_seqlens[:-1]
    for earlier, expected in ((0, [0, 0]), (1, [1, 0]), (3, [1, 2]), (7, [1, 6])):
        before = second_cut(batch).tokens_before(starts + earlier)
        assert before.tolist() == expected


def test_parts_are_samples_of_two_segments() -> None:
    batch = two_samples()
    parts = second_cut(batch)
    fields = {
        "tokens": parts.take(batch.tokens, "tokens"),
        "rollout_logprobs": parts.take(batch.rollout_logprobs, "response_tokens"),
    }
    table = batch.table().select(torch.tensor([1, 1]))
    found = joined(table, parts.sizes, parts.chunks, None, fields)
    assert [found.segment_bounds(part) for part in range(2)] == [[0, 4, 5], [0, 4, 8]]
    assert [found.response_places(part).tolist() for part in range(2)] == [[3], [1, 2, 3, 5, 6, 7]]
    assert found.response_lengths.tolist() == [1, 6]

"""What the benchmark of growth times, at small sizes."""

from benchmarks import growth


def test_an_episode_has_the_tokens_of_its_segments() -> None:
    fields = growth._fields(4)()
    assert len(fields["response_ids"]) == len(fields["rollout_logprobs"])
    assert fields["loss_mask"].sum() == 4 * growth._TOKENS


def test_a_batch_of_an_episode_is_packed_and_texts_are_searched() -> None:
    growth._pack(4)()
    growth._preamble(20)()

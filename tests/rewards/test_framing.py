"""Messages between the pool and its workers arrive whole, however their bytes are cut."""

from random import Random

import pytest

from vapo_megatron.rewards.worker import Decoder, encode

MESSAGES = [{}, {"text": "é\ud800\n" * 50, "extra": {"score": 0.5}}, {"list": [1, None, True]}, {"x": "y" * 70_000}]


@pytest.mark.parametrize("most", [1, 3, 5, 1 << 16, 1 << 20])
def test_messages_arrive_whole_and_in_order(most: int) -> None:
    random, decoder = Random(most), Decoder()
    data, received = b"".join(map(encode, MESSAGES)), []
    while data:
        cut = random.randint(1, most)
        received += decoder.feed(data[:cut])
        data = data[cut:]
    assert received == MESSAGES


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        Decoder().feed(b"\x03\0\0\0abc")

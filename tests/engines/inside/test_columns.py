"""Columns that a server hands over: numbers come back to the bit, a message that is not whole is
refused."""

import base64
from typing import Any

import numpy as np
import pytest

from vapo_megatron.engines.inside.columns import pack, unpack
from vapo_megatron.weights.routed_experts import ExpertChoices

SPANS = [{"version": "3", "start": 0}, {"version": "4", "start": 1}]


def answer(
    ids: list[int], logprobs: list[float | None], experts: list[int] | None = None
) -> dict[str, Any]:
    """One of SGLang's answers."""
    meta: dict[str, Any] = {
        "id": "unread",
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_versions": SPANS,
        "output_token_logprobs": [
            (value, token, None) for value, token in zip(logprobs, ids, strict=True)
        ],
    }
    if experts is not None:
        meta["routed_experts"] = base64.b64encode(
            np.array(experts, dtype=np.int32).tobytes()
        ).decode()
    return {"output_ids": ids, "meta_info": meta}


def test_numbers_come_back_to_the_bit_in_their_order() -> None:
    random = np.random.default_rng(0)
    sent = [
        (random.integers(0, 152_000, n).tolist(), (-random.exponential(2, n)).astype(np.float32))
        for n in (7, 1, 300)
    ]
    found = unpack(pack([answer(ids, logprobs.tolist()) for ids, logprobs in sent]))
    assert len(found) == len(sent)
    for (ids, logprobs), columns in zip(sent, found, strict=True):
        assert columns.token_ids.dtype == np.int32 and columns.token_ids.tolist() == ids
        assert (
            columns.logprobs.dtype == np.float32
            and columns.logprobs.tobytes() == logprobs.tobytes()
        )
        assert columns.experts is None
        assert columns.meta == {
            "finish_reason": {"type": "stop", "matched": 2},
            "weight_versions": SPANS,
        }


@pytest.mark.parametrize(("experts", "size"), [(256, 1), (257, 2)])
def test_experts_take_as_few_bytes_as_hold_them(experts: int, size: int) -> None:
    choices = ExpertChoices(layers=1, experts=experts, per_token=2)
    chosen = [3, 0, experts - 1, 7, 1, 2]
    answers = [answer([5, 6], [-1.0, -2.0], chosen), answer([9], [-0.5], chosen[:2])]
    first, second = unpack(pack(answers, choices, [[8, 8], [8]]))
    assert (
        first.experts is not None
        and first.experts.tolist() == chosen
        and first.experts.itemsize == size
    )
    assert second.experts is not None and second.experts.tolist() == chosen[:2]
    assert second.token_ids.tolist() == [9]


def test_impossible_experts_are_reported_beside_the_response() -> None:
    choices = ExpertChoices(layers=1, experts=4, per_token=2)
    answers = [answer([5], [-1.0], [3, 4]), answer([9], [-0.5], [0, 1]), answer([9], [-0.5])]
    beyond, good, none = unpack(pack(answers, choices, [[8], [8], [8]]))
    assert beyond.experts is None and "routed experts 3..4 came" in beyond.meta["wrong_experts"]
    assert good.experts is not None and "wrong_experts" not in good.meta
    assert none.experts is None and none.meta["wrong_experts"] == "no routed experts came"


def test_a_logprob_that_is_none_is_no_number() -> None:
    (found,) = unpack(pack([answer([5, 6], [None, -2.0])]))
    assert np.isnan(found.logprobs[0]) and found.logprobs[1] == -2.0


@pytest.mark.parametrize("cut", [1, 4, -1, -9])
def test_a_message_that_is_not_whole_is_refused(cut: int) -> None:
    message = pack([answer([5, 6, 7], [-1.0, -2.0, -3.0])])
    with pytest.raises(ValueError):
        unpack(message[:cut])
    with pytest.raises(ValueError, match="not fully covered"):
        unpack(message + b"\0")

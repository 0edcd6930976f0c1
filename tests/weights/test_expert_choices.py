"""Routed experts as a server sends them: those of a router that chose are read, anything else is
refused in words."""

import numpy as np
import pytest
import torch

from vapo_megatron.weights.routed_experts import ExpertChoices


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_they_come_in_the_smallest_type_that_holds_every_expert(
    experts: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    sent = torch.rand(50, 3, experts, generator=generator).topk(4).indices
    sent[0, 0] = torch.tensor([experts - 1, 0, 1, 2])
    choices = ExpertChoices(layers=3, experts=experts, per_token=4)
    found = choices.read(choices.decode(sent.flatten().numpy(), 50), 50)
    assert found.dtype == dtype
    assert torch.equal(found.long(), sent.flatten(1))


GOOD = [[0, 1, 2, 3], [3, 2, 1, 0]]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, "no routed experts came"),
        ([], "0 routed experts came for 2 tokens, expected 4 for each (2 layers x 2)"),
        (GOOD[:1], "4 routed experts came for 2 tokens"),
        ([*GOOD, GOOD[0]], "12 routed experts came for 2 tokens"),
        ([[0, 1, 2, 4], [3, 2, 1, 0]], "routed experts 0..4 came, the model has 0..3"),
        ([[0, 1, 2, 3], [-1, 2, 1, 0]], "routed experts -1..3 came"),
    ],
)
def test_what_no_router_chose_is_refused(sent: list[list[int]] | None, said: str) -> None:
    choices = ExpertChoices(layers=2, experts=4, per_token=2)
    assert choices.decode(np.array(GOOD).flatten(), 2).tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    with pytest.raises(ValueError) as refused:
        choices.decode(None if sent is None else np.array(sent, dtype=np.int32).flatten(), 2)
    assert said in str(refused.value)


def test_what_was_not_decoded_is_not_read() -> None:
    choices = ExpertChoices(layers=2, experts=4, per_token=2)
    for sent, said in (
        (None, "no routed experts came"),
        (np.zeros(4, dtype=np.uint8), "4 routed experts came for 2 tokens"),
        (np.zeros(8, dtype=np.int32), "came as int32, expected uint8"),
    ):
        with pytest.raises(ValueError, match=said):
            choices.read(sent, 2)

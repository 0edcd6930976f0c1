"""Groups in the state of a run: what is packed comes back."""

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.rollout.packed_groups import pack_groups, unpack_groups

PROMPTS = [Prompt(f"p{n}", "problem", "answer", (n, 7), cursor=n) for n in range(20)]
# Found by the group's number, numbered by the step that takes it, or not kept.
NOT_PACKED = {"prompt", "group", "routed_experts"}


def text_of(ids: Any) -> str:
    return " ".join(map(str, ids))


def bare(cursor: int) -> Sample:
    """A response with nothing but what each has."""
    ids = np.array([3, 4, 5], np.int32)
    logprobs = np.array([-1, -2, -3], np.float32)
    return Sample(PROMPTS[cursor], 0, 1, 11, ids, logprobs, "abort", 6, 5, text_of(ids.tolist()))


def full(cursor: int) -> Sample:
    """A response of an agent's episode with a value in every field."""
    return replace(
        bare(cursor),
        prompt=replace(PROMPTS[cursor], token_ids=(9, 8, 7)),
        reward=0.5,
        correct=True,
        grade_reason="right",
        extracted="12",
        copied=True,
        extra={"style": 0.25},
        routed_experts=torch.zeros(5, 4, dtype=torch.uint8),
        versions=((5, 1), (6, 2)),
        window_start=2,
        loss_mask=np.array([True, False, True]),
        segment_starts=(1,),
        turn_rewards=np.array([0, 0, 0.5], np.float32),
        episode={"turns": 2.0},
        turns=((0, 1, False), (2, 3, True)),
    )


def packed_and_back(groups: dict[int, list[Sample]]) -> dict[int, list[Sample]]:
    return unpack_groups(pack_groups(groups), PROMPTS.__getitem__, text_of)


def test_a_packed_group_has_every_field_of_its_samples() -> None:
    groups = {12: [bare(12), full(12)], 3: [full(3)]}
    unpacked = packed_and_back(groups)
    assert list(unpacked) == [12, 3]
    names = {field.name for field in fields(Sample)} - NOT_PACKED - {"engine"}
    for number, group in groups.items():
        for before, after in zip(group, unpacked[number], strict=True):
            assert after.prompt == before.prompt
            for name in names:
                expected = getattr(before, name)
                value = getattr(after, name)
                assert type(value) is type(expected) and np.all(value == expected), name


def test_experts_are_not_packed() -> None:
    ((sample,),) = packed_and_back({3: [full(3)]}).values()
    assert sample.routed_experts is None


def test_no_groups_are_no_bytes() -> None:
    assert pack_groups({}) == b""
    assert unpack_groups(b"", PROMPTS.__getitem__, text_of) == {}


def test_facts_that_an_earlier_version_did_not_pack_are_left_out() -> None:
    tensors = load(pack_groups({3: [full(3)]}))
    facts = json.loads(tensors["facts"].tobytes())
    for name in ("turns", "copied", "episode"):
        del facts["3"][0][name]
    tensors["facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    ((sample,),) = unpack_groups(save(tensors), PROMPTS.__getitem__, text_of).values()
    assert (sample.turns, sample.copied, sample.episode) == ((), False, None)
    assert sample.extracted == "12"


@pytest.mark.parametrize("packed", [b"....", save({"tokens": np.zeros(1)})])
def test_bytes_of_something_else_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|facts"):
        unpack_groups(packed, PROMPTS.__getitem__, text_of)

"""A batch's fields are cut together, and what does not fit is refused."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from batches import LENGTHS, make_batch

from vapo_megatron.data.batch import ExperienceBatch, stretches
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample


def full_batch() -> ExperienceBatch:
    """Every field is there; each element of a field is a number of its own."""
    batch = make_batch()
    sizes = {
        "response_tokens": batch.response_tokens,
        "samples": batch.samples,
        "tokens": len(batch.tokens),
    }
    batch.privileged_lengths = torch.arange(batch.samples)
    sizes["privileged"] = int(batch.privileged_lengths.sum())
    for f in fields(batch):
        if f.name == "routed_experts":
            rows = int(batch.cu_seqlens[-1]) - batch.samples
            batch.routed_experts = torch.arange(rows * 2, dtype=torch.int16).view(rows, 2)
        elif f.name == "observation_lengths":
            batch.observation_lengths = torch.zeros(batch.samples, dtype=torch.int64)
        elif getattr(batch, f.name) is None:
            count = torch.arange(sizes[f.metadata["over"]])
            of_dtype = {torch.bool: count % 2 == 0, torch.int64: count, torch.int32: count.int()}
            setattr(batch, f.name, of_dtype.get(f.metadata["dtype"], count + 0.5))
    return batch


def parts(batch: ExperienceBatch, name: str) -> list[list[float]]:
    """A field sample by sample, cut by hand."""
    tensor = batch.tensors()[name]
    prompts, responses = zip(*LENGTHS, strict=True)
    sizes = {
        "tokens": [p + r for p, r in LENGTHS],
        "loss_mask": [p + r for p, r in LENGTHS],
        "segment_starts": [p + r for p, r in LENGTHS],
        "routed_experts": [p + r - 1 for p, r in LENGTHS],
        "privileged_tokens": list(range(len(LENGTHS))),
        "cu_seqlens": [p + r for p, r in LENGTHS],
        "response_cu_seqlens": list(responses),
        "prompt_lengths": list(prompts),
    }
    if name.endswith("cu_seqlens"):
        return [[n] for n in sizes[name]]
    per_sample = len(tensor) == batch.samples
    return [
        part.tolist()
        for part in tensor.split([1] * batch.samples if per_sample else sizes.get(name, responses))
    ]


@pytest.mark.parametrize("chosen", [[4, 0, 2], [5], [], [1, 1]])
@pytest.mark.parametrize("name", [f.name for f in fields(ExperienceBatch)])
def test_select_takes_every_field_along(name: str, chosen: list[int]) -> None:
    batch = full_batch()
    found = batch.select(chosen).tensors()[name]
    whole = parts(batch, name)
    if name.endswith("cu_seqlens"):
        assert found.diff().tolist() == [whole[s][0] for s in chosen] and int(found[0]) == 0
    else:
        assert found.tolist() == [value for s in chosen for value in whole[s]]
    assert found.dtype == batch.tensors()[name].dtype


@pytest.mark.parametrize("chosen", [[4, 0, 2], [5], []])
def test_per_sample_and_per_token_fields_make_the_batch_again(
    chosen: list[int],
) -> None:
    batch = full_batch()
    expected = batch.select(chosen).tensors()
    by_tokens = {f.name for f in fields(batch) if f.metadata["over"] not in ("samples", "offsets")}
    assert make_batch().table().select(torch.tensor([1])).shaped_rewards is None
    table = batch.table().select(torch.tensor(chosen, dtype=torch.int64))
    assert table.samples == len(chosen)
    found = table.batch(**{name: expected[name] for name in by_tokens}).tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_tables_are_joined_where_one_alone_knows_of_episodes() -> None:
    plain = make_batch().table()
    episodes = full_batch().table()
    several = {"observation_lengths": (0, 3), "segments": (1, 2), "privileged_lengths": (0, 4)}
    for name, (_, value) in several.items():
        setattr(episodes, name, torch.full((episodes.samples,), value))
    for tables in ((plain, episodes), (episodes, plain)):
        joined = tables[0].followed_by(tables[1])
        assert joined.rewards.tolist() == tables[0].rewards.tolist() + tables[1].rewards.tolist()
        for name, (missing, value) in several.items():
            column = [
                value if table is episodes else missing
                for table in tables
                for _ in range(table.samples)
            ]
            assert getattr(joined, name).tolist() == column, name
    assert all(getattr(plain.followed_by(plain), name) is None for name in several), (
        "nothing to know"
    )


def test_samples_become_a_batch_field_by_field() -> None:
    samples = []
    for s, (prompt, response, reward, correct, reason) in enumerate(
        [
            ([1, 2], [3], 1, True, "stop"),
            ([4], [5, 6, 7], -0.5, None, "length"),
            ([8], [9], 0, False, "stop"),
        ]
    ):
        logprobs = [-0.5 * token for token in response]
        sample = Sample(
            Prompt(str(s), "", "", tuple(prompt)), s // 2, s, 0, response, logprobs, reason, 0, 0
        )  # type: ignore[arg-type]
        sample.reward = reward
        sample.correct = correct
        samples.append(sample)
    batch = from_samples(samples)
    expected = {
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "cu_seqlens": [0, 3, 7, 9],
        "prompt_lengths": [2, 1, 1],
        "response_cu_seqlens": [0, 1, 4, 5],
        "rollout_logprobs": [-1.5, -2.5, -3.0, -3.5, -4.5],
        "rewards": [1.0, -0.5, 0.0],
        "correct": [True, False, False],
        "truncated": [False, True, False],
        "group_ids": [0, 0, 1],
    }
    found = {name: tensor.tolist() for name, tensor in batch.tensors().items()}
    assert len(set(found.pop("prompt_keys"))) == 3, "each sample is of a row of its own"
    assert found == expected
    windows = [
        replace(sample, window_start=start)
        for sample, start in zip(samples, (0, 3, 1), strict=True)
    ]
    cut = from_samples(windows)
    assert cut.window_starts is not None and cut.window_starts.tolist() == [0, 3, 1]
    assert cut.truncated.tolist() == [sample.goes_on for sample in windows]
    whole = [replace(sample, reward=1) for sample in samples]
    assert from_samples(whole).rewards.dtype == torch.float32, "whole numbers, too"


def test_turn_rewards_are_at_written_tokens_and_0_elsewhere() -> None:
    given: list[dict[str, Any]] = [
        {"turn_rewards": [0.5, 0, 0, 0.25], "loss_mask": [True, False, False, True]},
        {},
        {"turn_rewards": [0, 0, 1, 0]},
    ]
    samples = [
        Sample(
            Prompt(str(n), "", "", (1,)),
            n,
            0,
            0,
            [2, 3, 4, 5],
            [-1.0] * 4,
            "stop",
            0,
            0,
            reward=1.0,
            **more,
        )  # type: ignore[arg-type]
        for n, more in enumerate(given)
    ]
    batch = from_samples(samples)
    assert batch.turn_rewards is not None and batch.turn_rewards.dtype == torch.float32
    assert (
        batch.turn_rewards.tolist() == [0.5, 0.25, *[0] * 4, 0, 0, 1, 0]
        and batch.response_tokens == 10
    )
    assert from_samples(samples[1:2]).turn_rewards is None


def test_neighbours_are_taken_without_a_copy() -> None:
    values = torch.arange(10)
    bounds = torch.tensor([0, 2, 5, 9, 10])
    found = stretches(values, bounds, torch.tensor([1, 2]))
    assert found.tolist() == [2, 3, 4, 5, 6, 7, 8] and found.data_ptr() == values[2:].data_ptr()
    assert stretches(values, bounds, torch.tensor([0, 2])).tolist() == [0, 1, 5, 6, 7, 8]


def test_what_no_phase_has_filled_in_stays_away() -> None:
    part = make_batch().select([1, 2])
    assert part.values is None and part.selected is None and "returns" not in part.tensors()
    of_episodes = {"loss_mask", "observation_lengths", "segment_starts", "segments", "turn_rewards"}
    privileged = {"privileged_tokens", "privileged_lengths"}
    assert set(full_batch().rollout_tensors()) == {*part.tensors(), *of_episodes, *privileged} - {
        "prompt_keys"
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("values", torch.zeros(5)),
        ("shaped_rewards", torch.zeros(63)),  # per token where a response has one
        ("selected", torch.ones(6)),
        ("advantages", torch.zeros(63, dtype=torch.float64)),
    ],
)
def test_a_field_of_another_shape_or_dtype_is_refused_by_name(
    name: str, wrong: torch.Tensor
) -> None:
    batch = full_batch()
    assert batch.response_tokens == 63 and batch.samples == 6
    setattr(batch, name, wrong)
    with pytest.raises(ValueError, match=f"batch: {name} is torch"):
        batch.select([0])

"""Packs samples into a batch."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.data.batch import ExperienceBatch, offsets
from vapo_megatron.data.sample import Prompt, Sample


def from_samples(samples: Sequence[Sample]) -> ExperienceBatch:
    """Pack graded samples. Every response has at least one token (the engine's EOS counts).

    Their routed_experts move into the batch: samples have none any more.
    """
    masks = [s.written for s in samples]
    observed = any(s.loss_mask is not None for s in samples)
    pairs = list(zip(samples, masks, strict=True))
    starts = [int(mask[: s.window_start].sum()) for s, mask in pairs if s.window_start is not None]
    prompts = torch.tensor([len(s.prompt.token_ids) for s in samples])
    responses = torch.tensor([int(mask.sum()) for mask in masks])
    observations = torch.tensor([len(mask) for mask in masks]) - responses
    tokens = [
        part
        for s in samples
        for part in (np.array(s.prompt.token_ids, dtype=np.int32), s.response_ids)
    ]
    segmented = any(s.segment_starts for s in samples)
    privileged = [np.array(s.prompt.privileged_ids, dtype=np.int32) for s in samples]
    has_privileged = any(map(len, privileged))
    return ExperienceBatch(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        cu_seqlens=offsets(prompts + responses + observations),
        prompt_lengths=prompts,
        response_cu_seqlens=offsets(responses),
        rollout_logprobs=torch.from_numpy(
            np.concatenate([s.rollout_logprobs[mask] for s, mask in pairs])
        ),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        correct=torch.tensor([bool(s.correct) for s in samples]),
        truncated=torch.tensor([s.goes_on if starts else s.truncated for s in samples]),
        group_ids=torch.tensor([s.group for s in samples]),
        prompt_keys=torch.tensor([_key(s.prompt) for s in samples]),
        window_starts=torch.tensor(starts) if starts else None,
        loss_mask=_behind_prompts(samples, masks) if observed else None,
        observation_lengths=observations if observed else None,
        segment_starts=_behind_prompts(samples, [_begins(s) for s in samples])
        if segmented
        else None,
        segments=torch.tensor([1 + len(s.segment_starts) for s in samples]) if segmented else None,
        turn_rewards=_turn_rewards(pairs),
        privileged_tokens=torch.from_numpy(np.concatenate(privileged)) if has_privileged else None,
        privileged_lengths=torch.tensor([len(ids) for ids in privileged])
        if has_privileged
        else None,
        routed_experts=_take_experts(samples),
    )


def _begins(sample: Sample) -> NDArray[np.bool_]:
    return np.isin(np.arange(len(sample.response_ids)), sample.segment_starts)


def _behind_prompts(samples: Sequence[Sample], marks: Sequence[NDArray[np.bool_]]) -> Tensor:
    """Marks on response_ids of each sample as marks on all of its tokens, False on the
    prompt's."""
    prompts = [np.zeros(len(sample.prompt.token_ids), dtype=np.bool_) for sample in samples]
    return torch.from_numpy(
        np.concatenate([part for pair in zip(prompts, marks, strict=True) for part in pair])
    )


def _key(prompt: Prompt) -> int:
    digest = hashlib.blake2b(f"{prompt.source}\0{prompt.id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _turn_rewards(pairs: Sequence[tuple[Sample, NDArray[np.bool_]]]) -> Tensor | None:
    if all(sample.turn_rewards is None for sample, _ in pairs):
        return None
    return torch.from_numpy(
        np.concatenate([_at_written(s.turn_rewards, mask) for s, mask in pairs])
    )


def _at_written(
    rewards: NDArray[np.float32] | None, mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Rewards of all tokens at those that carry loss, each at the last one up to its own place (or
    at the first one): a mask may leave out the end of a turn, whose later turns did not earn it."""
    placed = np.zeros(int(mask.sum()), dtype=np.float32)
    if rewards is not None:
        np.add.at(placed, np.maximum(mask.cumsum() - 1, 0), rewards)
    return placed


def _take_experts(samples: Sequence[Sample]) -> Tensor | None:
    """Move the rows of all samples into one tensor, so that they are never held twice; None unless
    all have some."""
    choices = [s.routed_experts for s in samples if s.routed_experts is not None]
    if not choices or len(choices) != len(samples):
        return None
    joined = choices[0].new_empty(sum(map(len, choices)), choices[0].shape[1])
    start = 0
    del choices
    for sample in samples:
        rows = sample.routed_experts
        sample.routed_experts = None
        assert rows is not None
        joined[start : start + len(rows)] = rows
        start += len(rows)
    return joined

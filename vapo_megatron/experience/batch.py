"""One rollout's samples as flat tensors, the same on every rank.

Everything that algorithms see of a rollout is a table over response tokens with `cu_seqlens`. The table is replicated
rather than cut (about 40 bytes per token on the host): advantages, whitening, denominators and mini-batches are then
computed on every rank from the same numbers, and no parallel layout can change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.experience.sample import Sample


@dataclass
class ExperienceBatch:
    """S samples with N tokens in all, T of them response tokens. CPU tensors.

    Attributes:
        tokens: int32 [N], prompt and response of each sample.
        cu_seqlens: int64 [S+1], where each sample begins in `tokens`.
        prompt_lengths: int64 [S].
        response_cu_seqlens: int64 [S+1], where each response begins in tensors over response tokens.
        rollout_logprobs: float32 [T], under the sampling temperature, from the engine.
        rewards: float32 [S], before shaping.
        correct: bool [S], the verifier's grade.
        truncated: bool [S], ended for want of room.
        group_ids: int64 [S], samples of one prompt share one.
        routed_experts: the experts that the engine chose, uint8 or int16 [N - S, layers * experts per token], a row for
            each token but a sample's last; None where they were not asked for.
        token_fields: float32 [T] tensors by name, added as phases compute them: old_logprobs, entropies, values,
            advantages, returns.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    prompt_lengths: Tensor
    response_cu_seqlens: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    correct: Tensor
    truncated: Tensor
    group_ids: Tensor
    routed_experts: Tensor | None = None
    token_fields: dict[str, Tensor] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """S."""
        return len(self.prompt_lengths)

    @property
    def response_tokens(self) -> int:
        """T."""
        return int(self.response_cu_seqlens[-1])

    @property
    def response_lengths(self) -> Tensor:
        """int64 [S], EOS included."""
        return self.response_cu_seqlens.diff()

    @property
    def lengths(self) -> Tensor:
        """int64 [S], prompt and response."""
        return self.cu_seqlens.diff()

    def select(self, samples: Sequence[int]) -> "ExperienceBatch":
        """Some of the samples, in the order given, with their token_fields."""
        chosen = torch.tensor(samples, dtype=torch.int64)
        return ExperienceBatch(
            tokens=_stretches(self.tokens, self.cu_seqlens, chosen),
            cu_seqlens=offsets(self.lengths[chosen]),
            prompt_lengths=self.prompt_lengths[chosen],
            response_cu_seqlens=offsets(self.response_lengths[chosen]),
            rollout_logprobs=_stretches(self.rollout_logprobs, self.response_cu_seqlens, chosen),
            rewards=self.rewards[chosen],
            correct=self.correct[chosen],
            truncated=self.truncated[chosen],
            group_ids=self.group_ids[chosen],
            routed_experts=self._experts_of(samples),
            token_fields={
                name: _stretches(values, self.response_cu_seqlens, chosen) for name, values in self.token_fields.items()
            },
        )

    def sample_experts(self, sample: int) -> Tensor | None:
        """The rows of a sample in routed_experts."""
        if self.routed_experts is None:
            return None
        return self.routed_experts[
            int(self.cu_seqlens[sample]) - sample : int(self.cu_seqlens[sample + 1]) - sample - 1
        ]

    def _experts_of(self, samples: Sequence[int]) -> Tensor | None:
        if self.routed_experts is None:
            return None
        rows = (self.sample_experts(sample) for sample in samples)
        return torch.cat([self.routed_experts[:0], *(found for found in rows if found is not None)])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that make up the batch, by name, without token_fields."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token_fields"}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def offsets(lengths: Tensor) -> Tensor:
    """Where each of S stretches begins that lie end to end, and where the last one ends: int64 [S] -> [S + 1]."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def _stretches(values: Tensor, bounds: Tensor, chosen: Tensor) -> Tensor:
    """The stretches of the chosen samples, one after another, as a copy."""
    starts, ends = bounds[chosen].tolist(), bounds[chosen + 1].tolist()
    return torch.cat([values[:0], *(values[start:end] for start, end in zip(starts, ends, strict=True))])


def from_samples(samples: Sequence[Sample]) -> ExperienceBatch:
    """Pack graded samples. Every response has at least one token (the engine's EOS counts).

    Their routed_experts move into the batch: samples have none any more.
    """
    prompts = torch.tensor([len(s.prompt.token_ids) for s in samples], dtype=torch.int64)
    responses = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64)
    tokens = [part for s in samples for part in (np.array(s.prompt.token_ids, dtype=np.int32), s.response_ids)]
    return ExperienceBatch(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        cu_seqlens=offsets(prompts + responses),
        prompt_lengths=prompts,
        response_cu_seqlens=offsets(responses),
        rollout_logprobs=torch.from_numpy(np.concatenate([s.rollout_logprobs for s in samples])),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        correct=torch.tensor([bool(s.correct) for s in samples]),
        truncated=torch.tensor([s.truncated for s in samples]),
        group_ids=torch.tensor([s.group for s in samples], dtype=torch.int64),
        routed_experts=_take_experts(samples),
    )


def _take_experts(samples: Sequence[Sample]) -> Tensor | None:
    """Move the rows of all samples into one tensor, so that they are never held twice; None unless all have some."""
    found = [s.routed_experts for s in samples if s.routed_experts is not None]
    if not found or len(found) != len(samples):
        return None
    joined, start = found[0].new_empty(sum(map(len, found)), found[0].shape[1]), 0
    del found
    for sample in samples:
        rows, sample.routed_experts = sample.routed_experts, None
        assert rows is not None
        joined[start : start + len(rows)] = rows
        start += len(rows)
    return joined

"""One rollout's samples as flat tensors, the same on every rank.

Everything that algorithms see of a rollout is a table over response tokens with `cu_seqlens`. The table is replicated
rather than cut (about 40 bytes a token on the host): advantages, whitening, denominators and mini-batches are then
computed on every rank from the same numbers, and no parallel layout can change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

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
        correct: bool [S], the verifier's verdict.
        truncated: bool [S], ended for want of room.
        group_ids: int64 [S], samples of one prompt share one.
        routed_experts: the experts that the engine chose, uint8 or int16 [N - S, layers * experts a token], a row for
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
        tokens, responses = _ranges(self.cu_seqlens, chosen), _ranges(self.response_cu_seqlens, chosen)
        return ExperienceBatch(
            tokens=self.tokens[tokens],
            cu_seqlens=_offsets(self.lengths[chosen]),
            prompt_lengths=self.prompt_lengths[chosen],
            response_cu_seqlens=_offsets(self.response_lengths[chosen]),
            rollout_logprobs=self.rollout_logprobs[responses],
            rewards=self.rewards[chosen],
            correct=self.correct[chosen],
            truncated=self.truncated[chosen],
            group_ids=self.group_ids[chosen],
            routed_experts=self._experts_of(samples),
            token_fields={name: values[responses] for name, values in self.token_fields.items()},
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
        return _joined([self.routed_experts[:0], *(self.sample_experts(s) for s in samples)])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that make up the batch, by name, without token_fields."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token_fields"}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def _ranges(bounds: Tensor, chosen: Tensor) -> Tensor:
    """Indices of all tokens of the chosen samples."""
    pieces = [torch.arange(int(bounds[s]), int(bounds[s + 1])) for s in chosen]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def from_samples(samples: Sequence[Sample]) -> ExperienceBatch:
    """Pack graded samples. Every response has at least one token (the engine's EOS counts)."""
    prompts = torch.tensor([len(s.prompt.token_ids) for s in samples], dtype=torch.int64)
    responses = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64)
    flat = [token for s in samples for token in (*s.prompt.token_ids, *s.response_ids)]
    return ExperienceBatch(
        tokens=torch.tensor(flat, dtype=torch.int32),
        cu_seqlens=_offsets(prompts + responses),
        prompt_lengths=prompts,
        response_cu_seqlens=_offsets(responses),
        rollout_logprobs=torch.tensor([x for s in samples for x in s.rollout_logprobs], dtype=torch.float32),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        correct=torch.tensor([bool(s.correct) for s in samples]),
        truncated=torch.tensor([s.truncated for s in samples]),
        group_ids=torch.tensor([s.group for s in samples], dtype=torch.int64),
        routed_experts=_compact([s.routed_experts for s in samples]),
    )


def _compact(experts: Sequence[Tensor | None]) -> Tensor | None:
    """The rows of all samples in the smallest type that holds them; None unless every sample has some."""
    rows = _joined(experts)
    return rows if rows is None or int(rows.max()) > 255 else rows.to(torch.uint8)


def concatenate(batches: Sequence[ExperienceBatch]) -> ExperienceBatch:
    """Several rollouts as one; groups stay apart. token_fields that all of them have are kept."""
    groups, first = [], 0
    for batch in batches:
        groups.append(batch.group_ids + first)
        first += int(batch.group_ids.max()) + 1
    shared = set.intersection(*(set(b.token_fields) for b in batches))
    return ExperienceBatch(
        tokens=torch.cat([b.tokens for b in batches]),
        cu_seqlens=_offsets(torch.cat([b.lengths for b in batches])),
        prompt_lengths=torch.cat([b.prompt_lengths for b in batches]),
        response_cu_seqlens=_offsets(torch.cat([b.response_lengths for b in batches])),
        rollout_logprobs=torch.cat([b.rollout_logprobs for b in batches]),
        rewards=torch.cat([b.rewards for b in batches]),
        correct=torch.cat([b.correct for b in batches]),
        truncated=torch.cat([b.truncated for b in batches]),
        group_ids=torch.cat(groups),
        routed_experts=_joined([b.routed_experts for b in batches]),
        token_fields={name: torch.cat([b.token_fields[name] for b in batches]) for name in sorted(shared)},
    )


def _joined(experts: Sequence[Tensor | None]) -> Tensor | None:
    """Rows of several samples or batches as one tensor; None unless every one has some."""
    found = [rows for rows in experts if rows is not None]
    return torch.cat(found) if found and len(found) == len(experts) else None

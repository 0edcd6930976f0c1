"""Samples as flat tensors over tokens, and tables with one row per sample.

Response tokens are those that the policy wrote. Tokens that it was given in between (observations:
a tool's output, the user's next message) are only part of the sequence that models read. They are
not in the tensors over response tokens, so no loss, denominator, length or metric counts them, and
GAE steps over them.

Everything that algorithms see of a rollout is a table over response tokens with `cu_seqlens`. A
rank holds some of the samples of a rollout as an ExperienceBatch, and the per-sample fields of all
samples (SampleTable): denominators and mini-batches are computed on every rank from the same
    numbers, and no parallel layout can change them.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

# The first dimension of a field, from which select() and the checks of shapes follow.
#   tokens           N, prompt and response of each sample, cut at cu_seqlens
#   positions        N - S, every token but a sample's last
#   response_tokens  T, cut at response_cu_seqlens
#   privileged       P, cut as privileged_lengths say
#   samples          S
#   offsets          S + 1, where each sample's part begins and the last one ends
Over = Literal["tokens", "positions", "response_tokens", "privileged", "samples", "offsets"]
# Sampled fields of episodes, and of a critic that reads more than the policy.
_OF_SOME_ROLLOUTS = (
    "loss_mask",
    "observation_lengths",
    "segment_starts",
    "segments",
    "turn_rewards",
    "privileged_tokens",
    "privileged_lengths",
)


def _over(over: Over, dtype: torch.dtype | None) -> dict[str, Any]:
    """Metadata of a field. dtype None: several are possible."""
    return {"over": over, "dtype": dtype}


@dataclass
class ExperienceBatch:
    """S samples with N tokens in all, T of them response tokens. CPU tensors.

    Attributes:
        tokens: int32 [N], prompt, response and observations of each sample.
        cu_seqlens: int64 [S+1], where each sample begins in `tokens`.
        prompt_lengths: int64 [S].
        response_cu_seqlens: int64 [S+1], where each response begins in tensors over response
            tokens.
        rollout_logprobs: float32 [T], under the sampling temperature, from the engine.
        rewards: float32 [S], before shaping.
        correct: bool [S], the verifier's grade.
        truncated: bool [S], ended by a length limit.
        group_ids: int64 [S], samples of one prompt share one.
        prompt_keys: int64 [S], the same for samples of one row of the data in every step; None
            where none is read.
        window_starts: int64 [S], the first response token that the policy was not trained on in an
            earlier step; None where responses come whole. Unfinished ones count as truncated, and
            no others.
        loss_mask: bool [N], the response tokens among all; None where no sample has an observation.
        observation_lengths: int64 [S], tokens of each sample that are neither prompt nor response;
            None with loss_mask.
        segment_starts: bool [N], tokens before which a sample's context ends: models read each
            segment of a sample as a separate sequence, algorithms read all its response tokens as
            one response. None: one segment each.
        segments: int64 [S], segments of each sample; None with segment_starts.
        turn_rewards: float32 [T], the part of `rewards` that came before the end, where it came;
            None: nothing did.
        privileged_tokens: int32 [P], what the critic alone reads, before each segment; None:
            nothing.
        privileged_lengths: int64 [S], their number; None with privileged_tokens.
        routed_experts: the experts that the engine chose, uint8 or int16 [N - S, layers * experts
            per token], a row for each token but a sample's last; None where they were not asked
            for.

    Phases fill in the others; None until then, or where the algorithm has no use for them:
        greedy_rewards: float32 [S], the shaped reward of the greedy response to the sample's prompt
            (ReMax).
        old_logprobs: float32 [T], of the policy that the updates start from, at the sampling
            temperature.
        entropies: float32 [T], of that policy, in nats.
        hidden_states: [T, hidden], that policy's last ones, in its dtype, where the critic is a
            probe of them.
        ref_logprobs: float32 [T], of the reference policy.
        values: float32 [T], the critic's, of the state before each token.
        shaped_rewards: float32 [S].
        advantages: float32 [T].
        returns: float32 [T], value targets.
        selected: bool [S], whether the sample carries loss.
        importance_weights: float32 [T], on the policy loss, for the engine's policy not being the
            trainer's.

    Raises:
        ValueError: a field's shape or dtype is not the one above.
    """

    tokens: Tensor = field(metadata=_over("tokens", torch.int32))
    cu_seqlens: Tensor = field(metadata=_over("offsets", torch.int64))
    prompt_lengths: Tensor = field(metadata=_over("samples", torch.int64))
    response_cu_seqlens: Tensor = field(metadata=_over("offsets", torch.int64))
    rollout_logprobs: Tensor = field(metadata=_over("response_tokens", torch.float32))
    rewards: Tensor = field(metadata=_over("samples", torch.float32))
    correct: Tensor = field(metadata=_over("samples", torch.bool))
    truncated: Tensor = field(metadata=_over("samples", torch.bool))
    group_ids: Tensor = field(metadata=_over("samples", torch.int64))
    prompt_keys: Tensor | None = field(default=None, metadata=_over("samples", torch.int64))
    window_starts: Tensor | None = field(default=None, metadata=_over("samples", torch.int64))
    loss_mask: Tensor | None = field(default=None, metadata=_over("tokens", torch.bool))
    observation_lengths: Tensor | None = field(default=None, metadata=_over("samples", torch.int64))
    segment_starts: Tensor | None = field(default=None, metadata=_over("tokens", torch.bool))
    segments: Tensor | None = field(default=None, metadata=_over("samples", torch.int64))
    turn_rewards: Tensor | None = field(
        default=None, metadata=_over("response_tokens", torch.float32)
    )
    privileged_tokens: Tensor | None = field(
        default=None, metadata=_over("privileged", torch.int32)
    )
    privileged_lengths: Tensor | None = field(default=None, metadata=_over("samples", torch.int64))
    routed_experts: Tensor | None = field(default=None, metadata=_over("positions", None))
    greedy_rewards: Tensor | None = field(default=None, metadata=_over("samples", torch.float32))
    old_logprobs: Tensor | None = field(
        default=None, metadata=_over("response_tokens", torch.float32)
    )
    entropies: Tensor | None = field(default=None, metadata=_over("response_tokens", torch.float32))
    hidden_states: Tensor | None = field(default=None, metadata=_over("response_tokens", None))
    ref_logprobs: Tensor | None = field(
        default=None, metadata=_over("response_tokens", torch.float32)
    )
    values: Tensor | None = field(default=None, metadata=_over("response_tokens", torch.float32))
    shaped_rewards: Tensor | None = field(default=None, metadata=_over("samples", torch.float32))
    advantages: Tensor | None = field(
        default=None, metadata=_over("response_tokens", torch.float32)
    )
    returns: Tensor | None = field(default=None, metadata=_over("response_tokens", torch.float32))
    selected: Tensor | None = field(default=None, metadata=_over("samples", torch.bool))
    importance_weights: Tensor | None = field(
        default=None, metadata=_over("response_tokens", torch.float32)
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            tensor = getattr(self, f.name)
            size = self._size(f.metadata["over"])
            dtype = f.metadata["dtype"]
            if tensor is not None and (len(tensor) != size or dtype not in (None, tensor.dtype)):
                raise ValueError(
                    f"batch: {f.name} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{dtype or 'any dtype'} [{size}]"
                )

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
        """int64 [S], prompt, response and observations."""
        return self.cu_seqlens.diff()

    def response_places(self, sample: int) -> Tensor:
        """Positions of a sample's response tokens among its own tokens, int64, ascending."""
        if self.loss_mask is None:
            prompt = int(self.prompt_lengths[sample])
            return torch.arange(prompt, int(self.cu_seqlens[sample + 1] - self.cu_seqlens[sample]))
        return (
            self.loss_mask[int(self.cu_seqlens[sample]) : int(self.cu_seqlens[sample + 1])]
            .nonzero()
            .squeeze(1)
        )

    def segment_bounds(self, sample: int) -> list[int]:
        """Starts of a sample's segments among its own tokens, and the end of the last one."""
        start = int(self.cu_seqlens[sample])
        end = int(self.cu_seqlens[sample + 1])
        inner = (
            []
            if self.segment_starts is None
            else self.segment_starts[start:end].nonzero().squeeze(1).tolist()
        )
        return [0, *inner, end - start]

    def table(self) -> "SampleTable":
        """The per-sample fields."""
        taken: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(SampleTable)}
        return SampleTable(**taken)

    def select(self, samples: Sequence[int]) -> "ExperienceBatch":
        """Some of the samples, in the order given, with every field that is set.

        Raises:
            ValueError: a field that was filled in has another shape or dtype than it should.
        """
        self.__post_init__()
        chosen = torch.tensor(samples, dtype=torch.int64)
        taken = {}
        for f in fields(self):
            tensor = getattr(self, f.name)
            over = f.metadata["over"]
            if tensor is None:
                continue
            if over == "offsets":
                taken[f.name] = offsets(tensor.diff()[chosen])
            elif over == "samples":
                taken[f.name] = tensor[chosen]
            else:
                taken[f.name] = stretches(tensor, self.bounds(over), chosen)
        return ExperienceBatch(**taken)

    def sample_experts(self, sample: int) -> Tensor | None:
        """The rows of a sample in routed_experts."""
        if self.routed_experts is None:
            return None
        return self.routed_experts[
            int(self.cu_seqlens[sample]) - sample : int(self.cu_seqlens[sample + 1]) - sample - 1
        ]

    def tensors(self) -> dict[str, Tensor]:
        """All fields that are not None, by name."""
        return {
            f.name: tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None
        }

    def rollout_tensors(self) -> dict[str, Tensor]:
        """The fields that were sampled and graded, without routed_experts."""
        names = [f.name for f in fields(self) if f.default is MISSING]
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name in (*names, *_OF_SOME_ROLLOUTS)
        }

    def bounds(self, over: Over) -> Tensor:
        """Where each sample begins in a tensor over tokens of a kind, int64 [S + 1]."""
        if over == "response_tokens":
            return self.response_cu_seqlens
        if over == "privileged":
            return offsets(self.table().rows(over))
        return (
            self.cu_seqlens
            if over == "tokens"
            else self.cu_seqlens - torch.arange(self.samples + 1)
        )

    def _size(self, over: Over) -> int:
        if over in ("samples", "offsets"):
            return self.samples + (over == "offsets")
        return int(self.bounds(over)[-1])


@dataclass
class SampleTable:
    """Per-sample fields of S samples; an ExperienceBatch has them under the same names.

    Attributes:
        response_lengths: int64 [S], EOS included.
    """

    prompt_lengths: Tensor
    response_lengths: Tensor
    rewards: Tensor
    correct: Tensor
    truncated: Tensor
    group_ids: Tensor
    prompt_keys: Tensor | None = None
    window_starts: Tensor | None = None
    observation_lengths: Tensor | None = None
    segments: Tensor | None = None
    privileged_lengths: Tensor | None = None
    greedy_rewards: Tensor | None = None
    shaped_rewards: Tensor | None = None
    selected: Tensor | None = None

    @property
    def samples(self) -> int:
        """S."""
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Tensor:
        """int64 [S], prompt, response and observations."""
        lengths = self.prompt_lengths + self.response_lengths
        return lengths if self.observation_lengths is None else lengths + self.observation_lengths

    @property
    def critic_lengths(self) -> Tensor:
        """int64 [S], with the privileged tokens that the critic reads before each segment."""
        if self.privileged_lengths is None:
            return self.lengths
        return self.lengths + self.privileged_lengths * (
            1 if self.segments is None else self.segments
        )

    @property
    def new_lengths(self) -> Tensor:
        """int64 [S], response tokens that the policy has not been trained on."""
        return (
            self.response_lengths
            if self.window_starts is None
            else self.response_lengths - self.window_starts
        )

    def rows(self, over: Over) -> Tensor:
        """How many rows each sample has in a tensor over tokens of a kind, int64 [S]."""
        if over == "response_tokens":
            return self.response_lengths
        if over == "privileged":
            return self.lengths * 0 if self.privileged_lengths is None else self.privileged_lengths
        return self.lengths - int(over == "positions")

    def select(self, samples: Tensor) -> "SampleTable":
        """Some of the samples, in the order given: int64."""
        taken: dict[str, Any] = {}
        for f in fields(self):
            tensor = getattr(self, f.name)
            taken[f.name] = None if tensor is None else tensor[samples]
        return SampleTable(**taken)

    def followed_by(self, other: "SampleTable") -> "SampleTable":
        """The samples of both tables, with the fields that every table has."""
        names = [f.name for f in fields(self) if f.default is MISSING]
        joined = SampleTable(
            *(torch.cat((getattr(self, name), getattr(other, name))) for name in names)
        )
        for name, missing in (
            ("observation_lengths", 0),
            ("segments", 1),
            ("privileged_lengths", 0),
        ):
            columns = [(getattr(table, name), table.prompt_lengths) for table in (self, other)]
            if any(column is not None for column, _ in columns):
                parts = [
                    torch.full_like(like, missing) if column is None else column
                    for column, like in columns
                ]
                setattr(joined, name, torch.cat(parts))
        return joined

    def batch(self, **over_tokens: Tensor) -> ExperienceBatch:
        """A batch of these samples, with the given tensors over tokens."""
        tensors = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name != "response_lengths"
        }
        bounds = {
            "cu_seqlens": offsets(self.lengths),
            "response_cu_seqlens": offsets(self.response_lengths),
        }
        return ExperienceBatch(**over_tokens, **bounds, **tensors)


OVER: dict[str, Over] = {f.name: f.metadata["over"] for f in fields(ExperienceBatch)}


def offsets(lengths: Tensor) -> Tensor:
    """Starts of S consecutive stretches of these lengths, and the end of the last one: int64 [S] ->
    [S + 1]."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def stretches(values: Tensor, bounds: Tensor, chosen: Tensor) -> Tensor:
    """The stretches of the chosen samples, one after another; a view where they lie so already."""
    if len(chosen) and bool((chosen.diff() == 1).all()):
        return values[int(bounds[chosen[0]]) : int(bounds[chosen[-1] + 1])]
    starts = bounds[chosen].tolist()
    ends = bounds[chosen + 1].tolist()
    return torch.cat(
        [values[:0], *(values[start:end] for start, end in zip(starts, ends, strict=True))]
    )

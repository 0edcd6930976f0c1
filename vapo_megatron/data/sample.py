"""Prompts, which go to the engines, and samples, which come back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
# How the grade_reason begins of an episode whose agent graded it, and of one that broke: no
# verifier is asked.
BROKEN = "broken: "
GRADED_BY_AGENT = ("agent", BROKEN)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem, ready to be sent to an engine.

    token_ids holds the prompt as the model reads it (chat template applied); answer is the
    ground-truth answer for the verifier; cursor numbers the prompts of a run in the order in which
    they were drawn; extra is what a user's function is given besides; reward is what section reward
    has for this row alone, as JSON. privileged_ids are tokens that the critic alone reads, before
    the prompt. before are messages before the problem: a system message, earlier turns.
    """

    id: str
    problem: str
    answer: str
    token_ids: tuple[int, ...]
    cursor: int = 0
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    reward: str = ""
    privileged_ids: tuple[int, ...] = ()
    before: tuple[Mapping[str, str], ...] = field(default=(), hash=False)


@dataclass(slots=True, eq=False)
class Sample:
    """One response to one prompt.

    response_ids int32 [response] and rollout_logprobs float32 [response] may be given as any
    sequences of numbers. rollout_logprobs has one natural logarithm per response token, under the
    sampling temperature, as the engine reported it. weight_version is the version of the weights
    that made the last token (the oldest one that took part is weight_version_oldest); versions has
    each that took part, with its number of tokens. reward is what the algorithm is given before
    shaping; correct is the verifier's grade and stays apart from every shaping;
    extracted is the answer that it read out of the text; copied: correct, but it restates the
    problem. routed_experts, where they were requested,
    are the experts that the engine chose for each token but the last: uint8 or int16 [prompt +
    response - 1, layers * experts per token]. window_start, with rollout.windows, is the first
    token that the policy has not been trained on yet. engine is the URL of the server that wrote
    it; empty where several did. loss_mask, bool [response], is False on tokens that the policy did
    not write but was given on the way, such as a tool's output, and on those that
    algorithm.mask_function takes out: nothing is learnt from them, and their rollout_logprobs are
    not read. None: it wrote all of them. segment_starts are the places in response_ids where the
    context restarts with a rewritten history: what models read there has nothing
    before it. The prompt of such a segment is an observation. Empty: one context. turn_rewards,
    float32 [response], are the rewards that an episode gave on the way, each on the last token of
    its turn; reward is the sum of them and of what came at the end. None: all of it came at the
    end. episode has the figures of the agent's episode (agents/) that the sample was recorded in,
    whose prompt is its first request's; None for a response that was requested from an engine
    directly. turns has, in the order of the episode, the place of each turn's first token, the
    place after its last one, and whether it was truncated. A sample equals itself alone.
    """

    prompt: Prompt
    group: int
    index: int
    seed: int
    response_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    weight_version: int
    weight_version_oldest: int
    text: str = ""
    reward: float | None = None
    correct: bool | None = None
    grade_reason: str = ""
    extracted: str = ""
    copied: bool = False
    extra: dict[str, float] = field(default_factory=dict)
    routed_experts: Tensor | None = None
    versions: tuple[tuple[int, int], ...] = ()
    window_start: int | None = None
    engine: str = ""
    loss_mask: NDArray[np.bool_] | None = None
    segment_starts: tuple[int, ...] = ()
    turn_rewards: NDArray[np.float32] | None = None
    episode: dict[str, float] | None = None
    turns: tuple[tuple[int, int, bool], ...] = ()

    def __post_init__(self) -> None:
        self.response_ids = np.asarray(self.response_ids, dtype=np.int32)
        self.rollout_logprobs = np.asarray(self.rollout_logprobs, dtype=np.float32)
        if self.turn_rewards is not None:
            self.turn_rewards = np.asarray(self.turn_rewards, dtype=np.float32)
        if self.loss_mask is not None:
            self.loss_mask = np.asarray(self.loss_mask, dtype=np.bool_)
            if self.loss_mask.shape != self.response_ids.shape or not self.loss_mask.any():
                raise ValueError(
                    f"sample {self.group}/{self.index}: its loss mask is "
                    f"{int(self.loss_mask.sum())} of {len(self.loss_mask)} tokens, expected at "
                    f"least one of {len(self.response_ids)}"
                )

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the token limit."""
        return self.finish_reason == "length"

    @property
    def written(self) -> NDArray[np.bool_]:
        """loss_mask, all True where there is none."""
        return (
            np.ones(len(self.response_ids), dtype=np.bool_)
            if self.loss_mask is None
            else self.loss_mask
        )

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """The tokens that the policy wrote after the last observation."""
        observed = np.flatnonzero(~self.written)
        return self.response_ids[observed[-1] + 1 :] if len(observed) else self.response_ids

    @property
    def goes_on(self) -> bool:
        """Whether the response is unfinished, so that more of it will be generated."""
        return self.finish_reason == "abort"

    @property
    def is_trained(self) -> bool:
        """Whether the response has been fully trained on, window by window."""
        return self.window_start == len(self.response_ids)

    @property
    def new_tokens(self) -> int:
        """Tokens that the policy wrote and has not been trained on."""
        return int(self.written[self.window_start or 0 :].sum())

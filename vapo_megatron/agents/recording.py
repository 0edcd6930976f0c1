"""The tokens of an episode, recorded from its requests; the policy's tokens are kept exactly as
sampled."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vapo_megatron.data.sample import Sample
from vapo_megatron.files import parse_json

Message = dict[str, Any]
# Role, content and tool calls.
Compared = tuple[str, str, list[tuple[Any, Any]]]


@dataclass
class Segment:
    """One growing context: every request that continues it appends to it.

    Attributes:
        messages: of the last request and its answer, to compare with the next request.
        tools: of every request.
        prompt_ids: the first request's tokens.
        request: the last request's messages, as templates read them.
        shown: these as the chat template wrote them; empty if it could not, None if it was not
            asked.
        outlines: these without what the template cannot tell apart.
        by_template: whether it began because the template rewrote the history.
        token_ids, logprobs, mask: what follows the prompt; mask is True on tokens that the policy
            wrote.
        turns: the policy's responses, as the dispatcher gave them.
        ends: of each turn, its number in the episode and the place of its last token in token_ids.
    """

    messages: list[Compared]
    tools: list[Message]
    prompt_ids: list[int]
    request: list[Message] = field(default_factory=list)
    shown: str | None = ""
    outlines: list[bytes] = field(default_factory=list)
    by_template: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[Sample] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)

    @property
    def read(self) -> int:
        """Tokens that the model has read: all but the last one drawn."""
        return len(self.prompt_ids) + len(self.token_ids) - 1 if self.turns else 0

    def continues_in(self, messages: list[Compared], tools: list[Message]) -> bool:
        """Whether a request's messages extend the recorded ones."""
        count = len(self.messages)
        return tools == self.tools and len(messages) > count and messages[:count] == self.messages

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy is given."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.mask += [False] * len(token_ids)

    def write(self, turn: Sample, number: int, messages: list[Compared]) -> None:
        """Append what the policy wrote in the turn of this number, and update the conversation."""
        self.token_ids += turn.response_ids.tolist()
        self.logprobs += turn.rollout_logprobs.tolist()
        self.mask += [True] * len(turn.response_ids)
        self.turns.append(turn)
        self.ends.append((number, len(self.token_ids) - 1))
        self.messages = messages


class Recording:
    """All segments of an episode. A request continues the segment that it extends, or begins a new
    one.

    only_newest: no older segment is continued. Later turns then always come last in
        fields().

    Attributes:
        rendered_whole: requests for which the chat template wrote the whole history again, as no
            shorter conversation could stand in for it.
    """

    def __init__(self, only_newest: bool = False) -> None:
        self.segments: list[Segment] = []
        self.rendered_whole = 0
        self._only_newest = only_newest

    def segment_of(self, messages: list[Compared], tools: list[Message]) -> Segment | None:
        """The segment that a request continues; None: a new one."""
        segments = self.segments[-1:] if self._only_newest else reversed(self.segments)
        return next((s for s in segments if s.continues_in(messages, tools)), None)

    @property
    def turns(self) -> int:
        """Responses of the policy, over all segments."""
        return sum(len(segment.turns) for segment in self.segments)

    @property
    def ordered(self) -> list[Segment]:
        """Segments in the order of their last turns."""
        return sorted(self.segments, key=lambda segment: segment.ends[-1][0])

    @property
    def tokens(self) -> int:
        """Number of tokens that models read, over all segments, prompts included."""
        return sum(len(segment.prompt_ids) + len(segment.token_ids) for segment in self.segments)

    def figures(self) -> dict[str, float]:
        """The episode's metrics. Rewritten: prompt tokens of the segments after the first."""
        written = sum(sum(segment.mask) for segment in self.segments)
        rewritten = sum(len(segment.prompt_ids) for segment in self.segments[1:])
        return {
            "turns": float(self.turns),
            "segments": float(len(self.segments)),
            "segments_by_template": float(sum(segment.by_template for segment in self.segments)),
            "tokens_written": float(written),
            "tokens_observed": float(sum(len(segment.mask) for segment in self.segments) - written),
            "tokens_rewritten": float(rewritten),
            "rendered_whole": float(self.rendered_whole),
        }

    def fields(self, rewards: Sequence[float]) -> dict[str, Any]:
        """Sample fields for the episode: everything after the first segment's prompt, in the order
        of `ordered`, with the prompts of later segments as observations.

        rewards: one per turn of the episode; empty where no turn was given one.
        """
        ordered = self.ordered
        ids = list[int]()
        logprobs = list[float]()
        mask = list[bool]()
        places = dict[int, tuple[int, int, bool]]()
        starts = []
        for segment in ordered:
            if segment is not ordered[0]:
                starts.append(len(ids))
                ids += segment.prompt_ids
                logprobs += [0.0] * len(segment.prompt_ids)
                mask += [False] * len(segment.prompt_ids)
            for turn, (number, last) in zip(segment.turns, segment.ends, strict=True):
                end = len(ids) + last + 1
                places[number] = end - len(turn.response_ids), end, turn.truncated
            ids += segment.token_ids
            logprobs += segment.logprobs
            mask += segment.mask
        placed = np.zeros(len(ids), dtype=np.float32)
        for number, reward in enumerate(rewards):
            placed[places[number][1] - 1] = reward
        turns = [turn for segment in ordered for turn in segment.turns]
        engines = {turn.engine for turn in turns}
        return {
            "response_ids": np.array(ids, dtype=np.int32),
            "rollout_logprobs": np.array(logprobs, dtype=np.float32),
            "loss_mask": None if all(mask) else np.array(mask, dtype=np.bool_),
            "segment_starts": tuple(starts),
            "turn_rewards": placed if placed.any() else None,
            "routed_experts": _experts(ordered),
            "weight_version": turns[-1].weight_version,
            "weight_version_oldest": min(turn.weight_version_oldest for turn in turns),
            "versions": tuple(entry for turn in turns for entry in turn.versions),
            "engine": engines.pop() if len(engines) == 1 else "",
            "finish_reason": turns[-1].finish_reason,
            "turns": tuple(place for _, place in sorted(places.items())),
        }


def recorded_turns(sample: Sample) -> list[Sample]:
    """The turns of an episode in its order, each with all that it was drawn after as its prompt:
    the inverse of Recording.fields(), except for experts and engines."""
    ids = sample.response_ids
    versions = list(sample.versions)
    turns = dict[int, Sample]()
    for start, end, truncated in sorted(sample.turns):
        drawn_by = [versions.pop(0)]
        while sum(count for _, count in drawn_by) < end - start:
            drawn_by.append(versions.pop(0))
        begins = max((place for place in sample.segment_starts if place <= start), default=None)
        prompt = sample.prompt.token_ids if begins is None else ()
        turns[start] = Sample(
            replace(sample.prompt, token_ids=(*prompt, *ids[begins or 0 : start].tolist())),
            sample.group,
            sample.index,
            sample.seed,
            ids[start:end],
            sample.rollout_logprobs[start:end],
            "length" if truncated else "stop",
            weight_version=drawn_by[-1][0],
            weight_version_oldest=min(version for version, _ in drawn_by),
            versions=tuple(drawn_by),
        )
    return [turns[start] for start, _, _ in sample.turns]


def _experts(segments: Sequence[Segment]) -> Tensor | None:
    """Sample.routed_experts of an episode: a token keeps the experts of the request that read it
    first, with which the next one was drawn. A segment's last token, which is not read, has those
    of the token before it."""
    rows: list[Tensor] = []
    for segment in segments:
        rows += [turn.routed_experts for turn in segment.turns if turn.routed_experts is not None]
        rows += [rows[-1][-1:]] if rows else []
    return torch.cat(rows[:-1]) if rows else None


def as_templates_read(message: Message, as_json: bool = False) -> Message:
    """A message as chat templates read it: its content is text, the arguments of its calls are
    objects, and a developer's message is a system's, as older templates know only the latter.

    as_json: arguments as text, for templates that read them so.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    message = {**message, "content": content}
    if message["role"] == "developer":
        message["role"] = "system"
    calls = []
    for call in message.pop("tool_calls", None) or ():
        arguments = call["function"]["arguments"]
        with suppress(ValueError, TypeError):  # a policy may write invalid JSON
            arguments = parse_json(arguments)
        if as_json and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return message | ({"tool_calls": calls} if calls else {})


def comparable(messages: Sequence[Message]) -> list[Compared]:
    """What identifies messages that are as templates read them."""
    calls = [[call["function"] for call in message.get("tool_calls", ())] for message in messages]
    functions = [
        [(function["name"], function["arguments"]) for function in called] for called in calls
    ]
    return [
        (m["role"], m["content"], called) for m, called in zip(messages, functions, strict=True)
    ]

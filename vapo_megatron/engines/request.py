"""Requests to engines: responses to prompts, which may be written in several parts."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.engines.server.client import Completion
from vapo_megatron.weights.routed_experts import ExpertChoices


@dataclass(frozen=True)
class GroupRequest:
    """Responses to draw to one prompt.

    Attributes:
        prompt: token ids, and the cursor from which the seeds of responses follow.
        samples: number of responses, which form a group.
        sampling: temperature, top_p, top_k.
        max_new_tokens: largest number of tokens of a response.
        seed: seed of the run. With rollout.deterministic a response depends only on (seed, prompt.cursor, index) and
            the weights.
        weight_version: version of the engines' weights; a response from other weights is an error.
        goes_on: a response may be stopped or get other weights while it is written.
        begun: the responses so far, in order; unfinished ones (finish_reason abort) go on. For an agent without a
            window: turns that each episode repeats; the last one is drawn anew.
        window: largest number of tokens to write of a response now, or for an agent of turns to play; one that gets
            there goes on later. None: all.
        routed_experts: the model's, if samples are to hold the experts of their tokens; needs rollout.router_replay.
        group: number of the group, copied to its samples.
        engine: URL of the server that has the prompt in its cache, preferred if it has room.
    """

    prompt: Prompt
    samples: int
    sampling: SamplingConfig
    max_new_tokens: int
    seed: int
    weight_version: int
    routed_experts: ExpertChoices | None = None
    group: int = 0
    goes_on: bool = False
    begun: Sequence[Sample] = ()
    window: int | None = None
    engine: str = ""

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of the group: response lengths are not known beforehand."""
        return self.samples * (len(self.prompt.token_ids) + self.max_new_tokens)

    def room(self, written: int) -> int:
        """Largest number of tokens to write now of a response that has `written` tokens already."""
        left = self.max_new_tokens - written
        return left if self.window is None else min(left, self.window)


@dataclass(frozen=True)
class GenerationRequest:
    """Responses to draw to several prompts, samples_per_prompt to each; samples come in the order of prompts.

    max_new_tokens: one limit for each prompt in place of sampling's, for prompts that already hold a part of a
    response. begun: likewise, turns to repeat. Other fields: see GroupRequest.
    """

    prompts: Sequence[Prompt]
    samples_per_prompt: int
    sampling: SamplingConfig
    seed: int
    weight_version: int
    routed_experts: ExpertChoices | None = None
    max_new_tokens: Sequence[int] | None = None
    begun: Sequence[Sequence[Sample]] | None = None

    @property
    def num_samples(self) -> int:
        """Number of responses."""
        return len(self.prompts) * self.samples_per_prompt

    def limit(self, group: int) -> int:
        """Largest number of tokens of a response to the prompt at this place in prompts."""
        return self.sampling.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens[group]

    def groups(self) -> Iterator[GroupRequest]:
        """One request for each prompt."""
        for group, prompt in enumerate(self.prompts):
            yield GroupRequest(
                prompt,
                self.samples_per_prompt,
                self.sampling,
                self.limit(group),
                self.seed,
                self.weight_version,
                self.routed_experts,
                group,
                begun=() if self.begun is None else self.begun[group],
            )


def response_seed(seed: int, cursor: int, index: int) -> int:
    """Seed of response `index` to prompt `cursor` of a run, in [0, 2^63): the same on every machine and version."""
    message = struct.pack("<qqq", seed, cursor, index)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def empty_response(group: GroupRequest, index: int) -> Sample:
    """A response without tokens."""
    seed = response_seed(group.seed, group.prompt.cursor, index)
    version, start = group.weight_version, None if group.window is None else 0
    tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    empty = Sample(group.prompt, group.group, index, seed, tokens, logprobs, "abort", version, version)
    return replace(empty, window_start=start)


def continued_response(sample: Sample, completion: Completion, group: GroupRequest, url: str) -> Sample:
    """A response with a continuation written by the server at this URL."""
    window_ends = completion.finish_reason == "length" and len(completion.token_ids) == group.window
    goes_on = window_ends and group.room(len(sample.response_ids) + len(completion.token_ids)) > 0
    begun = len(sample.response_ids) > 0
    ids, logprobs = completion.token_ids, completion.logprobs
    return replace(
        sample,
        response_ids=np.concatenate((sample.response_ids, ids)) if begun else ids,
        rollout_logprobs=np.concatenate((sample.rollout_logprobs, logprobs)) if begun else logprobs,
        finish_reason="abort" if goes_on else completion.finish_reason,
        weight_version=completion.weight_version,
        weight_version_oldest=sample.weight_version_oldest if begun else completion.weight_version_oldest,
        versions=(*sample.versions, *completion.versions) if len(ids) else sample.versions,
        routed_experts=completion.routed_experts,
        engine=url if not begun or sample.engine == url else "",
    )

"""Requests for responses, which engines may write in several parts."""

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
        prompt: token ids, and the cursor from which the seeds of responses are derived.
        samples: number of responses, which form a group.
        sampling: temperature, top_p, top_k.
        max_new_tokens: largest number of tokens of a response.
        seed: run seed. With rollout.deterministic a response depends only on (seed, prompt.cursor,
            index) and the weights.
        weight_version: version of the engines' weights; a response from other weights is an error.
        routed_experts: the model's, if samples are to hold the experts of their tokens (needs
            rollout.router_replay).
        group: number of the group, copied to its samples.
        goes_on: whether a response may be stopped, or get other weights, while it is written.
        begun: earlier responses, in order; unfinished ones (finish_reason abort) are
            continued. For an agent without a window: turns that each episode repeats, the last of
            which is drawn again.
        window: largest number of tokens to write of a response now (for an agent: turns to play);
            the rest is written later. None: no limit.
        engine: URL of the engine that has the prompt in its cache, preferred if it has room.
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
        """Largest number of tokens of the group; response lengths are not known in advance."""
        return self.samples * (len(self.prompt.token_ids) + self.max_new_tokens)

    def room(self, written: int) -> int:
        """Largest number of tokens to write now of a response that has `written` tokens already."""
        left = self.max_new_tokens - written
        if self.window is None:
            return left
        return min(left, self.window)


@dataclass(frozen=True)
class GenerationRequest:
    """Responses to draw to several prompts; samples are returned in the order of the prompts.

    Attributes:
        prompts: one group of responses is drawn to each.
        samples_per_prompt: number of responses to each prompt.
        max_new_tokens: a limit for each prompt instead of sampling's, for prompts that already
            contain a part of a response.
        begun: turns to repeat, for each prompt.
        sampling, seed, weight_version, routed_experts: see GroupRequest.
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
        """Largest number of tokens of a response to the prompt at this position in prompts."""
        if self.max_new_tokens is None:
            return self.sampling.max_new_tokens
        return self.max_new_tokens[group]

    def groups(self) -> Iterator[GroupRequest]:
        """One request per prompt."""
        for group, prompt in enumerate(self.prompts):
            yield GroupRequest(
                prompt,
                samples=self.samples_per_prompt,
                sampling=self.sampling,
                max_new_tokens=self.limit(group),
                seed=self.seed,
                weight_version=self.weight_version,
                routed_experts=self.routed_experts,
                group=group,
                begun=() if self.begun is None else self.begun[group],
            )


def response_seed(seed: int, cursor: int, index: int) -> int:
    """Seed of response `index` to prompt `cursor` of a run, in [0, 2^63).

    It is the same on every machine and in every version.
    """
    message = struct.pack("<qqq", seed, cursor, index)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def empty_response(group: GroupRequest, index: int) -> Sample:
    """A response without tokens."""
    return Sample(
        prompt=group.prompt,
        group=group.group,
        index=index,
        seed=response_seed(group.seed, group.prompt.cursor, index),
        response_ids=np.zeros(0, np.int32),
        rollout_logprobs=np.zeros(0, np.float32),
        finish_reason="abort",
        weight_version=group.weight_version,
        weight_version_oldest=group.weight_version,
        window_start=None if group.window is None else 0,
    )


def continued_response(
    sample: Sample, completion: Completion, group: GroupRequest, url: str
) -> Sample:
    """A response with the continuation that the engine at this URL wrote."""
    ids = completion.token_ids
    logprobs = completion.logprobs
    oldest_version = completion.weight_version_oldest
    engine = url
    if len(sample.response_ids):
        ids = np.concatenate((sample.response_ids, ids))
        logprobs = np.concatenate((sample.rollout_logprobs, logprobs))
        oldest_version = sample.weight_version_oldest
        if sample.engine != url:
            engine = ""  # several engines wrote it
    versions = sample.versions
    if len(completion.token_ids):
        versions = (*versions, *completion.versions)
    fills_window = (
        completion.finish_reason == "length" and len(completion.token_ids) == group.window
    )
    finish_reason = completion.finish_reason
    if fills_window and group.room(len(ids)) > 0:
        finish_reason = "abort"  # the next window continues it
    return replace(
        sample,
        response_ids=ids,
        rollout_logprobs=logprobs,
        finish_reason=finish_reason,
        weight_version=completion.weight_version,
        weight_version_oldest=oldest_version,
        versions=versions,
        routed_experts=completion.routed_experts,
        engine=engine,
    )

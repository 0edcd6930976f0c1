"""What engines are asked for: responses to prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.weights.routed_experts import ExpertChoices


@dataclass(frozen=True)
class GroupRequest:
    """Responses to draw to one prompt.

    Attributes:
        prompt: token ids with their cursor, from which the seeds of responses follow.
        samples: responses, which form a group.
        sampling: temperature, top_p, top_k.
        max_new_tokens: the most tokens of a response.
        seed: of the run. With rollout.deterministic a response depends on (seed, prompt.cursor, index) and the
            weights alone.
        weight_version: of the weights that the engines have; a response made by others is an error.
        goes_on: a response may be stopped or get other weights while it is under way.
        begun: what there is of the responses, in their order; those that are not finished (finish_reason abort) go on.
        window: the most tokens that are written of a response now; one that ends there goes on later. None: all.
        routed_experts: of the model, where samples are to hold the experts that their tokens went through; needs
            rollout.router_replay.
        group: number of the group, which its samples get.
        engine: URL of the server that is to write them where it has room: it has the prompt in its cache.
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
        """The most tokens that the group may come to: response lengths are not known beforehand."""
        return self.samples * (len(self.prompt.token_ids) + self.max_new_tokens)

    def room(self, written: int) -> int:
        """The most tokens to write now of a response of which there are some."""
        left = self.max_new_tokens - written
        return left if self.window is None else min(left, self.window)


@dataclass(frozen=True)
class GenerationRequest:
    """Responses to draw to several prompts, samples_per_prompt to each; samples come in the order of prompts.

    max_new_tokens: of each prompt, in place of sampling's; for prompts that hold a part of a response already. The
    others are as in GroupRequest.
    """

    prompts: Sequence[Prompt]
    samples_per_prompt: int
    sampling: SamplingConfig
    seed: int
    weight_version: int
    routed_experts: ExpertChoices | None = None
    max_new_tokens: Sequence[int] | None = None

    @property
    def num_samples(self) -> int:
        """Responses in all."""
        return len(self.prompts) * self.samples_per_prompt

    def limit(self, group: int) -> int:
        """The most tokens of a response to a prompt, by its place in prompts."""
        return self.sampling.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens[group]

    def groups(self) -> Iterator[GroupRequest]:
        """The request for each prompt."""
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
            )

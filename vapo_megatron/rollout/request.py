"""What engines are asked for: responses to prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.experience.sample import Prompt
from vapo_megatron.rollout.routed_experts import ExpertChoices


@dataclass(frozen=True)
class GenerationRequest:
    """Samples to draw from the engines.

    Attributes:
        prompts: token ids with their cursors, from which the seeds of responses follow; samples come in their order.
        samples_per_prompt: responses to each prompt, which form a group.
        sampling: temperature, top_p, top_k, and the most tokens of a response.
        seed: of the run. With rollout.deterministic a response depends on (seed, prompt.cursor, index) and the
            weights alone.
        weight_version: of the weights that all engines must have; a response made by others is an error.
        routed_experts: of the model, where samples are to hold the experts that their tokens went through; needs
            rollout.router_replay.
        max_new_tokens: of each prompt, in place of sampling's; for prompts that hold a part of a response already.
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

    def max_tokens(self, group: int) -> int:
        """The most tokens that a prompt's group may come to: response lengths are not known beforehand."""
        return self.samples_per_prompt * (len(self.prompts[group].token_ids) + self.limit(group))

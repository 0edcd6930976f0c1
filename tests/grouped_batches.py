"""Groups of responses to one prompt each, for tests of prompts that are computed once."""

from collections.abc import Sequence
from typing import Any

import torch
from batches import with_observation, with_segment
from hf_models import VOCAB

from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample

# Tokens of each prompt, and of what the critic alone reads before it. Of one token nothing is
# shared.
PROMPTS = ((9, 4), (1, 0), (14, 3), (1, 2))


def grouped_samples(size: int = 4, prompts: Sequence[tuple[int, int]] = PROMPTS) -> list[Sample]:
    """Responses of 1 to 20 tokens, `size` to each prompt; in each group the second one is given an
    observation before its first token, and the third one of the first group has two segments."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for group, (length, privileged) in enumerate(prompts):
        ids = torch.randint(0, VOCAB, (privileged + length,), generator=generator).tolist()
        prompt = Prompt(
            str(group), "", "", tuple(ids[privileged:]), privileged_ids=tuple(ids[:privileged])
        )
        for index in range(size):
            n = int(torch.randint(1, 21, (1,), generator=generator))
            response = torch.randint(0, VOCAB, (n,), generator=generator).tolist()
            logprobs = (-6 * torch.rand(n, generator=generator)).tolist()
            fields: Any = (response, logprobs, "stop", 0, 0)
            right = index % 2 == 0
            sample = Sample(prompt, group, index, 0, *fields, reward=float(right), correct=right)
            if index == 1:
                sample = with_observation(sample, 0, 2)
            if index == 2 and group == 0:
                sample = with_segment(sample, n // 2, 5)
            samples.append(sample)
    return samples


def grouped_batch(size: int = 4, prompts: Sequence[tuple[int, int]] = PROMPTS) -> ExperienceBatch:
    """Of grouped_samples."""
    return from_samples(grouped_samples(size, prompts))

"""Random responses as a rollout brings them, for tests that train on them."""

from collections.abc import Sequence

import torch
from hf_models import VOCAB

from vapo_megatron.experience.batch import ExperienceBatch, from_samples
from vapo_megatron.experience.sample import Prompt, Sample

LENGTHS = [(3, 1), (5, 9), (1, 30), (7, 2), (2, 17), (4, 4)]  # prompt and response tokens


def make_batch(
    lengths: Sequence[tuple[int, int]] = LENGTHS, highest: float = -4.0, spread: float = 0.0
) -> ExperienceBatch:
    """Groups of one response each, every second one correct and rewarded.

    Rollout log-probs lie evenly between highest and highest - spread.
    """
    generator = torch.Generator().manual_seed(5)
    samples = []
    for group, (p, r) in enumerate(lengths):
        ids = torch.randint(0, VOCAB, (p + r,), generator=generator).tolist()
        prompt, correct = Prompt(str(group), "", "", tuple(ids[:p])), group % 2 == 1
        logprobs = (highest - spread * torch.rand(r, generator=generator)).tolist()
        samples.append(
            Sample(prompt, group, 0, 0, ids[p:], logprobs, "stop", 0, 0, reward=float(correct), correct=correct)
        )
    return from_samples(samples)

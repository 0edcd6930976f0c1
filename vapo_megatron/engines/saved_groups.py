"""Graded groups that wait for the trainer, as bytes for a checkpoint."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vapo_megatron.data.sample import Prompt, Sample

# Of a sample, what goes into JSON; its prompt is known by its number, its text follows from its tokens.
_FACTS = (
    *("index", "seed", "finish_reason", "weight_version", "weight_version_oldest", "versions"),
    *("reward", "correct", "grade_reason", "extracted", "extra", "window_start"),
)


def pack_groups(groups: Mapping[int, Sequence[Sample]]) -> bytes:
    """Groups by their numbers. Experts that engines chose (routed_experts) are not kept."""
    tensors: dict[str, Any] = {}
    facts: dict[str, list[dict[str, Any]]] = {}
    for number, group in groups.items():
        facts[str(number)] = [{name: getattr(sample, name) for name in _FACTS} for sample in group]
        for place, sample in enumerate(group):
            tensors[f"{number}/{place}/tokens"] = sample.response_ids
            tensors[f"{number}/{place}/logprobs"] = sample.rollout_logprobs
            if sample.loss_mask is not None:
                tensors[f"{number}/{place}/loss_mask"] = sample.loss_mask
    tensors["facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    packed: bytes = save(tensors)
    return packed


def unpack_groups(
    packed: bytes, prompt: Callable[[int], Prompt], decode: Callable[[Sequence[int]], str]
) -> dict[int, list[Sample]]:
    """The groups that pack_groups() was given. prompt: by its number; decode: from token ids to text.

    Raises:
        ValueError: they are no such bytes.
    """
    try:
        tensors = load(packed)
        facts = json.loads(tensors["facts"].tobytes())
    except (SafetensorError, KeyError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return {
        int(number): [
            _sample(prompt(int(number)), tensors, f"{number}/{place}", fact, decode) for place, fact in enumerate(group)
        ]
        for number, group in facts.items()
    }


def _sample(
    prompt: Prompt, tensors: dict[str, Any], place: str, fact: dict[str, Any], decode: Callable[[Sequence[int]], str]
) -> Sample:
    ids, logprobs, mask = tensors[f"{place}/tokens"], tensors[f"{place}/logprobs"], tensors.get(f"{place}/loss_mask")
    fact["versions"] = tuple((version, count) for version, count in fact["versions"])
    text = decode(ids.tolist())
    return Sample(prompt, 0, response_ids=ids, rollout_logprobs=logprobs, loss_mask=mask, text=text, **fact)

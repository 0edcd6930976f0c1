"""Groups of samples as bytes, for the state of a run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vapo_megatron.data.sample import Prompt, Sample

# The fields of a sample that are saved as JSON. Its prompt is found by its number, its text follows
# from its tokens.
_FACTS = (
    "index",
    "seed",
    "finish_reason",
    "weight_version",
    "weight_version_oldest",
    "versions",
    "reward",
    "correct",
    "grade_reason",
    "extracted",
    "copied",
    "extra",
    "window_start",
    "segment_starts",
    "episode",
    "turns",
)


def pack_groups(groups: Mapping[int, Sequence[Sample]]) -> bytes:
    """Serialises groups by number; empty for none. The experts that engines chose (routed_experts)
    are not kept."""
    if not groups:
        return b""
    tensors: dict[str, Any] = {}
    facts: dict[str, list[dict[str, Any]]] = {}
    for number, group in groups.items():
        facts[str(number)] = [{name: getattr(sample, name) for name in _FACTS} for sample in group]
        for place, sample in enumerate(group):
            prompt = None
            if sample.episode is not None:
                prompt = np.array(sample.prompt.token_ids, dtype=np.int32)
            arrays = {
                "tokens": sample.response_ids,
                "logprobs": sample.rollout_logprobs,
                "loss_mask": sample.loss_mask,
                "turn_rewards": sample.turn_rewards,
                "prompt": prompt,
            }
            for name, array in arrays.items():
                if array is not None:
                    tensors[f"{number}/{place}/{name}"] = array
    tensors["facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    packed: bytes = save(tensors)
    return packed


def unpack_groups(
    packed: bytes, prompt: Callable[[int], Prompt], decode: Callable[[Sequence[int]], str]
) -> dict[int, list[Sample]]:
    """The inverse of pack_groups(); none for nothing.

    Args:
        packed: the bytes.
        prompt: returns a prompt by its number.
        decode: from token ids to text.

    Raises:
        ValueError: the bytes were not made by pack_groups().
    """
    if not packed:
        return {}
    try:
        tensors = load(packed)
        facts = json.loads(tensors["facts"].tobytes())
    except (SafetensorError, KeyError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return {
        int(number): [
            _sample(prompt(int(number)), tensors, f"{number}/{place}", fact, decode)
            for place, fact in enumerate(group)
        ]
        for number, group in facts.items()
    }


def _sample(
    prompt: Prompt,
    tensors: dict[str, Any],
    place: str,
    fact: dict[str, Any],
    decode: Callable[[Sequence[int]], str],
) -> Sample:
    ids = tensors[f"{place}/tokens"]
    fact["versions"] = tuple((version, count) for version, count in fact["versions"])
    fact["segment_starts"] = tuple(fact["segment_starts"])
    fact["turns"] = tuple(tuple(turn) for turn in fact.get("turns", ()))
    if f"{place}/prompt" in tensors:
        prompt = replace(prompt, token_ids=tuple(tensors[f"{place}/prompt"].tolist()))
    return Sample(
        prompt,
        group=0,
        response_ids=ids,
        rollout_logprobs=tensors[f"{place}/logprobs"],
        loss_mask=tensors.get(f"{place}/loss_mask"),
        turn_rewards=tensors.get(f"{place}/turn_rewards"),
        text=decode(ids.tolist()),
        **fact,
    )

"""Rows for supervised fine-tuning, packed like rollouts: a prompt and the response to be imitated."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput


def read_demonstrations(
    path: Path,
    encode_prompt: Callable[[str], list[int]],
    encode_response: Callable[[str], list[int]],
    eos_token_id: int,
    max_tokens: int,
) -> list[Sample]:
    """Rows {problem, response} as samples whose responses end with EOS.

    Raises:
        BadInput: no such file, a row that is not JSON or lacks a field, a row that is too long, no row at all.
    """
    samples: list[Sample] = []
    for number, row in read_rows(path, "data.path"):
        for name in ("problem", "response"):
            if not isinstance(row.get(name), str) or not row[name]:
                raise BadInput(f"{path}:{number}: field {name!r} is missing or empty: every row needs text there")
        prompt_ids = tuple(encode_prompt(row["problem"]))
        response_ids = np.array([*encode_response(row["response"]), eos_token_id])
        if len(prompt_ids) + len(response_ids) > max_tokens:
            raise BadInput(
                f"{path}:{number}: {len(prompt_ids) + len(response_ids)} tokens are above "
                f"data.max_tokens={max_tokens}: raise it or drop the row"
            )
        prompt = Prompt(str(row.get("id", number)), row["problem"], "", prompt_ids, cursor=len(samples))
        no_logprobs = np.zeros(len(response_ids), dtype=np.float32)
        samples.append(Sample(prompt, len(samples), 0, 0, response_ids, no_logprobs, "stop", 0, 0, reward=0.0))
    if not samples:
        raise BadInput(f"{path}: holds no row: give demonstrations with the fields problem and response")
    return samples

"""What rank 0 pays on the host for the responses of a rollout: seconds and memory for a million tokens.

    python -m benchmarks.rollout_host [--tokens 4000000] [--length 10000] [--group 16] [--json FILE]

The servers' answers are made up, in the form in which SGLang sends them. "arrays" is what the trainer does: each answer
is turned into arrays as it comes, and the batch is put together from arrays. "lists" is what it is compared with: token
ids and log-probs stay the numbers that the JSON was read into, and the batch is made of these. Each way runs in a
process of its own; memory is what its heap has grown by when all responses are there, the answers themselves gone.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common import anonymous_bytes, parser, publish
from vapo_megatron.experience.batch import from_samples
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.rollout.client import EngineClient, _decoded
from vapo_megatron.rollout.server import EngineAddress

PROMPT = Prompt("", "", "", tuple(range(200)))


def answers(given: argparse.Namespace) -> Iterator[str]:
    """One answer of a server for every group."""
    rng = random.Random(0)
    for _ in range(max(1, given.tokens // (given.length * given.group))):
        group = []
        for _ in range(given.group):
            ids = [rng.randrange(150_000) for _ in range(given.length)]
            entries = [[float(np.float32(-rng.random())), token, None] for token in ids]
            meta = {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": entries,
                "weight_versions": [{"version": "1"}],
            }
            group.append({"output_ids": ids, "meta_info": meta})
        yield json.dumps(group)


def heap() -> int:
    """Bytes of this process that are not files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps of the answers goes back
    return anonymous_bytes()


def as_arrays(responses: list[Any]) -> torch.Tensor:
    """The batch's tokens, by the trainer's own code."""
    samples = [
        Sample(PROMPT, i, 0, 0, found.token_ids, found.logprobs, "stop", 1, 1, reward=0.0)
        for i, found in enumerate(responses)
    ]
    return from_samples(samples).tokens


def as_lists(responses: list[Any]) -> torch.Tensor:
    """The batch's tokens and log-probs out of Python's numbers."""
    torch.tensor([value for _, logprobs in responses for value in logprobs], dtype=torch.float32)
    flat = [token for ids, _ in responses for token in (*PROMPT.token_ids, *ids)]
    return torch.tensor(flat, dtype=torch.int32)


def measure(way: str, given: argparse.Namespace, results: Any) -> None:
    """Put the row of one way into results."""
    client = EngineClient(EngineAddress("http://unused", "no log"), 1.0)
    parsing = reading = 0.0
    responses: list[Any] = []
    as_arrays([client._completion(answer) for answer in json.loads(next(answers(given)))])  # what is loaded lazily
    before = heap()
    for text in answers(given):
        start = time.perf_counter()
        group = _decoded(text) if way == "arrays" else json.loads(text)
        parsed = time.perf_counter()
        if way == "arrays":
            responses += [client._completion(answer) for answer in group]
        else:
            responses += [
                (answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
                for answer in group
            ]
        parsing, reading = parsing + parsed - start, reading + time.perf_counter() - parsed
        del group, text
    held = heap() - before
    start = time.perf_counter()
    tokens = len((as_arrays if way == "arrays" else as_lists)(responses))
    packing, millions = time.perf_counter() - start, tokens / 1e6
    row = {
        "responses as": way,
        "s to parse": parsing,
        "s to read": reading,
        "s to batch": packing,
        "MB held": held / 1e6,
    }
    results.put({name: value if isinstance(value, str) else value / millions for name, value in row.items()})


def main() -> None:
    """A row for each way, for a million tokens."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=4_000_000)
    arguments.add_argument("--length", type=int, default=10_000, help="tokens of a response")
    arguments.add_argument("--group", type=int, default=16, help="responses of one answer")
    given = arguments.parse_args()
    context, rows = multiprocessing.get_context("spawn"), []
    for way in ("lists", "arrays"):
        results = context.SimpleQueue()
        process = context.Process(target=measure, args=(way, given, results))
        process.start()
        rows.append(results.get())
        process.join()
    publish("for a million tokens, prompts included", rows, given.json)


if __name__ == "__main__":
    main()

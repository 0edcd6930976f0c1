"""What a step costs the host at the sizes of large runs, part by part: made-up responses, no models.

    python -m benchmarks.host_costs [--tokens 49000000 168000000] [--length 6000] [--ranks 128] [--json FILE]

Lengths are log-normal and cut at 20,000. A row is a part of a step that rank 0 or every rank works through alone:

    parse       columns of numbers become arrays (rollout/client.py); requests are in benchmarks.rollout_host
    batch       samples become the batch
    broadcast   to one more rank of the machine: sent once, mapped by both (shared memory; no network)
    advantages  decoupled and length-adaptive GAE, whitening
    plan        all samples are shared out over the ranks and one rank's are packed into micro-batches
    mini-batch  the tensors of one mini-batch in eight are selected

Seconds at each size, measured at that size; growth is that of seconds with tokens over an eighth, a quarter, a half and
the whole of the first size: 1 is linear.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import SHAPES, growth, heavy_tailed_lengths, over_ranks, parser, publish
from vapo_megatron.algorithms.advantages import whiten
from vapo_megatron.algorithms.gae import decoupled_gae, length_adaptive_lambda
from vapo_megatron.engine import columns
from vapo_megatron.experience.balance import Cost, plan_microbatches
from vapo_megatron.experience.batch import ExperienceBatch, from_samples
from vapo_megatron.experience.sample import Prompt, Sample
from vapo_megatron.rollout.client import EngineClient
from vapo_megatron.rollout.server import EngineAddress
from vapo_megatron.training.broadcast import broadcast_batch

PROMPT = Prompt("", "", "", tuple(range(200)))
META = {"finish_reason": {"type": "stop"}, "weight_versions": [{"version": "1"}]}


def messages(lengths: list[int], group: int) -> list[bytes]:
    """What engines answer to each group of prompts."""
    random = np.random.default_rng(0)
    found = []
    for start in range(0, len(lengths), group):
        part = lengths[start : start + group]
        ids = [random.integers(0, 150_000, n, dtype=np.int32) for n in part]
        logprobs = [-random.random(n, dtype=np.float32) for n in part]
        found.append(columns.join([columns.Columns(META, *pair, None) for pair in zip(ids, logprobs, strict=True)]))
    return found


def measure(tokens: int, length: int, group: int, ranks: int) -> dict[str, float]:
    """Collective over two ranks: seconds of each part; rank 0's."""
    seconds: dict[str, float] = {}
    main_rank = dist.get_rank() == 0

    def timed(name: str, work: Callable[[], Any]) -> Any:
        dist.barrier()
        start = time.perf_counter()
        answer = work()
        seconds[name] = time.perf_counter() - start
        return answer

    batch: ExperienceBatch | None = None
    lengths = heavy_tailed_lengths(max(1, tokens // length), length, 20_000)
    if main_rank:
        client = EngineClient(EngineAddress("http://unused", "no log"), 1.0)
        answers = messages(lengths, group)

        def parse() -> list[Any]:
            return [client._completion(answer) for message in answers for answer in columns.unpack(message)]

        start = time.perf_counter()
        responses = parse()
        seconds["parse"] = time.perf_counter() - start
        del answers
        samples = [
            Sample(PROMPT, i // group, 0, 0, one.token_ids, one.logprobs, "stop", 1, 1, reward=float(i % 2))
            for i, one in enumerate(responses)
        ]
        start = time.perf_counter()
        batch = from_samples(samples)
        seconds["batch"] = time.perf_counter() - start
        del responses, samples
    batch = timed("broadcast", lambda: broadcast_batch(batch))
    assert batch is not None
    if main_rank:
        rewards = torch.zeros(batch.response_tokens)
        rewards[batch.response_cu_seqlens[1:] - 1] = batch.rewards
        values = torch.rand(batch.response_tokens)

        def advantages() -> None:
            lam = length_adaptive_lambda(batch.response_lengths, 0.05)
            found, _ = decoupled_gae(rewards, values, batch.response_cu_seqlens, lam, 1.0)
            whiten(found, torch.ones_like(found, dtype=torch.bool))

        start = time.perf_counter()
        advantages()
        seconds["advantages"] = time.perf_counter() - start
        del rewards, values
        spec = SHAPES["7b"].spec()
        cost = Cost(float(spec.parameter_count()), float(spec.num_layers * spec.num_heads * spec.head_dim))
        whole = batch.lengths.tolist()
        start = time.perf_counter()
        plan_microbatches(range(batch.samples), whole, dp_size=ranks, max_tokens=32768, cost=cost, alignment=16)[0]
        seconds["plan"] = time.perf_counter() - start
        start = time.perf_counter()
        batch.select(list(range(0, batch.samples, 8)))
        seconds["mini-batch"] = time.perf_counter() - start
    dist.barrier()
    return seconds


def measure_all(sizes: list[int], length: int, group: int, ranks: int) -> dict[str, Any]:
    """Collective: measure() of each size."""
    return {str(size): measure(size, length, group, ranks) for size in sizes}


def main() -> None:
    """A row for each part, and their sum."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[49_000_000, 168_000_000])
    arguments.add_argument("--length", type=int, default=6000, help="mean tokens of a response")
    arguments.add_argument("--group", type=int, default=16)
    arguments.add_argument("--ranks", type=int, default=128, help="data-parallel ranks that share the samples")
    given = arguments.parse_args()
    first = given.tokens[0]
    sizes = [first // 8, first // 4, first // 2, *given.tokens]
    answers = over_ranks(2, measure_all, sizes, given.length, given.group, given.ranks)
    found = {size: answers[str(size)] for size in sizes}
    rows = []
    for part in found[first]:
        row: dict[str, Any] = {"part": part}
        row |= {f"s at {size / 1e6:.0f} M tokens": found[size][part] for size in given.tokens}
        exponent = growth(sizes[:4], [max(found[size][part], 1e-6) for size in sizes[:4]])
        rows.append(row | {"growth": exponent})
    sums = {name: sum(row[name] for row in rows) for name in rows[0] if name.startswith("s at")}
    rows.append({"part": "all", **sums, "growth": growth(sizes[:4], [sum(found[size].values()) for size in sizes[:4]])})
    publish(f"responses of {given.length} tokens on average, two ranks of one machine", rows, given.json)


if __name__ == "__main__":
    main()

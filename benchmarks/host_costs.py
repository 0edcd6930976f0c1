"""What a step costs the host at the sizes of large runs, part by part: made-up responses, no
models.

    python -m benchmarks.host_costs [--tokens 12000000] [--length 6000] [--ranks 1024] [--dp 128]
    [--json FILE]

Lengths are log-normal and cut at 20,000. Each part is measured at the size that a rank of such a
run has: with all samples where it works through all, with its share of them elsewhere. Two ranks of
this machine take part and communicate over loopback; network time is computed separately, at --gbps
per node of eight ranks.

    parse       rank 0: columns of numbers become arrays (server/client.py); requests are in
    benchmarks.rollout_host batch       rank 0: samples become the batch
    scatter     rank 0: the batch is sent to the samples' home ranks; the other rank represents all
    others plan        every rank: all samples are distributed, for actor and critic, and each
                mini-batch of --minibatches for both; one rank's are put into micro-batches. "plan
                once" is one such distribution of all samples
    advantages  every rank, on its own samples: GAE, whitening, the critic's measures; sums are
    joined over the two pack        every rank: the samples that it scores and trains on become
    tensors of micro-batches network     computed: rank 0's rollout, then the inputs and outputs of
    the models GB          peak growth of rank 0's memory, up to the end of scatter

It takes a minute. The full sizes: --tokens 49000000 168000000 393000000 (minutes, and 16 GB).
Growth is the exponent of time against tokens over an eighth, a quarter, a half and the whole of the
first size; 1 means linear. The figures are compared with the targets of large runs below the table.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import Planner, growth, heavy_tailed_lengths, over_ranks, parser, publish
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.run import MonitoringConfig
from vapo_megatron.data.batch import ExperienceBatch, SampleTable
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.microbatch import pack
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.monitoring.recorder import Recorder
from vapo_megatron.monitoring.timers import MemoryGauge, host_gauge
from vapo_megatron.training.advantages import estimate_advantages
from vapo_megatron.training.shards import ShardedBatch, partition_by_tokens, scatter

PROMPT = Prompt("", "", "", tuple(range(200)))
META = {"finish_reason": {"type": "stop"}, "weight_versions": [{"version": "1"}]}
RANKS_PER_NODE = 8
# Rows that are no part of the sum of seconds.
BESIDE = ("plan once", "GB")
# Of a row: from so many tokens on, what large runs are meant to take at most.
GOALS = {
    "GB": (160_000_000, 12.0, "GB of rank 0 at 512 x 16 x 20k tokens, of a node's"),
    "plan once": (390_000_000, 2.0, "seconds to share out 65,536 samples"),
    "all": (
        390_000_000,
        60.0,
        "seconds of host time in a step of 65,536 x 6k tokens at 1,024 GPUs",
    ),
}
# Bytes per token that go over the network: the rollout; token and rollout log-prob for actor and
# critic to score, and log-prob, entropy and value home; for their updates token and rollout
# log-prob, with values and returns (critic), with old log-prob, advantage and importance weight
# (actor).
SENT_ONCE = 8
SCORED = 2 * 8 + 3 * 4
TRAINED = 8 + 2 * 4 + 8 + 3 * 4


def messages(lengths: list[int], group: int) -> list[bytes]:
    """What engines answer to each group of prompts."""
    random = np.random.default_rng(0)
    found = []
    for start in range(0, len(lengths), group):
        part = lengths[start : start + group]
        ids = [random.integers(0, 150_000, n, dtype=np.int32) for n in part]
        logprobs = [-random.random(n, dtype=np.float32) for n in part]
        found.append(
            columns.join(
                [columns.Columns(META, *pair, None) for pair in zip(ids, logprobs, strict=True)]
            )
        )
    return found


def collected(lengths: list[int], group: int, timed: Callable[..., Any]) -> ExperienceBatch:
    """On rank 0: responses, parsed and packed."""
    client = EngineClient(EngineAddress("http://unused", "no log"), 1.0)

    def parse(answers: list[bytes]) -> list[Any]:
        return [
            client._completion(answer) for message in answers for answer in columns.unpack(message)
        ]

    responses = timed("parse", parse, messages(lengths, group))
    samples = [
        Sample(
            PROMPT, i // group, 0, 0, one.token_ids, one.logprobs, "stop", 1, 1, reward=float(i % 2)
        )
        for i, one in enumerate(responses)
    ]
    del responses
    batch: ExperienceBatch = timed("batch", from_samples, samples)
    return batch


def measure(
    memory: MemoryGauge, tokens: int, length: int, group: int, ranks: int, dp: int, minibatches: int
) -> dict[str, float]:
    """Collective over two ranks: seconds of each part; rank 0's, and its memory at the peak."""
    seconds: dict[str, float] = {}
    main_rank = dist.get_rank() == 0

    def timed(name: str, work: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        answer = work(*args)
        seconds[name] = time.perf_counter() - start
        return answer

    lengths = heavy_tailed_lengths(max(2 * group, tokens // length), length, 20_000)
    memory.reset()
    batch = collected(lengths, group, timed) if main_rank else None
    dist.barrier()
    shards = timed("scatter", scatter, batch)
    peak = memory.peak()
    del batch
    table, planner = shards.table, Planner(dp)

    def plan() -> Any:
        whole = [planner.plan(table.lengths, range(table.samples)) for _ in ("actor", "critic")]
        for number in range(minibatches):
            part = table.lengths[number::minibatches]
            for _ in ("actor", "critic"):
                planner.plan(part, range(len(part)))[0]
        return whole[0]

    timed("plan once", lambda: planner.plan(table.lengths, range(table.samples))[0])
    found = timed("plan", plan)
    found[0]
    # The first two ranks of a run: what is at home with the others is nowhere here, and counts as
    # zeros.
    homes = partition_by_tokens(table, ranks)
    mine = torch.arange(int(homes[dist.get_rank()]), int(homes[dist.get_rank() + 1]))
    own = zeros(table.select(mine))
    own.old_logprobs = own.entropies = torch.zeros(own.response_tokens)
    own.values = torch.rand(own.response_tokens)
    one_of_many = ShardedBatch(table, homes, own)
    dist.barrier()
    with Recorder(Path("unused"), MonitoringConfig(), is_main_rank=False) as recorder:
        timed("advantages", lambda: estimate_advantages(one_of_many, AlgorithmConfig(), recorder))
    share = found.samples_of(0)[: max(1, table.samples // dp)]
    alike = table.select(torch.from_numpy(share))
    of_rank = zeros(alike)

    def packed() -> None:
        for _ in range(4):  # scored and trained, by actor and critic
            for sample in range(of_rank.samples):
                pack(of_rank, [sample], 16, 16, 1, 0)

    timed("pack", packed)
    dist.barrier()
    return seconds | {"GB": peak / 1e9}


def zeros(table: SampleTable) -> ExperienceBatch:
    """Samples whose tokens and log-probs are zeros."""
    tokens, responses = int(table.lengths.sum()), int(table.response_lengths.sum())
    return table.batch(
        tokens=torch.zeros(tokens, dtype=torch.int32), rollout_logprobs=torch.zeros(responses)
    )


def measure_all(sizes: list[int], *args: int) -> dict[str, Any]:
    """Collective: measure() of each size."""
    memory = host_gauge()
    start = memory.peak()  # what an earlier size has left in the heap counts: it is used again
    found = {str(size): measure(memory, size, *args) for size in sizes}
    return {size: parts | {"GB": parts["GB"] - start / 1e9} for size, parts in found.items()}


def network_seconds(tokens: int, ranks: int, dp: int, gbps: float) -> float:
    """Until rank 0's node has sent the rollout, and nodes what others compute; every rank of a
    share gets a copy."""
    nodes = max(1, ranks // RANKS_PER_NODE)
    copies = ranks / dp
    out_of_a_node = tokens * (SCORED + TRAINED) * copies / nodes
    return (tokens * SENT_ONCE * (1 - 1 / nodes) + out_of_a_node) / (gbps / 8 * 1e9)


def main() -> None:
    """A row for each part, and their sum."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[12_000_000])
    arguments.add_argument("--length", type=int, default=6000, help="mean tokens of a response")
    arguments.add_argument("--group", type=int, default=16)
    arguments.add_argument("--ranks", type=int, default=1024, help="of the run")
    arguments.add_argument("--dp", type=int, default=128, help="data-parallel ranks of each model")
    arguments.add_argument("--minibatches", type=int, default=8, help="in a step")
    arguments.add_argument(
        "--gbps", type=float, default=100.0, help="network of a node, gigabits a second"
    )
    given = arguments.parse_args()
    first = given.tokens[0]
    sizes = [first // 8, first // 4, first // 2, *given.tokens]
    run = given.length, given.group, given.ranks, given.dp, given.minibatches
    answers = over_ranks(2, measure_all, sizes, *run)
    found = {size: answers[str(size)] for size in sizes}
    for size, seconds in found.items():
        seconds["network"] = network_seconds(size, given.ranks, given.dp, given.gbps)
    for figures in found.values():
        figures["all"] = sum(value for part, value in figures.items() if part not in BESIDE)
    rows = []
    for part in [*(part for part in found[first] if part not in BESIDE), *BESIDE]:
        row: dict[str, Any] = {"part": part}
        row |= {f"at {size / 1e6:.0f} M tokens": found[size][part] for size in given.tokens}
        exponent = growth(sizes[:4], [max(found[size][part], 1e-6) for size in sizes[:4]])
        rows.append(row | {"growth": exponent})
    publish(
        f"seconds of a step; responses of {given.length} tokens on average, {given.ranks} ranks, "
        f"{given.dp} data-parallel, {given.gbps:g} Gb/s a node",
        rows,
        given.json,
    )
    for size, figures in found.items():
        for part, (tokens, limit, what) in GOALS.items():
            if tokens <= size < 1.2 * tokens:
                print(f"goal: {what}: {figures[part]:.3g}, at most {limit:g}")


if __name__ == "__main__":
    main()

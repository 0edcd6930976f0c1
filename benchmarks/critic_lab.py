"""Cost of the critic's measures and fault checks per step, next to the advantages of the same
batch, in one run.

    python -m benchmarks.critic_lab [--largest 8000000] [--length 4096] [--group 16] [--json FILE]

"lab" is what a rank computes once per step from the samples that it holds (docs/critic.md):
explained variance, both free baselines, calibration, biases, sign agreement, fault checks.
"advantages" is GAE with both lambdas on these tokens. Growth is the exponent of the lab's time
against tokens; 1 means linear. The largest size is an outlier: from about 4 M tokens, arrays exceed
32 MiB, which glibc maps anew each time; beyond that, time doubles with tokens again.
"""

from functools import partial

import numpy as np
import torch

from benchmarks.common import growth, heavy_tailed_lengths, in_turns, parser, publish, ratio_figure
from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.data.collation import from_samples
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.training.advantages import critic_row, gae
from vapo_megatron.training.shards import ShardedBatch, scatter
from vapo_megatron.training.token_rewards import shaped_rewards, token_rewards


def batch_of(tokens: int, length: int, group: int) -> ShardedBatch:
    """About so many tokens of responses with rewards, values and advantages, on one rank."""
    random = np.random.default_rng(0)
    lengths = heavy_tailed_lengths(max(2, tokens // length // group) * group, length, 4 * length)
    samples = []
    for number, n in enumerate(lengths):
        reward = float(random.integers(2) * 2 - 1)
        ids, logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
        prompt = Prompt(str(number // group), "", "", (1,), number // group)
        samples.append(
            Sample(
                prompt,
                number // group,
                0,
                0,
                ids,
                logprobs,
                "stop",
                0,
                0,
                reward=reward,
                correct=reward > 0,
            )
        )
    batch = scatter(from_samples(samples))
    batch.local.old_logprobs = batch.local.rollout_logprobs
    batch.local.values = torch.randn(
        batch.local.response_tokens, generator=torch.Generator().manual_seed(0)
    )
    return batch


def main() -> None:
    """A row for each of four sizes."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--largest", type=int, default=8_000_000, help="tokens of the largest batch"
    )
    arguments.add_argument(
        "--length", type=int, default=4096, help="tokens of a response on average"
    )
    arguments.add_argument("--group", type=int, default=16)
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    config = AlgorithmConfig()
    rows, sizes, medians, took, advantages = [], [], [], [0.0], [0.0]
    for factor in (8, 4, 2, 1):
        batch = batch_of(given.largest // factor, given.length, given.group)
        batch.fill(shaped_rewards=shaped_rewards(batch.table, config.shaping))
        rewards = token_rewards(batch.local, config)
        steps = (
            partial(gae, batch.local, rewards, config, batch.table.response_lengths),
            partial(critic_row, batch, config),
        )
        advantages, took = in_turns(steps, given.repeats)
        sizes.append(batch.response_tokens)
        medians.append(float(np.median(took)))
        row = {
            "tokens": sizes[-1],
            "lab ms": medians[-1] * 1e3,
            "ns a token": medians[-1] / sizes[-1] * 1e9,
        }
        rows.append(row | {"advantages ms": float(np.median(advantages)) * 1e3, "growth": ""})
    rows[-1]["growth"] = growth(sizes, medians)
    figures = [ratio_figure("advantages over the lab", advantages, took)]
    publish(
        f"responses of {given.length} tokens on average, groups of {given.group}",
        rows,
        given.json,
        figures,
    )


if __name__ == "__main__":
    main()

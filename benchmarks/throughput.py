"""Tokens a second of forward and backward, against plain transformers with the same shapes, type and threads.

    python -m benchmarks.throughput [--shape 10m] [--lengths 128 512] [--tokens 2048] [--json FILE]

Sequences of one length fill a micro-batch, packed here and as a batch without padding there, which is the best that
transformers can be given: same kernel of attention, no mask. Both compute the mean negative log-likelihood of every
token from fp32 logits. transformers holds all logits at once; here a chunk of them is, the other chunks are computed a
second time, and every token's entropy is computed beside its log-prob, as training needs it. Gradients start from zero
on both sides; packing, the fp32 sums of gradients and their reduction count here.

The optimizer's update is left out of "forward+backward"; "whole step" has it (transformers: gradients clipped, torch's
fused AdamW). Both sides take turns; the best of --repeats after one that does not count. "of CPU time" compares what
the process used instead of what the clock says: on a CPU that others use too it is the metric to read, on a GPU it says
nothing.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import (
    SHAPES,
    one_rank,
    parser,
    publish,
    random_model,
    sample_batch,
    sft_loss,
    transformers,
)
from vapo_megatron.config.model import ActorConfig
from vapo_megatron.experience.batch import ExperienceBatch
from vapo_megatron.mcore.platform import current_platform

Step = Callable[[], object]


def peer(given: argparse.Namespace, batch: ExperienceBatch, length: int) -> tuple[Step, Step]:
    """Forward and backward of transformers, and its whole step."""
    shape, device = SHAPES[given.shape], current_platform().device
    rows = batch.tokens.view(-1, length + 1).long().to(device)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        shape.hf_config(), dtype=getattr(torch, given.dtype), attn_implementation="sdpa"
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def forward_backward() -> None:
        optimizer.zero_grad()
        logits = model(rows[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()).backward()

    def whole() -> None:
        forward_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return forward_backward, whole


def ours(given: argparse.Namespace, batch: ExperienceBatch) -> tuple[Step, Step]:
    """The same of a Trainable at TP=1."""
    config = ActorConfig(max_tokens_per_microbatch=given.tokens, logprob_chunk=given.chunk)
    model, loss, samples = random_model(SHAPES[given.shape], config, given.dtype), sft_loss(batch), range(batch.samples)
    return lambda: model.gradients(batch, samples, loss), lambda: model.train_step(batch, samples, loss)


def in_turns(steps: tuple[Step, ...], repeats: int) -> list[tuple[float, float]]:
    """Least wall-clock and least CPU seconds of each step, after one round that does not count."""
    least = [(float("inf"), float("inf"))] * len(steps)
    for repeat in range(repeats + 1):
        for index, step in enumerate(steps):
            current_platform().synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            current_platform().synchronize()
            if repeat:
                took = time.perf_counter() - wall, time.process_time() - cpu
                least[index] = (min(least[index][0], took[0]), min(least[index][1], took[1]))
    return least


def main() -> None:
    """A row for each length of sequence."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="10m")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    arguments.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    arguments.add_argument("--chunk", type=int, help="rows of logits held at once; as a run has it where left out")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    rows = []
    with one_rank():
        for length in given.lengths:
            tokens = given.tokens // length * length
            batch = sample_batch([length + 1] * (given.tokens // length), SHAPES[given.shape].vocab)
            (mine, my_step), (theirs, their_step) = ours(given, batch), peer(given, batch, length)
            passes = in_turns((mine, theirs), given.repeats)
            steps = in_turns((my_step, their_step), given.repeats)
            rows.append(
                {
                    "length": length,
                    "forward+backward tok/s": tokens / passes[0][0],
                    "transformers tok/s": tokens / passes[1][0],
                    "ratio": passes[1][0] / passes[0][0],
                    "of CPU time": passes[1][1] / passes[0][1],
                    "whole step tok/s": tokens / steps[0][0],
                    "transformers' tok/s": tokens / steps[1][0],
                    "ratio of steps": steps[1][0] / steps[0][0],
                }
            )
    publish(f"{given.shape}, {given.tokens} tokens a micro-batch, {given.dtype}", rows, given.json)


if __name__ == "__main__":
    main()

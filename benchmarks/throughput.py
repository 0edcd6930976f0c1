"""Tokens a second of forward and backward, against plain transformers with the same shapes, weights' type and threads.

    python -m benchmarks.throughput [--shape 10m] [--lengths 128 512] [--tokens 2048] [--json FILE]

Sequences of one length fill a micro-batch, packed here and as a batch without padding there; both compute the mean
negative log-likelihood of every token. The optimizer's update is left out of "forward+backward"; "whole step" has it
(transformers: torch's fused AdamW). The best of --repeats after one that does not count.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import (
    SHAPES,
    best_seconds,
    one_rank,
    parser,
    publish,
    random_model,
    sample_batch,
    step_seconds,
    transformers,
)
from vapo_megatron.config.model import ActorConfig
from vapo_megatron.mcore.platform import current_platform


def peer(given: argparse.Namespace, length: int) -> tuple[float, float]:
    """Least seconds of transformers, without and with its optimizer's update."""
    shape, device = SHAPES[given.shape], current_platform().device
    batch = sample_batch([length + 1] * (given.tokens // length), shape.vocab)
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

    return best_seconds(forward_backward, given.repeats), best_seconds(whole, given.repeats)


def ours(given: argparse.Namespace, length: int) -> tuple[float, float]:
    """The same of a Trainable at TP=1."""
    shape = SHAPES[given.shape]
    batch = sample_batch([length + 1] * (given.tokens // length), shape.vocab)
    config = ActorConfig(max_tokens_per_microbatch=given.tokens, logprob_chunk=given.chunk)
    return step_seconds(random_model(shape, config, given.dtype), batch, given.repeats)


def main() -> None:
    """A row for each length of sequence."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="10m")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    arguments.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    arguments.add_argument("--chunk", type=int, default=1024, help="rows of logits held at once")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    rows = []
    with one_rank():
        for length in given.lengths:
            mine, theirs = ours(given, length), peer(given, length)
            tokens = given.tokens // length * length
            rows.append(
                {
                    "length": length,
                    "forward+backward tok/s": tokens / mine[0],
                    "transformers tok/s": tokens / theirs[0],
                    "ratio": theirs[0] / mine[0],
                    "whole step tok/s": tokens / mine[1],
                    "transformers' tok/s": tokens / theirs[1],
                    "ratio of steps": theirs[1] / mine[1],
                }
            )
    publish(f"{given.shape}, {given.tokens} tokens a micro-batch, {given.dtype}", rows, given.json)


if __name__ == "__main__":
    main()

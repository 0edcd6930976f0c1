"""Tokens a second of forward and backward, against plain transformers with the same shapes, type
and threads.

    python -m benchmarks.throughput [--shape 10m] [--lengths 128 512] [--tokens 2048] [--json FILE]

Sequences of one length fill a micro-batch, packed on our side and as a batch without padding on
theirs, which is the best case for transformers: the same attention kernel, no mask. Both compute
the mean negative log-likelihood of every token from fp32 logits. transformers holds all logits at
once; we hold one chunk of them, compute the other chunks a second time, and compute every token's
entropy with its log-prob, as training needs it. Gradients start from zero on both sides; packing,
the fp32 sums of gradients and their reduction count on ours.

The optimizer's update is left out of "forward+backward"; "whole step" has it (transformers:
gradients clipped, torch's fused AdamW). Both sides take turns, round by round; medians.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.common import (
    SHAPES,
    in_turns,
    one_rank,
    parser,
    publish,
    random_model,
    ratio_figure,
    sample_batch,
    sft_loss,
    transformers,
)
from vapo_megatron.config.model import ActorConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.megatron.platform import current_platform

Step = Callable[[], object]


def peer(given: argparse.Namespace, batch: ExperienceBatch, length: int) -> tuple[Step, Step]:
    """Forward and backward of transformers, and its whole step."""
    shape, device = SHAPES[given.shape], current_platform().device
    rows = batch.tokens.view(-1, length + 1).long().to(device)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        shape.hf_config(), dtype=getattr(torch, given.dtype), attn_implementation="sdpa"
    ).to(device)
    if given.compile:
        model.compile()
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
    config = ActorConfig(max_tokens_per_microbatch=given.tokens)
    model, loss, samples = (
        random_model(SHAPES[given.shape], config, given.dtype),
        sft_loss(batch),
        range(batch.samples),
    )
    if given.chunk:
        model.chunks[-1].output_layer.chunk = given.chunk
    return lambda: model.gradients(batch, samples, loss), lambda: model.train_step(
        batch, samples, loss
    )


def main() -> None:
    """A row for each length of sequence."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="10m")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    arguments.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    arguments.add_argument(
        "--chunk", type=int, help="rows of logits held at once; as a run has it where left out"
    )
    arguments.add_argument(
        "--compile", action="store_true", help="transformers' model, by torch.compile"
    )
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    rows, figures = [], []
    with one_rank():
        for length in given.lengths:
            tokens = given.tokens // length * length
            batch = sample_batch([length + 1] * (given.tokens // length), SHAPES[given.shape].vocab)
            row: dict[str, Any] = {"length": length}
            pairs = zip(
                ("forward+backward", "whole step"),
                ours(given, batch),
                peer(given, batch, length),
                strict=True,
            )
            for what, mine, theirs in pairs:
                seconds = in_turns((mine, theirs), given.repeats)
                figures.append(
                    ratio_figure(
                        f"{what} of {length} tokens, transformers over ours", *seconds[::-1]
                    )
                )
                for side, took in zip(("", ", transformers"), seconds, strict=True):
                    row[f"{what} tok/s{side}"] = tokens / float(np.median(took))
            rows.append(row)
    publish(
        f"{given.shape}, {given.tokens} tokens a micro-batch, {given.dtype}",
        rows,
        given.json,
        figures,
    )


if __name__ == "__main__":
    main()

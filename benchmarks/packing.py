"""What packing is worth: tokens a second of a heavy-tailed batch, packed against padded to the
longest.

    python -m benchmarks.packing [--shape 10m] [--samples 64] [--mean 150] [--longest 512] [--json
    FILE]

Both train the same model on the same samples with the same budget of a micro-batch. The padded way
is that of trainers without packing: samples in random order, as many to a micro-batch as fit when
each takes the room of the longest; its padding is computed like any token. "by length" sorts first,
the best a padded batch can do. Only real tokens count.
"""

import random

import numpy as np

from benchmarks.common import (
    SHAPES,
    gradient_step,
    heavy_tailed_lengths,
    in_turns,
    one_rank,
    parser,
    publish,
    random_model,
    ratio_figure,
    sample_batch,
)
from vapo_megatron.config.model import ActorConfig


def padded(lengths: list[int], budget: int) -> list[int]:
    """Lengths of the same samples when each is padded to the longest of its micro-batch."""
    found: list[int] = []
    group: list[int] = []
    for length in lengths:
        if (len(group) + 1) * max([length, *group]) > budget:
            found += [max(group)] * len(group)
            group = []
        group.append(length)
    return found + [max(group)] * len(group)


def main() -> None:
    """A row for each way."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="10m")
    arguments.add_argument("--samples", type=int, default=64)
    arguments.add_argument("--mean", type=float, default=150)
    arguments.add_argument("--longest", type=int, default=512)
    arguments.add_argument("--budget", type=int, default=2048, help="tokens of a micro-batch")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    lengths = heavy_tailed_lengths(given.samples, given.mean, given.longest)
    shuffled = random.Random(0).sample(lengths, len(lengths))
    ways = {
        "packed": lengths,
        "padded by length": padded(sorted(lengths), given.budget),
        "padded": padded(shuffled, given.budget),
    }
    shape = SHAPES[given.shape]
    with one_rank():
        model = random_model(
            shape, ActorConfig(max_tokens_per_microbatch=given.budget), given.dtype
        )
        steps = [
            gradient_step(model, sample_batch(computed, shape.vocab)) for computed in ways.values()
        ]
        seconds = in_turns(steps, given.repeats)
    rows = [
        {
            "batches": name,
            "real tok/s": sum(lengths) / float(np.median(took)),
            "computed for each real token": sum(computed) / sum(lengths),
        }
        for (name, computed), took in zip(ways.items(), seconds, strict=True)
    ]
    figures = [
        ratio_figure(f"forward and backward, {name} over packed", took, seconds[0])
        for name, took in zip(ways, seconds, strict=True)
    ][1:]
    publish(
        f"{given.shape}, {given.samples} samples of {given.mean:.0f} tokens on average",
        rows,
        given.json,
        figures,
    )


if __name__ == "__main__":
    main()

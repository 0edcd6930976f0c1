"""Tokens a second as ranks are added, for each way to cut the work.

    python -m benchmarks.scaling [--shape 10m] [--ranks 1 2] [--samples 32] [--length 512] [--json
    FILE]

The batch stays the same. "of ideal" is the speed over that of one rank times the ranks. Ranks
beyond the cores (or GPUs) of the machine can show nothing but the cost of communication.
"""

from typing import Any

import numpy as np

from benchmarks.common import (
    SHAPES,
    gradient_step,
    in_turns,
    over_ranks,
    parser,
    publish,
    random_model,
    ratio_figure,
    sample_batch,
)
from vapo_megatron.config.model import ActorConfig, LayoutConfig


def layouts(ranks: int, shape: str) -> dict[str, LayoutConfig]:
    """All of the ranks given to one kind of parallelism."""
    found = {"DP": LayoutConfig()}
    if ranks > 1:
        found["CP"] = LayoutConfig(cp=ranks)
        if SHAPES[shape].kv_heads % ranks == 0:
            found["TP+SP"] = LayoutConfig(tp=ranks, sequence_parallel=True)
        if SHAPES[shape].layers % ranks == 0:
            found["PP"] = LayoutConfig(pp=ranks)
    return found


def measure(
    shape: str, layout: dict[str, Any], samples: int, length: int, dtype: str, repeats: int
) -> dict[str, list[float]]:
    """On every rank: seconds of forward and backward, round by round."""
    cut = LayoutConfig(**layout)
    budget = max(4 * length // cut.cp, length)
    model = random_model(
        SHAPES[shape], ActorConfig(layout=cut, max_tokens_per_microbatch=budget), dtype
    )
    batch = sample_batch([length] * samples, SHAPES[shape].vocab)
    return {"seconds": in_turns([gradient_step(model, batch)], repeats)[0]}


def main() -> None:
    """A row for each number of ranks and kind of parallelism."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="10m")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--samples", type=int, default=32)
    arguments.add_argument("--length", type=int, default=512)
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    found: dict[str, list[float]] = {}
    tokens = given.samples * (given.length - 1)
    for ranks in given.ranks:
        for name, layout in layouts(ranks, given.shape).items():
            sizes = given.samples, given.length, given.dtype, given.repeats
            seconds = over_ranks(ranks, measure, given.shape, layout.model_dump(), *sizes)[
                "seconds"
            ]
            found[f"{name} x {ranks}"] = seconds
            rows.append(
                {"layout": f"{name} x {ranks}", "tok/s": tokens / float(np.median(seconds))}
            )
            rows[-1]["of ideal"] = rows[-1]["tok/s"] / rows[0]["tok/s"] * given.ranks[0] / ranks
    alone = next(iter(found.values()))
    figures = [
        ratio_figure(f"one rank over {name}", alone, seconds) for name, seconds in found.items()
    ][1:]
    title = f"{given.shape}, {given.samples} samples of {given.length} tokens, {given.dtype}"
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()

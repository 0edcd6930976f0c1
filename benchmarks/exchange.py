"""What a rank of a large world spends on exchanging samples, beside a plain copy of its bytes.

    python -m benchmarks.exchange [--ranks 64 256 1024] [--samples-per-rank 16] [--length 500]
                                  [--repeats 5] [--json FILE]

One rank is measured. The others are stood in for: the collective is a copy of as many bytes as
would arrive, so that nothing but this rank's own work is in the figures. Growth is the exponent of
time against ranks; the bytes of a rank stay the same.
"""

from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import growth, in_turns, parser, publish, ratio_figure
from vapo_megatron.training import exchange as exchanges

FIELDS = {
    "tokens": torch.int32,
    "rollout_logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "values": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
    "importance_weights": torch.float32,
    "ref_logprobs": torch.float32,
    "entropies": torch.float32,
    "loss_mask": torch.bool,
    "positions": torch.int64,
}


def arrive(received: Tensor, sent: Tensor, *_: object) -> None:
    """Stands in for the all-to-all: as many bytes as come in are written."""
    received.copy_(sent[:1].expand(len(received)))


def main() -> None:
    """Measure each number of ranks."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    arguments.add_argument("--samples-per-rank", type=int, default=16)
    arguments.add_argument("--length", type=int, default=500)
    arguments.add_argument("--repeats", type=int, default=5)
    args = arguments.parse_args()
    rows = []
    figures = []
    medians = []
    for world in args.ranks:
        random = np.random.default_rng(world)
        samples = world * args.samples_per_rank
        lengths = torch.from_numpy(random.integers(args.length // 2, args.length * 3 // 2, samples))
        held = np.split(random.permutation(samples), world)
        wanted = np.split(random.permutation(samples), world)
        count = int(lengths[torch.from_numpy(held[0])].sum())
        fields = {name: torch.zeros(count, dtype=dtype) for name, dtype in FIELDS.items()}
        counts = dict.fromkeys(fields, lengths)

        def exchange(
            fields: dict[str, Tensor] = fields,
            counts: dict[str, Tensor] = counts,
            held: list[exchanges.Samples] = held,
            wanted: list[exchanges.Samples] = wanted,
        ) -> None:
            exchanges.exchange(fields, counts, held, wanted)

        def copy(fields: dict[str, Tensor] = fields) -> None:
            for field in fields.values():
                field.clone()

        with (
            patch.object(exchanges, "rank_and_world", lambda world=world: (0, world)),
            patch.object(exchanges.dist, "all_to_all_single", arrive),
        ):
            exchanging, copying = in_turns([exchange, copy], args.repeats)
        seconds = float(np.median(exchanging))
        medians.append(seconds)
        rows.append(
            {"ranks": world, "exchange ms": seconds * 1e3, "copy ms": np.median(copying) * 1e3}
        )
        figures.append(ratio_figure(f"copy over exchange, {world} ranks", copying, exchanging))
    if len(medians) > 1:
        exponents = [""] * (len(rows) - 1) + [growth(args.ranks, medians)]
        for row, exponent in zip(rows, exponents, strict=True):
            row["growth"] = exponent
    publish("What does exchanging samples cost a rank?", rows, args.json, figures)


if __name__ == "__main__":
    main()

"""What an engine spends on loading a bucket of many tensors strictly, beside plain copies of them.

    python -m benchmarks.strict_loading [--tensors 1536 12288] [--elements 8192] [--repeats 5]
                                        [--json FILE]

The model is a stand-in whose loader does what SGLang's do for experts: it looks the parameter up by
name and copies each tensor to its place in a stacked one. Rows, in milliseconds:

    copies      every tensor copied to its place, one after another, and nothing else
    watched     the first sync: the loader is watched, and what it does is learnt
    replayed    a later one: the same places, the same checks
    checksums   of all tensors of the bucket alone, which both of these have beside them

Growth is the exponent of the replayed time against tensors.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import growth, in_turns, parser, publish, ratio_figure
from vapo_megatron.engines.inside.strict_loading import StrictLoader
from vapo_megatron.engines.inside.strict_updates import take_message
from vapo_megatron.weights.bucket import Bucket, DeviceSlots, announce, pack, sums_of_places

EXPERTS = 128


class Stacked(torch.nn.Module):
    """Experts of many layers, stacked by layer."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        layers = tensors // EXPERTS
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(EXPERTS, elements, dtype=torch.bfloat16))
            for _ in range(layers)
        )

    def places(self) -> list[tuple[str, torch.Tensor]]:
        """Name and place of every tensor."""
        return [
            (f"layers.{layer}.experts.{expert}", parameter.data[expert])
            for layer, parameter in enumerate(self.layers)
            for expert in range(EXPERTS)
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As SGLang's models load them."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            layer, _, expert = name.partition(".experts.")
            parameters[layer].data[int(expert)].copy_(tensor)


class Sent(NamedTuple):
    """A weight sync of one bucket, and the message that ends it."""

    bucket: Bucket
    message: dict[str, Any]
    end: dict[str, Any]


def load(loader: StrictLoader, sent: Sent) -> None:
    """Load the bucket, and check it."""
    problems = take_message(loader, sent.message, sent.bucket.buffer)
    assert not problems and loader.checksums == sent.bucket.checksums()
    assert not take_message(loader, sent.end)


def load_watched(model: Stacked, sent: Sent) -> None:
    """As at the first sync, when nothing is known of the model."""
    load(StrictLoader(model), sent)


def copy(places: Sequence[torch.Tensor], bucket: Bucket) -> None:
    """The bucket's tensors to their places, without a check."""
    for place, (_, tensor) in zip(places, bucket, strict=True):
        place.copy_(tensor)


def main() -> None:
    """Measure each number of tensors."""
    arguments = parser(__doc__)
    arguments.add_argument("--tensors", type=int, nargs="+", default=[1536, 12288])
    arguments.add_argument("--elements", type=int, default=8192)
    arguments.add_argument("--repeats", type=int, default=5)
    args = arguments.parse_args()
    rows = []
    figures = []
    medians = []
    for count in args.tensors:
        model = Stacked(count, args.elements)
        places = model.places()
        tensors = [(name, torch.randn(args.elements).bfloat16()) for name, _ in places]
        bucket = pack(tensors, DeviceSlots(torch.device("cpu")))
        message = announce(bucket, "load", first=True, last=False)
        sent = Sent(bucket, message, announce(None, "load", first=False, last=True))
        learnt = StrictLoader(model)
        for _ in range(2):  # the second is compared with the loader's
            assert not take_message(learnt, message, bucket.buffer)
        copies, watched, replayed, sums = in_turns(
            [
                partial(copy, [place for _, place in places], bucket),
                partial(load_watched, model, sent),
                partial(load, learnt, sent),
                partial(sums_of_places, bucket.buffer, bucket.places),
            ],
            args.repeats,
        )
        medians.append(float(np.median(replayed)))
        rows.append(
            {
                "tensors": count,
                "MB": bucket.buffer.numel() / 1e6,
                "copies ms": np.median(copies) * 1e3,
                "watched ms": np.median(watched) * 1e3,
                "replayed ms": medians[-1] * 1e3,
                "checksums ms": np.median(sums) * 1e3,
                "watched over copies": np.median(np.divide(watched, copies)),
                "replayed over copies": np.median(np.divide(replayed, copies)),
            }
        )
        figures += [
            ratio_figure(f"{count} tensors, plain copies over replayed", copies, replayed),
            ratio_figure(f"{count} tensors, watched over replayed", watched, replayed),
        ]
    if len(medians) > 1:
        exponents = [""] * (len(rows) - 1) + [growth(args.tensors, medians)]
        for row, exponent in zip(rows, exponents, strict=True):
            row["growth"] = exponent
    publish("What does strict loading add to copies?", rows, args.json, figures)


if __name__ == "__main__":
    main()

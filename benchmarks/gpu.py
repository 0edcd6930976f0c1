"""One GPU: tokens a second and model FLOP/s utilisation, BF16 against FP8, for 1.5B, 7B and a slice of 32B.

    python -m benchmarks.gpu [--shapes 1.5b 7b 32b-slice] [--length 4096] [--json FILE]     on an H100 or H200
    python -m benchmarks.gpu --tiny                                                         the same code on a CPU

Forward and backward over a packed micro-batch, no layer recomputed; there is no optimizer, so that 7B fits one GPU. A
row that does not fit says so: take fewer --sequences. The 32B slice is 6 of 64 layers at full width, what a rank of a
pipeline holds. FLOPs of a token: 6 for each weight that multiplies it (word embeddings do not, the output layer does),
and 12 x layers x heads x head size x half the length for causal attention; logits computed again are not counted. The
peak is that of dense BF16, for FP8 rows too, so that rows compare.
"""

import argparse
from typing import Any

import torch

from benchmarks.common import SHAPES, Shape, gradient_seconds, one_rank, parser, publish, random_model, sample_batch
from vapo_megatron.config.model import ActorConfig, PrecisionConfig
from vapo_megatron.errors import VapoError
from vapo_megatron.mcore.platform import current_platform

RECIPES = ("none", "tensorwise", "delayed", "blockwise")
# Dense BF16 FLOP/s by the makers' data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def flops_per_token(shape: Shape, length: int) -> float:
    """Of forward and backward, see above."""
    spec = shape.spec()
    weights = spec.parameter_count() - (0 if spec.tied else spec.vocab_size * spec.hidden_size)
    return 6 * weights + 12 * spec.num_layers * spec.num_heads * spec.head_dim * length / 2


def peak_flops() -> float | None:
    """Dense BF16 FLOP/s of this GPU, where it is a known one."""
    if not current_platform().is_cuda:
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def measure(shape: Shape, recipe: str, given: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second and MFU of one recipe, or why there are none."""
    config = ActorConfig(
        max_tokens_per_microbatch=given.length * given.sequences,
        precision=PrecisionConfig(fp8=recipe),  # type: ignore[arg-type]
    )
    batch = sample_batch([given.length] * given.sequences, shape.vocab)
    try:
        seconds = gradient_seconds(random_model(shape, config, "bfloat16", optimizer=False), batch, given.repeats)
    except VapoError as error:
        print(f"fp8 {recipe}: {error}")
        return {"tok/s": "refused", "MFU": "-"}
    except torch.cuda.OutOfMemoryError:
        return {"tok/s": "does not fit", "MFU": "-"}
    speed = given.sequences * (given.length - 1) / seconds
    peak = peak_flops()
    return {"tok/s": speed, "MFU": f"{speed * flops_per_token(shape, given.length) / peak:.1%}" if peak else "-"}


def main() -> None:
    """A row for each shape and recipe."""
    arguments = parser(__doc__)
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5b", "7b", "32b-slice"])
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    arguments.add_argument("--length", type=int, default=4096)
    arguments.add_argument("--sequences", type=int, default=1, help="of a micro-batch")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--tiny", action="store_true", help="a tiny shape and short sequences, for the code's sake")
    given = arguments.parse_args()
    if given.tiny:
        given.shapes, given.length, given.sequences, given.repeats = ["tiny"], 64, 2, 1
    rows = []
    with one_rank():
        for name in given.shapes:
            for recipe in given.recipes:
                label = "bf16" if recipe == "none" else f"fp8 {recipe}"
                rows.append({"shape": name, "precision": label, **measure(SHAPES[name], recipe, given)})
                current_platform().empty_cache()
    publish(f"{given.sequences} sequences of {given.length} tokens a micro-batch", rows, given.json)


if __name__ == "__main__":
    main()

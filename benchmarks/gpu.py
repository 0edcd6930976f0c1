"""One GPU: seconds of forward and backward, and of the optimizer; tokens a second; model FLOP/s
utilisation (MFU). BF16 against FP8, for 1.5B, 7B and a slice of 32B.

    python -m benchmarks.gpu [--shapes 1.5b 7b 32b-slice] [--length 4096] [--json FILE]     on an
    H100 or H200 python -m benchmarks.gpu --tiny
        the same code on a CPU

Training steps over a packed micro-batch, no layer recomputed; every trainable parameter must have
got a gradient, or the benchmark ends with an error. `optimizer` is the rest of a step: gradient
norm and AdamW on float32 states. With its optimizer (18 bytes a parameter) 7B does not fit one GPU
of 80 or 141 GB: such a row is measured without, gradients in bfloat16 and no update (`none` under
optimizer). A row that does not fit even so says so: take fewer --sequences. The 32B slice is 6 of
64 layers at full width, what a rank of a pipeline holds. FLOPs of a token: 6 for each weight that
multiplies it (word embeddings do not, the output layer does), and 12 x layers x heads x head size x
half the length for causal attention; logits computed again are not counted. MFU is that of the
whole step, `MFU f+b` without the optimizer; the peak is that of dense BF16, for FP8 rows too, so
that rows compare. `linear` is what a plan has to assume as hardware.efficiency.linear to get these
seconds.
"""

import argparse
import gc
import time
from typing import Any

import torch

from benchmarks.common import (
    SHAPES,
    Shape,
    one_rank,
    parser,
    publish,
    random_model,
    sample_batch,
    sft_loss,
)
from vapo_megatron.config.model import (
    ActorConfig,
    LayoutConfig,
    OptimizerSettings,
    PrecisionConfig,
    RecomputeConfig,
)
from vapo_megatron.config.plan import EfficiencyConfig
from vapo_megatron.data.batch import ExperienceBatch
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.megatron.platform import current_platform
from vapo_megatron.megatron.trainable import Trainable
from vapo_megatron.operations.plan.rollout import forward_flops, training_flops

RECIPES = ("none", "tensorwise", "blockwise")
# Dense BF16 FLOP/s by the makers' data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
_STATE_BYTES = 18  # of a parameter in bfloat16 with float32 gradients, main weights and two moments
_NOTHING = dict.fromkeys(("f+b s", "optimizer s", "MFU f+b", "MFU", "parameters", "linear"), "-")


def flops_per_token(shape: Shape, length: int) -> float:
    """Of forward and backward, see above."""
    spec = shape.spec()
    weights = spec.parameter_count() - (0 if spec.tied else spec.vocab_size * spec.hidden_size)
    return 6 * weights + 12 * spec.attention_width * length / 2


def planned_efficiency(shape: Shape, length: int, sequences: int, seconds: float) -> float:
    """The share of the peak with which a plan's linear layers take these seconds of forward and
    backward, attention keeping its assumed ratio to it."""
    assumed, peak, spec = EfficiencyConfig(), peak_flops(), shape.spec()
    assert peak is not None, "the rate of this GPU is not known"
    tokens = sequences * (length - 1)
    forward = forward_flops(spec, "lm", tokens, sequences * length**2, tokens)
    work = training_flops(spec, forward, LayoutConfig(), RecomputeConfig())
    units = work.linear + work.head + work.attention * assumed.linear / assumed.attention
    return units / seconds / peak


def peak_flops() -> float | None:
    """Dense BF16 FLOP/s of this GPU, where it is a known one."""
    if not current_platform().is_cuda:
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def fits_with_optimizer(shape: Shape) -> bool:
    """Whether weights, gradients and optimizer states leave an eighth of the GPU to activations."""
    if not current_platform().is_cuda:
        return True
    return _STATE_BYTES * shape.spec().parameter_count() < 7 / 8 * torch.cuda.mem_get_info()[1]


def check_gradients(trainable: Trainable) -> None:
    """Raises RunFailed where a parameter has no gradient after the backward pass, or only zeros, or
    none is trained."""
    missing, trained = [], 0
    for chunk in trainable.chunks:
        for name, parameter in chunk.named_parameters():
            trained += parameter.requires_grad
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is None or not bool(gradient.isfinite().all()) or not bool(gradient.any()):
                missing.append(name)
    if missing or not trained:
        raise RunFailed(
            f"{len(missing)} of {trained} trainable parameters have no gradient, the first of them "
            f"{', '.join(missing[:3]) or 'none'}: this would not time a backward pass"
        )


def step_seconds(
    trainable: Trainable, batch: ExperienceBatch, repeats: int, update: bool
) -> tuple[float, float]:
    """Least seconds of forward and backward, and of the update (0 without), of `repeats` steps
    after one that does not count."""
    loss, samples, platform = sft_loss(batch), range(batch.samples), current_platform()
    passes = updates = float("inf")
    for repeat in range(repeats + 1):
        platform.synchronize()
        start = time.perf_counter()
        trainable.gradients(batch, samples, loss)
        platform.synchronize()
        middle = time.perf_counter()
        if repeat == 0:
            check_gradients(trainable)
        resumed = time.perf_counter()
        if update:
            trainable.scheduler.step(1)
            trainable.optimizer.step()
            platform.synchronize()
        if repeat:
            passes = min(passes, middle - start)
            updates = min(updates, time.perf_counter() - resumed)
    return passes, updates if update else 0.0


def measure(shape: Shape, recipe: str, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds, tokens a second and MFU of one recipe, or why there are none."""
    config = ActorConfig(
        max_tokens_per_microbatch=given.length * given.sequences,
        precision=PrecisionConfig(fp8=recipe),
        # The update is timed apart: the gather of its weights must not wait for the next forward
        # pass.
        optimizer=OptimizerSettings(overlap=False),
    )
    batch = sample_batch([given.length] * given.sequences, shape.vocab)
    update = fits_with_optimizer(shape)
    try:
        model = random_model(shape, config, "bfloat16", optimizer=update, gradients=True)
        passes, updates = step_seconds(model, batch, given.repeats, update)
    except BadInput as error:
        print(f"fp8 {recipe}: {error}")
        return {"tok/s": "refused", **_NOTHING}
    except torch.cuda.OutOfMemoryError:
        return {"tok/s": "does not fit", **_NOTHING}
    tokens = given.sequences * (given.length - 1)
    work, peak = tokens * flops_per_token(shape, given.length), peak_flops()
    return {
        "tok/s": tokens / (passes + updates),
        "f+b s": passes,
        "optimizer s": updates if update else "none",
        "MFU f+b": f"{work / passes / peak:.1%}" if peak else "-",
        "MFU": f"{work / (passes + updates) / peak:.1%}" if peak and update else "-",
        "parameters": shape.spec().parameter_count(),
        "linear": planned_efficiency(shape, given.length, given.sequences, passes) if peak else "-",
    }


def main() -> None:
    """A row for each shape and recipe."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["1.5b", "7b", "32b-slice"]
    )
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    arguments.add_argument("--length", type=int, default=4096)
    arguments.add_argument("--sequences", type=int, default=1, help="of a micro-batch")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument(
        "--tiny", action="store_true", help="a tiny shape and short sequences, for the code's sake"
    )
    given = arguments.parse_args()
    if given.tiny:
        given.shapes, given.length, given.sequences, given.repeats = ["tiny"], 64, 2, 1
    rows = []
    with one_rank():
        for name in given.shapes:
            for recipe in given.recipes:
                label = "bf16" if recipe == "none" else f"fp8 {recipe}"
                rows.append(
                    {"shape": name, "precision": label, **measure(SHAPES[name], recipe, given)}
                )
                gc.collect()  # the model of the row before is a cycle
                current_platform().empty_cache()
    publish(f"{given.sequences} sequences of {given.length} tokens a micro-batch", rows, given.json)


if __name__ == "__main__":
    main()

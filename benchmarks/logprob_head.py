"""Log-probs and entropy from chunks of logits against whole logits and Liger's fused linear
cross-entropy: time, and the most memory beyond the inputs.

    python -m benchmarks.logprob_head [--words 151936] [--tokens 8192] [--hidden 1536] [--chunk
    ROWS] [--json FILE]

Forward and backward of both; "plain" is log_softmax over fp32 logits, then gather and entropy, as
trainers without a fused head do it. On a CPU memory is what the process holds resident at most,
beyond what it held before, measured in a process of its own; the plain way holds several times
tokens x words x 4 bytes (5 GB with the defaults), fewer --tokens take in proportion. On a GPU it is
what the allocator gave at most.

"chunked" is the trainer's head with model.logprob_kernel=torch. On a GPU there are two more:
"triton" is the head with model.logprob_kernel=triton; "liger" is Liger's fused linear
cross-entropy, where liger_kernel is installed, with its weight's gradient summed in fp32. Liger
yields one mean loss, no log-probs and no entropy, so it has no row with entropy; the ratio with
entropy is to Liger's time without.
"""

import argparse
import importlib.util
import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import in_turns, memory_gauge, one_rank, parser, publish, ratio_figure
from vapo_megatron.config.model import logits_rows
from vapo_megatron.megatron.logprobs import LogProbs
from vapo_megatron.megatron.platform import current_platform

# Log-probs and entropies [t] of hidden states, weight and labels.
Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
KERNELS = {"chunked": "torch", "triton": "triton"}


def ways() -> tuple[str, ...]:
    """The heads that work on this machine."""
    found = ["plain", "chunked"]
    if current_platform().is_cuda:
        found.append("triton")
        if importlib.util.find_spec("liger_kernel"):
            found.append("liger")
    return tuple(found)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [t] from whole logits."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean log-prob, and an entropy of 0 in place of the one that Liger does not have."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    logprob = -loss(weight, hidden, labels)
    return logprob, logprob.new_zeros(())


def measure(name: str, given: argparse.Namespace, entropy: bool) -> tuple[list[float], float]:
    """Seconds of forward and backward, round by round, and MiB at most beyond the inputs."""
    device, dtype = current_platform().device, getattr(torch, given.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(given.tokens, given.hidden, generator=generator)
        .to(device, dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(given.words, given.hidden, generator=generator)
        .to(device, dtype)
        .mul_(0.02)
        .requires_grad_()
    )
    labels = torch.randint(0, given.words, (given.tokens,), generator=generator).to(device)

    def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = LogProbs.apply(
            hidden, weight, labels, given.words, 1.0, dist.group.WORLD, given.chunk, KERNELS[name]
        )
        return outputs

    head: Head = {"plain": plain, "liger": liger}.get(name, chunked)

    def step() -> None:
        hidden.grad = weight.grad = None
        logprob, spread = head(hidden, weight, labels)
        (-logprob.mean() - (0.01 * spread.mean() if entropy else 0)).backward()

    gauge = memory_gauge()
    gauge.reset()
    before = current_platform().memory_bytes()
    step()
    beyond = (gauge.peak() - before) / 2**20
    return in_turns([step], given.repeats)[0], beyond


def _measure_alone(answers: Any, *args: Any) -> None:
    with one_rank():
        answers.put(measure(*args))


def main() -> None:
    """Print a row for each way, with and without an entropy term in the loss."""
    arguments = parser(__doc__)
    arguments.add_argument("--words", type=int, default=151936)
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--hidden", type=int, default=1536)
    arguments.add_argument(
        "--chunk", type=int, help="rows of logits held at once; as a run has it where left out"
    )
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument(
        "--only", choices=ways(), help="one head alone, as where the plain way does not fit"
    )
    given = arguments.parse_args()
    given.chunk = given.chunk or logits_rows(given.words)
    rows, figures = [], []
    seconds: dict[tuple[str, bool], list[float]] = {}
    context = multiprocessing.get_context("spawn")
    for entropy in (False, True):
        for name in ways() if given.only is None else (given.only,):
            if entropy and name == "liger":
                continue
            answers = context.Queue()
            worker = context.Process(target=_measure_alone, args=(answers, name, given, entropy))
            worker.start()
            worker.join()
            if worker.exitcode:
                raise SystemExit(
                    f"{name}: ended with code {worker.exitcode}; it may not have fit, try fewer "
                    "--tokens"
                )
            seconds[name, entropy], peak = answers.get()
            told = "yes" if entropy else "no"
            row = {
                "head": name,
                "entropy in the loss": told,
                "seconds": float(np.median(seconds[name, entropy])),
            }
            rows.append(row | {"peak MiB": peak})
        what = "with entropy" if entropy else "without entropy"
        figures += [
            ratio_figure(f"{what}, {title}", seconds[theirs], seconds[ours, entropy])
            for title, theirs, ours in (
                ("whole logits over chunks", ("plain", entropy), "chunked"),
                ("torch over triton", ("chunked", entropy), "triton"),
                ("Liger over triton", ("liger", False), "triton"),
            )
            if theirs in seconds and (ours, entropy) in seconds
        ]
    title = (
        f"{given.tokens} tokens, {given.words} words, hidden {given.hidden}, {given.dtype}, chunk "
        f"{given.chunk}"
    )
    publish(title, rows, given.json, figures)


if __name__ == "__main__":
    main()

"""What an asynchronous save adds to a step: steps without and with one in turns, in one run.

    python -m benchmarks.save_beside_steps [--shape 50m] [--ranks 1] [--tokens 4096] [--json FILE]

    step s     forward, backward and update of so many tokens per rank
    saved s    the same step with a whole save begun before it, as in training
               (checkpoint/state_saver.py): the part that the step waits for, and the part that is
               written during the step
    left s     how much of the save remains when the step ends; training would wait for it only at
    its next save

A rank computes on one thread, and the save needs part of another: with as many ranks as cores, it
slows them down.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.common import (
    SHAPES,
    over_ranks,
    parser,
    publish,
    random_model,
    ratio_figure,
    sample_batch,
    sft_loss,
)
from vapo_megatron.checkpoint.manifest import Progress
from vapo_megatron.checkpoint.resume import SavedModel
from vapo_megatron.checkpoint.state_saver import Outcome, SavedRun, Snapshot, StateSaver
from vapo_megatron.config.model import ActorConfig, ModelConfig
from vapo_megatron.config.run import RetentionConfig
from vapo_megatron.config.sft import SftConfig, SftDataConfig

SAMPLE_TOKENS = 64
PARTS = ("step", "saved", "left")


def measure(shape: str, root: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Collective: seconds of each part, round by round."""
    model = random_model(SHAPES[shape], ActorConfig(), "float32")
    batch = sample_batch(
        [SAMPLE_TOKENS] * (tokens // SAMPLE_TOKENS * dist.get_world_size()), SHAPES[shape].vocab
    )
    loss, source, run_dir = sft_loss(batch), Path(root) / "hf", Path(root) / "run"
    if dist.get_rank() == 0:
        SHAPES[shape].hf_config().save_pretrained(source)
    settings = SftConfig(
        model=ModelConfig(path=str(source)), data=SftDataConfig(path="none", steps=repeats)
    )
    run = SavedRun(settings, "sft", run_dir, {"actor": SavedModel(model, source)}, "benchmark")
    saver = StateSaver(run, run_dir, RetentionConfig(last=1))

    def step() -> None:
        model.train_step(batch, range(batch.samples), loss)

    def saved_step(number: int) -> None:
        saver.begin(Snapshot(Progress(step=number), {}), nullcontext)
        step()

    def finish() -> None:
        outcome = saver.finish()
        assert isinstance(outcome, Outcome), outcome

    found: dict[str, Any] = {name: [] for name in PARTS}
    for number in range(repeats + 1):
        took = [timed(step), timed(partial(saved_step, number)), timed(finish)]
        if number:
            for name, seconds in zip(PARTS, took, strict=True):
                found[name].append(seconds)
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    return found | {
        "bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    }


def timed(work: Callable[[], object]) -> float:
    """Collective: seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    """A row for each number of ranks."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="50m")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1])
    arguments.add_argument("--tokens", type=int, default=4096, help="of a step, a rank")
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    rows, figures = [], []
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as root:
            found = over_ranks(ranks, measure, given.shape, root, given.tokens, given.repeats)
        medians = {f"{name} s": float(np.median(found[name])) for name in PARTS}
        rows.append({"ranks": ranks, "GB": found["bytes"] / 1e9, **medians})
        figures.append(
            ratio_figure(
                f"{ranks} ranks, a step over one beside a save", found["step"], found["saved"]
            )
        )
    publish(f"{given.shape}, steps of {given.tokens} tokens a rank", rows, given.json, figures)


if __name__ == "__main__":
    main()

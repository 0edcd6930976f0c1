"""Saving a model's training state and loading it again, against torch.save and torch.load of as
many bytes, in one run.

    python -m benchmarks.saving [--shape 50m] [--ranks 1 2] [--json FILE]

What a checkpoint of one model takes: float32 weights and both moments of AdamW, cut over
data-parallel ranks. Files are in memory (/dev/shm), so that no disk shows. The two take turns,
round by round.

    plan s     training stands still: agreeing on who writes what, copying to the host; write s:
               while training goes on, digests included; load s: a resume, every file compared with
               its digest first
    save, load GB/s a rank: of its part, from write s and load s
    torch s    rank 0 writes as many bytes alone, by torch.save; torch load s: it reads them
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import (
    SHAPES,
    gradient_step,
    over_ranks,
    parser,
    publish,
    random_model,
    ratio_figure,
    sample_batch,
)
from vapo_megatron.checkpoint.dist_saver import ModelSaver, load_training_state
from vapo_megatron.checkpoint.host_memory import ROOT
from vapo_megatron.checkpoint.manifest import check_contents
from vapo_megatron.config.model import ActorConfig

PARTS = ("plan", "write", "load", "torch", "torch load")


def measure(shape: str, root: str, repeats: int) -> dict[str, Any]:
    """Collective: seconds of each part, round by round, and bytes."""
    model = random_model(SHAPES[shape], ActorConfig(), "float32")
    gradient_step(model, sample_batch([64] * dist.get_world_size(), SHAPES[shape].vocab))()
    saver = ModelSaver(model)
    found: dict[str, Any] = {"bytes": 0, **{name: [] for name in PARTS}}
    for number in range(repeats + 1):
        folder = Path(root) / f"round{number}"
        folder.mkdir(exist_ok=True)
        dist.barrier()
        start = time.perf_counter()
        plan = saver.plan(folder)
        dist.barrier()
        planned = time.perf_counter()
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, plan.write())
        if dist.get_rank() == 0:
            plan.close([result for result, _ in results])
        dist.barrier()
        written = time.perf_counter()
        files = {folder / name: facts for _, own in results for name, facts in own.items()}
        names = sorted(files)[dist.get_rank() :: dist.get_world_size()]
        assert check_contents(folder, {name: files[name] for name in names}) is None
        load_training_state(model, folder)
        took = [planned - start, written - planned, time.perf_counter() - written]
        if dist.get_rank() == 0:
            found["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
            tensors = [torch.ones(found["bytes"] // 4 // 16) for _ in range(16)]
            start = time.perf_counter()
            with (folder / "torch.pt").open("wb") as out:
                torch.save(tensors, out)
                out.flush()
            took.append(time.perf_counter() - start)
            start = time.perf_counter()
            torch.load(folder / "torch.pt", weights_only=True)
            took.append(time.perf_counter() - start)
            for file in folder.iterdir():
                file.unlink()
            if number:
                for name, seconds in zip(PARTS, took, strict=True):
                    found[name].append(seconds)
        dist.barrier()
    return found


def main() -> None:
    """A row for each number of ranks."""
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="50m")
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    rows, figures = [], []
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory(dir=ROOT) as root:
            found = over_ranks(ranks, measure, given.shape, root, given.repeats)
        medians = {f"{name} s": float(np.median(found[name])) for name in PARTS}
        share = found["bytes"] / 1e9 / ranks
        rates = {
            f"{done} GB/s": share / medians[f"{name} s"]
            for done, name in (("save", "write"), ("load", "load"))
        }
        rows.append({"ranks": ranks, "GB": found["bytes"] / 1e9, **medians, **rates})
        whole = np.add(found["plan"], found["write"])
        figures.append(
            ratio_figure(
                f"{ranks} ranks, torch.save over a checkpoint's model", found["torch"], whole
            )
        )
        figures.append(
            ratio_figure(
                f"{ranks} ranks, torch.load over a resume's", found["torch load"], found["load"]
            )
        )
    publish(f"{given.shape}, weights and AdamW", rows, given.json, figures)


if __name__ == "__main__":
    main()

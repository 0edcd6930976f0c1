"""What a conversion takes: seconds, and the most memory that the converter holds, beside the size
of the model.

    python -m benchmarks.convert [--shape 0.7b] [--shard-size 0.25] [--folder DIR] [--json FILE]

A Qwen2 model of random bfloat16 weights is written file by file. tools/convert_hf_to_megatron.py
makes a checkpoint of it and tools/convert_megatron_to_hf.py a Hugging Face directory of that, each
as a program of its own. Both do the same with a tiny model before: that is what the programs take
whatever they convert.

Columns:

    seconds      of the whole program, imports included; what it reads was written just before
    MiB at most  memory of its process that is no page of a file (RssAnon), read every 5 ms
    MiB beyond   the same, less that of the tiny model's conversion
    of the model MiB beyond over the bytes of the model

A model of this size would be one file of the default of 2 GiB: --shard-size is lower here, to show
what memory follows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import SHAPES, Figure, Shape, anonymous_bytes, parser, publish
from vapo_megatron.weights.hf_writer import hf_writer

TOOLS = Path(__file__).parents[1] / "tools"


def write_model(shape: Shape, folder: Path, shard_bytes: int) -> int:
    """Write a Hugging Face directory of random weights; the bytes of its tensors. Memory: one file
    of it."""
    config = shape.hf_config()
    config.architectures, config.dtype = ["Qwen2ForCausalLM"], torch.bfloat16
    with torch.device("meta"):
        tensors = transformers.Qwen2ForCausalLM(config).state_dict()
    if shape.tied:
        del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(0)
    with hf_writer(folder, json.loads(config.to_json_string()), folder, (), shard_bytes) as writer:
        for name, like in tensors.items():
            writer.add(
                name,
                torch.empty(like.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator),
            )
    return sum(like.numel() * torch.bfloat16.itemsize for like in tensors.values())


def watched(command: Sequence[str]) -> tuple[float, int]:
    """Run a program to its end: seconds, and the most bytes of RssAnon."""
    with tempfile.TemporaryFile("w+") as output:
        start, most = time.perf_counter(), 0
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                most = max(most, anonymous_bytes(process.pid))
                time.sleep(0.005)
        seconds = time.perf_counter() - start
        if process.returncode:
            output.seek(0)
            raise SystemExit(
                f"{' '.join(command)}: ended with code "
                f"{process.returncode}\n{output.read()[-2000:]}"
            )
    return seconds, most


def there_and_back(name: str, root: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each direction."""
    total = write_model(SHAPES[name], root / "hf", int(given.shard_size * 2**30))
    rows = []
    for tool, source, folder, target in (
        ("convert_hf_to_megatron.py", "--hf", "hf", "megatron"),
        ("convert_megatron_to_hf.py", "--checkpoint", "megatron", "back"),
    ):
        command = [sys.executable, "-W", "ignore", str(TOOLS / tool), source, str(root / folder)]
        command += ["--out", str(root / target), "--shard-size", str(given.shard_size)]
        seconds, most = watched(command)
        rows.append(
            {
                "program": tool,
                "model": name,
                "GB": total / 1e9,
                "seconds": seconds,
                "MiB at most": most / 2**20,
            }
        )
    return rows


def main() -> None:
    """Print a row for each program and model."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--shape", choices=[name for name in SHAPES if name != "tiny"], default="0.7b"
    )
    arguments.add_argument(
        "--shard-size", type=float, default=0.25, help="GiB of tensors in a file"
    )
    arguments.add_argument(
        "--folder", type=Path, help="on a disk with three times the model's size; default: /tmp"
    )
    given = arguments.parse_args()
    found = {}
    for name in ("tiny", given.shape):
        with tempfile.TemporaryDirectory(dir=given.folder) as root:
            found[name] = there_and_back(name, Path(root), given)
    rows, figures = [], []
    for program, tiny in zip(found[given.shape], found["tiny"], strict=True):
        for row in (tiny, program):
            beyond = row["MiB at most"] - tiny["MiB at most"]
            share = beyond * 2**20 / 1e9 / row["GB"]
            rows.append(row | {"MiB beyond": beyond, "of the model": share})
        # One run: a twentieth either way stands for quartiles.
        times = 1 / share
        name = f"{program['program']}, the model over memory beyond"
        figures.append(Figure(name, times, times * 0.95, times * 1.05))
    publish(f"files of at most {given.shard_size:g} GiB", rows, given.json, figures)


if __name__ == "__main__":
    main()

"""Corridors: what the metrics of a short run may be, from recorded runs of other seeds.

    python tests/corridors.py --seeds 101 102 ...    # records the quickstart's

Each figure of a new run has to lie in the interval that 99 % of runs like the recorded ones lie in
(a prediction interval by Student's t, two-sided: a figure that is too good is a fault as well).
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import scipy.stats

from vapo_megatron.files import atomic_write
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
FOLDER = Path(__file__).with_suffix("")
RECORDED = FOLDER / "quickstart.json"
CONFIDENCE = 0.99
STEPS = 10
LAST = 4
COLD_START = "accuracy after the cold start"
# One rank, one update a step, values of a critic that is calibrated: no value pretraining.
SHORT_RUN = (
    "preset=vapo_direct",
    "value_pretraining=null",
    "value_pretraining.enabled=false",
    "cluster.ranks=1",
    "actor.layout.tp=1",
    "critic.layout.tp=1",
    "actor.optimizer.lr=1.2e-3",
    "critic.optimizer.lr=2.4e-3",
    "batch.prompts_per_step=64",
    "batch.samples_per_prompt=1",
    "algorithm.update.rollout_logprobs_within=null",
    f"run.steps={STEPS}",
)
Figures = dict[str, float]


def outside(figures: Mapping[str, float], recorded: Mapping[str, Figures]) -> list[str]:
    """A line for each figure that is not where the recorded runs say, with how far it is off.

    recorded: figures by seed, at least three seeds.
    """
    lines = []
    for name in next(iter(recorded.values())):
        values = [run[name] for run in recorded.values()]
        n = len(values)
        t = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
        half = t * stdev(values) * math.sqrt(1 + 1 / n)
        low = fmean(values) - half
        high = fmean(values) + half
        value = figures.get(name, math.nan)
        if not low <= value <= high:
            lines.append(f"{name}: {value:.4g}, the corridor is {low:.4g} to {high:.4g}")
    return lines


def figures_of(run_dir: Path) -> Figures:
    """What the corridors hold of a short run."""
    rows = read_metrics(run_dir)
    steps = [row for row in rows if row["step"] > 0]

    def mean(name: str, of: Sequence[Mapping[str, Any]]) -> float:
        return fmean(row[name] for row in of)

    return {
        COLD_START: rows[0]["evaluation/unseen_avg@4"],
        f"accuracy of the last {LAST} steps": mean(names.ACCURACY, steps[-LAST:]),
        "entropy of the first step": steps[0][names.ENTROPY],
        f"entropy of the last {LAST} steps": mean(names.ENTROPY, steps[-LAST:]),
        f"response length of the last {LAST} steps": mean(names.LENGTH, steps[-LAST:]),
        "log of the KL between trainer and engine": math.log10(
            mean(names.TRAIN_INFER_KL, steps) + 1e-12
        ),
        "gradient norm of the actor": mean(names.ACTOR_GRAD_NORM, steps),
        f"value loss of the last {LAST} steps": mean(names.VALUE_LOSS, steps[-LAST:]),
    }


def cold_start(folder: Path, seed: int) -> Path:
    """The quickstart's task and its model after SFT; the model's directory."""
    make_task = (sys.executable, QUICKSTART / "make_task.py", "--out", folder / "task")
    _run(*make_task, "--seed", seed)
    _run(
        *_program("sft", QUICKSTART / "sft.yaml"),
        f"model.path={folder / 'task' / 'model'}",
        f"data.path={folder / 'task' / 'sft.jsonl'}",
        f"run.root={folder}",
        f"run.seed={seed}",
        "cluster.ranks=1",
        "actor.layout.tp=1",
    )
    return folder / "sft" / "hf" / "final" / "actor"


def short_run(folder: Path, model: Path, seed: int, planted: str | None = None) -> Figures:
    """Train for a few steps by the command line; the run's figures.

    planted: statements that the rank executes first; it is this one process then.
    """
    name = f"run_{abs(hash(planted)) % 10**6}"
    task = folder / "task"
    arguments = [
        "train",
        QUICKSTART / "vapo.yaml",
        *SHORT_RUN,
        f"model.path={model}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 4}}]",
        f"evaluation.every={STEPS}",
        f"run.root={folder}",
        f"run.name={name}",
        f"run.seed={seed}",
    ]
    if planted is None:
        _run(*_program(*arguments))
    else:
        program = f"{planted}\nfrom vapo_megatron.cli import main\nmain()\n"
        _run(sys.executable, "-W", "ignore", "-c", program, *arguments, **_one_rank())
    return figures_of(folder / name)


def _program(*arguments: object) -> list[object]:
    return [sys.executable, "-W", "ignore", "-m", "vapo_megatron.cli", *arguments]


def _one_rank() -> dict[str, str]:
    """What torchrun sets for a single rank, which then is the process that is started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def _run(*command: object, **environment: str) -> None:
    ended = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]


def main() -> None:
    """Record runs, one after the other; those that are recorded stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recorded[str(seed)] = short_run(folder, cold_start(folder, seed), seed)
        with atomic_write(RECORDED) as out:
            out.write(json.dumps(recorded, indent=1) + "\n")
        print(seed, recorded[str(seed)], flush=True)


if __name__ == "__main__":
    main()

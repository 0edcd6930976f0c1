"""Corridors: what the metrics of a short run may be, from recorded runs of other seeds.

    python tests/corridors.py --seeds 101 102 ...    # records the quickstart's
    python tests/corridors.py --seeds 101 102 ... --smollm MODEL    # SmolLM2's (prepare-model)

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
RECORDED_SMOLLM = FOLDER / "smollm.json"
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
# Eight problems that SmolLM2 solves now and then, all of them in every step.
PRODUCTS = ((2, 3), (3, 4), (2, 5), (4, 5), (3, 3), (2, 4), (6, 2), (5, 3))
SMOLLM_STEPS = 3
SMOLLM_RUN = (
    "actor.optimizer.lr=2.0e-5",
    "actor.optimizer.warmup_steps=0",
    "batch.prompts_per_step=8",
    "batch.samples_per_prompt=8",
    "algorithm.update.minibatch_size=32",
    "algorithm.update.rollout_logprobs_within=null",
    "data.eval=[]",
    "checkpoint.every_minutes=null",
    f"run.steps={SMOLLM_STEPS}",
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


def smollm_figures_of(run_dir: Path) -> Figures:
    """What the corridors hold of a short run of SmolLM2."""
    steps = read_metrics(run_dir)

    first = steps[0]
    last = steps[-1]
    divergence = fmean(row[names.TRAIN_INFER_KL] for row in steps)
    return {
        "accuracy of the first step": first[names.ACCURACY],
        "accuracy of the last step": last[names.ACCURACY],
        "entropy of the first step": first[names.ENTROPY],
        "entropy of the last step": last[names.ENTROPY],
        "response length of the last step": last[names.LENGTH],
        # Below it is rounding, which differs between processors.
        "log of the KL between trainer and engine": max(-6.0, math.log10(divergence + 1e-12)),
        "gradient norm of the actor": fmean(row[names.ACTOR_GRAD_NORM] for row in steps),
    }


def smollm_run(folder: Path, model: Path, seed: int, planted: str | None = None) -> Figures:
    """Train a prepared SmolLM2 for a few steps by the command line; the run's figures.

    planted: as in short_run().
    """
    rows = [{"problem": f"What is {a} * {b}?", "answer": str(a * b)} for a, b in PRODUCTS]
    problems = folder / "products.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    name = f"run_{abs(hash(planted)) % 10**6}"
    arguments = [
        "train",
        ROOT / "examples" / "smollm" / "rl.yaml",
        *SMOLLM_RUN,
        f"model.path={model}",
        f"data.train={problems}",
        f"run.root={folder}",
        f"run.name={name}",
        f"run.seed={seed}",
    ]
    _train(arguments, planted)
    return smollm_figures_of(folder / name)


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
    _train(arguments, planted)
    return figures_of(folder / name)


def _train(arguments: Sequence[object], planted: str | None) -> None:
    if planted is None:
        _run(*_program(*arguments))
    else:
        program = f"{planted}\nfrom vapo_megatron.cli import main\nmain()\n"
        _run(sys.executable, "-W", "ignore", "-c", program, *arguments, **_one_rank())


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
    parser.add_argument("--smollm", type=Path, metavar="MODEL")
    given = parser.parse_args()
    file = RECORDED if given.smollm is None else RECORDED_SMOLLM
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if given.smollm is None:
                figures = short_run(folder, cold_start(folder, seed), seed)
            else:
                figures = smollm_run(folder, given.smollm.resolve(), seed)
        recorded[str(seed)] = figures
        with atomic_write(file) as out:
            out.write(json.dumps(recorded, indent=1) + "\n")
        print(seed, recorded[str(seed)], flush=True)


if __name__ == "__main__":
    main()

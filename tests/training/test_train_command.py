"""The program as a user starts it: cold start, value pretraining, VAPO, evaluation, export, on 2
and on 4 ranks."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psutil
import pytest
import torch
from ports import free_port
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from examples.quickstart.make_task import make_task

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
DEADLINE = 240


def vapo(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "vapo_megatron.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's task and a model that has not seen it."""
    folder = tmp_path_factory.mktemp("task")
    make_task(folder, seed=3, sft_rows=6400)
    return folder


@pytest.fixture(scope="module")
def cold_start(task: Path) -> str:
    """The setting of a policy that has seen a little of the task."""
    vapo(
        "sft",
        str(QUICKSTART / "sft.yaml"),
        f"model.path={task / 'model'}",
        f"data.path={task / 'sft.jsonl'}",
        "data.steps=50",
        "actor.optimizer.decay=constant",
        "actor.optimizer.min_lr=0",
        f"run.root={task}",
    )
    return f"model.path={task / 'sft/hf/final/actor'}"


def train_arguments(task: Path, name: str, *more: str) -> list[str]:
    return [
        "train",
        str(QUICKSTART / "vapo.yaml"),
        f"model.path={task / 'model'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.eval=[{{name: unseen, path: {task / 'eval.jsonl'}, samples: 2, limit: 16}}]",
        f"run.root={task}",
        f"run.name={name}",
        "run.steps=2",
        "batch.prompts_per_step=8",
        "value_pretraining.iterations=2",
        "value_pretraining.replay_epochs=2",
        "value_pretraining.minibatch_size=32",
        "algorithm.update.minibatch_size=32",
        *more,
    ]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_ranks(task: Path) -> Path:
    """A finished run: actor and critic at TP2."""
    vapo(*train_arguments(task, "two", "run.profile.steps=[1]", "run.profile.ranks=[1]"))
    return task / "two"


@dataclass(frozen=True)
class Killed:
    """A run of which one rank was killed after its first step, and which of its processes lived
    on."""

    run_dir: Path
    code: int
    ranks: int
    processes: int
    alive: list[psutil.Process]


@pytest.fixture(scope="module")
def killed(task: Path) -> Killed:
    arguments = train_arguments(task, "killed", "run.steps=500", "cluster.restarts=0")
    command = [sys.executable, "-m", "vapo_megatron.cli", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        metrics = task / "killed" / "metrics.jsonl"
        end = time.monotonic() + DEADLINE
        while not metrics.exists() or '"step": 1' not in metrics.read_text():
            assert process.poll() is None and time.monotonic() < end, (
                "the run did not get to its first step"
            )
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in family if child.ppid() == process.pid]
        os.kill(ranks[0].pid, signal.SIGKILL)
        code = process.wait(timeout=240)
        return Killed(
            task / "killed",
            code,
            len(ranks),
            len(family),
            psutil.wait_procs(family, timeout=120)[1],
        )
    finally:
        process.kill()


def test_a_run_leaves_what_it_promises(two_ranks: Path) -> None:
    steps = {row["step"]: row for row in rows(two_ranks)}
    assert sorted(steps) == [0, 1, 2]
    assert steps[2]["rollout/weight_version"] == steps[1]["rollout/weight_version"] + 1
    for step in (1, 2):
        row = steps[step]
        assert row["rollout/train_infer_logprob_diff"] < 1e-4
        assert row["actor/train_infer_logprob_diff_max"] < 1e-4, (
            "engine and trainer disagree on sampled tokens"
        )
        assert row["actor/updates"] == row["critic/updates"] == 2
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
        assert (
            row["response_length/min"]
            <= row["response_length/mean"]
            <= row["response_length/max"]
            <= 64
        )
        assert {f"critic/value_bias_{p}" for p in (0, 25, 50, 75, 95)} < row.keys()
    assert "evaluation/unseen_avg@2" in steps[2]
    assert json.loads((two_ranks / "evaluation.json").read_text())["sets"][0]["problems"] == 16
    for name in ("config.yaml", "report.html", "samples/step_000001.jsonl", "tensorboard"):
        assert (two_ranks / name).exists(), name
    samples = [
        json.loads(line)
        for line in (two_ranks / "samples/step_000002.jsonl").read_text().splitlines()
    ]
    assert all(sample["weight_version"] == steps[2]["rollout/weight_version"] for sample in samples)
    (trace,) = (two_ranks / "profile").iterdir()
    assert (
        trace.name == "step_00001_rank1.json.gz"
        and trace.name in (two_ranks / "report.html").read_text()
    )
    names = {
        event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert {"advantages", "update_critic", "update_policy", "weight_sync", "aten::mm"} <= names


def test_actor_and_critic_are_ordinary_hugging_face_directories(two_ranks: Path) -> None:
    final = two_ranks / "hf" / "final"
    actor = AutoModelForCausalLM.from_pretrained(final / "actor")
    tokenizer = AutoTokenizer.from_pretrained(final / "actor")
    messages = [{"role": "user", "content": "s1 c10"}]
    prompt = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        assert actor(**prompt).logits.shape[-1] == len(tokenizer)
    critic, report = AutoModelForTokenClassification.from_pretrained(
        final / "critic", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert critic.config.num_labels == 1


@pytest.mark.full
def test_transformers_alone_loads_the_export_in_another_process(
    two_ranks: Path, tmp_path: Path
) -> None:
    """As a user would, with nothing of this package imported and nothing of the environment
    hidden."""
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM as Model\n"
        "model, report = Model.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "assert not report['missing_keys'] and not report['unexpected_keys'], report\n"
        "assert 'vapo_megatron' not in sys.modules\n"
        "print(float(model(torch.tensor([[5, 6, 7]])).logits.double().sum()))"
    )
    actor = two_ranks / "hf" / "final" / "actor"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", script, str(actor)]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=DEADLINE
    )
    assert ended.returncode == 0, ended.stderr
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(actor)(torch.tensor([[5, 6, 7]])).logits
    assert float(ended.stdout) == pytest.approx(float(logits.double().sum()))


@pytest.mark.full
def test_other_layout_starts_from_a_value_checkpoint_alike(
    task: Path, killed: Killed, cold_start: str
) -> None:
    """Critics on four and on two ranks begin where another run's value pretraining ended: rollouts,
    losses and gradient norms of the first step are the same."""
    layouts = [
        "cluster.ranks=4",
        "actor.layout={tp: 2, pp: 2, sequence_parallel: true}",
        "critic.layout={cp: 2}",
        "actor.max_tokens_per_microbatch=400",
    ]
    critic = killed.run_dir / "hf" / "value_pretrained" / "critic"
    shared = [
        cold_start,
        "value_pretraining.enabled=false",
        "critic.init=value_checkpoint",
        f"critic.init_path={critic}",
    ]
    shared += ["run.steps=1", "evaluation.before_training=false", "data.eval=[]"]
    vapo(*train_arguments(task, "four", *layouts, *shared))
    told = vapo(
        *train_arguments(task, "two_again", *shared, "checkpoint.keep.best=reward/meam")
    ).stderr
    assert (
        "checkpoint.keep.best=reward/meam is not a metric of a step" in told
        and "did you mean reward/mean?" in told
    )
    four = rows(task / "four")[-1]
    two = rows(task / "two_again")[-1]
    for name in (
        "reward/mean",
        "response_length/mean",
        "critic/explained_variance",
        "critic/value_bias_0",
        "critic/value_loss",
        "critic/grad_norm",
        "actor/policy_loss",
        "actor/nll_loss",
        "actor/entropy",
        "actor/grad_norm",
        "advantage/lambda_mean",
    ):
        assert four[name] == pytest.approx(two[name], rel=1e-3, abs=1e-5), name


@pytest.mark.full
def test_ranks_that_slurm_started_find_each_other(task: Path) -> None:
    port = free_port()
    arguments = train_arguments(
        task, "slurm", "run.steps=1", "value_pretraining.enabled=false", "data.eval=[]"
    )
    assert slurm_ranks(arguments, port) == [(0, ANY), (0, "")], "rank 0 alone speaks"
    assert rows(task / "slurm")[-1]["step"] == 1
    # The second time rank 0 refuses, and the other ranks do not wait for it.
    (code, told), (other_code, other_told) = slurm_ranks(arguments, port)
    assert (code, other_code, other_told) == (2, 2, "") and "run.overwrite=true" in told


def slurm_ranks(arguments: list[str], port: int) -> list[tuple[int, str]]:
    """Exit code and output of each of two ranks that find in their environment what srun puts
    there."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "vapo_megatron.cli", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=DEADLINE)[0].strip() for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def test_a_second_run_does_not_overwrite_the_first(task: Path, two_ranks: Path) -> None:
    before = (two_ranks / "metrics.jsonl").read_bytes()
    done = vapo(*train_arguments(task, "two"), expect=2)
    assert done.stderr.count("\n") == 1 and "run.overwrite=true" in done.stderr
    assert (two_ranks / "metrics.jsonl").read_bytes() == before


@pytest.mark.full
def test_kill_minus_nine_leaves_no_process(killed: Killed) -> None:
    assert killed.code == 75 and killed.processes > killed.ranks >= 2 and not killed.alive

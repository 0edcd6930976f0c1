"""Gates on a pretrained model: SmolLM2-135M-Instruct, from the package that `make smollm`
trains."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corridors
import numpy as np
import pytest
import torch
from attempts import metrics
from hf_models import forward, megatron
from ranks import run_ranks
from tiny_qwen3 import token_logprobs
from tiny_runs import write_rows
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from examples.smollm.make_problems import TRAIN_TEMPLATES, number_pairs, rows
from examples.smollm.run import PACKAGE
from vapo_megatron.config.model import LayoutConfig
from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.model_card import CARD
from vapo_megatron.megatron.probe import PROBE_FILE
from vapo_megatron.models.registry import read_spec
from vapo_megatron.operations.model_package import file_sha256
from vapo_megatron.operations.prepare_model import prepare
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest
from vapo_megatron.weights.load import load_hf

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
DEADLINE = 900.0
TOLERANCE = 1e-4
CONFIG = [
    "preset=vapo_direct",
    "cluster.ranks=1",
    "actor.max_tokens_per_microbatch=512",
    "critic.head_init_std=0.01",
    "data.max_prompt_tokens=64",
    "batch.prompts_per_step=2",
    "batch.samples_per_prompt=2",
    "algorithm.update.minibatch_size=4",
    "sampling.max_new_tokens=8",
    # Every step has a signal, whatever the model says.
    "reward.verifier=function",
    "reward.function=parity_grade:length_score",
    "reward.correct_above=0.5",
    "reward.grade_truncated=true",
    "rollout.num_engines=1",
    "rollout.context_length=128",
    "rollout.max_total_tokens=2048",
    "checkpoint.every=1",
    "model.dtype=float32",
]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the package; skips where it cannot be had."""
    out = tmp_path_factory.mktemp("smollm") / "model"
    try:
        prepare(PACKAGE, out, "float32", print)
    except BadInput as error:
        pytest.skip(str(error))
    return out


def real_texts() -> list[str]:
    """Paragraphs of this project's README."""
    paragraphs = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    return [paragraph for paragraph in paragraphs if 200 < len(paragraph) < 600][:4]


def trainer_logprobs(source: Path, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probs of every token but the first, by the Megatron model."""
    spec = read_spec(source)
    (chunk,), mesh = megatron(spec, LayoutConfig(), "lm")
    load_hf([chunk], spec, source, mesh, "lm")
    results = []
    for sequence in sequences:
        logprobs = forward(chunk, torch.tensor(sequence))[:-1, : spec.vocab_size].log_softmax(-1)
        targets = torch.tensor(sequence[1:])[:, None]
        results.append(logprobs.gather(1, targets)[:, 0].tolist())
    return results


def test_engine_trainer_and_transformers_agree(smollm: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    prompts = [
        Prompt(str(number), text, "", tuple(tokenizer(text).input_ids), cursor=number)
        for number, text in enumerate(real_texts())
    ]
    assert len(prompts) == 4 and min(len(prompt.token_ids) for prompt in prompts) > 40
    config = RolloutConfig(max_running_requests=8, max_total_tokens=8192, start_timeout_s=600)
    sampling = SamplingConfig(max_new_tokens=32)
    with (
        EngineServer(smollm, config, "float32", tmp_path / "engine.log") as server,
        Dispatcher([server.address], config, stop_token_ids=[tokenizer.eos_token_id]) as dispatcher,
    ):
        samples = dispatcher.collect(GenerationRequest(prompts, 1, sampling, 1, 0))
    sequences = [[*sample.prompt.token_ids, *sample.response_ids] for sample in samples]
    (trainer,) = run_ranks(1, trainer_logprobs, smollm, sequences, deadline=DEADLINE)
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    for sample, sequence, computed in zip(samples, sequences, trainer, strict=True):
        expected = token_logprobs(model, sequence)
        assert np.std(expected) > 1.0  # real text is not equally probable
        assert computed == pytest.approx(expected, abs=TOLERANCE)
        responded = expected[-len(sample.response_ids) :]
        assert sample.rollout_logprobs == pytest.approx(responded, abs=TOLERANCE)


@pytest.fixture(scope="module")
def trained(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that runs a command under a run's name, and returns its directory."""
    folder = tmp_path_factory.mktemp("runs")
    draw = random.Random(1)
    problems = rows(number_pairs(draw)[0], TRAIN_TEMPLATES, 16, draw)
    data = write_rows(folder / "train.jsonl", problems)
    (folder / "train.yaml").write_text("{}\n")

    def run(name: str, *overrides: str, command: str = "train") -> Path:
        places = [f"run.root={folder}", f"run.name={name}", f"model.path={smollm}"]
        program = [sys.executable, "-m", "vapo_megatron.cli", command, str(folder / "train.yaml")]
        paths = os.pathsep.join(map(str, (ROOT / "tests", Path(__file__).parent)))
        ended = subprocess.run(
            [*program, *CONFIG, *places, f"data.train={data}", *overrides],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            timeout=DEADLINE,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        return folder / name

    return run


@pytest.fixture(scope="module")
def probe_run(trained: Callable[..., Path]) -> Path:
    return trained("probe", "critic.kind=probe", "run.steps=2")


def digests(run_dir: Path) -> dict[str, str]:
    """SHA-256 of exported models and samples, by file; a model's card names its run."""
    paths = [path for folder in ("hf", "samples") for path in sorted((run_dir / folder).rglob("*"))]
    return {
        path.relative_to(run_dir).as_posix(): file_sha256(path)
        for path in paths
        if path.is_file() and path.name != CARD
    }


def trainers_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Without what compares with the engine's log-probs, whose rounding follows from the requests
    that happened to be computed together."""
    return [
        {name: value for name, value in row.items() if "train_infer" not in name}
        for row in metrics(run_dir)
    ]


def test_a_probe_run_resumes_to_the_bit(trained: Callable[..., Path], probe_run: Path) -> None:
    trained("resumed", "critic.kind=probe", "run.steps=1")
    resumed = trained("resumed", "critic.kind=probe", "run.steps=2", "run.resume=auto")
    assert trainers_metrics(resumed) == trainers_metrics(probe_run)
    assert digests(resumed) == digests(probe_run)
    states = [
        next((run / "checkpoints").glob(f"step_*2/{PROBE_FILE}")) for run in (resumed, probe_run)
    ]
    assert states[0].read_bytes() == states[1].read_bytes()


def test_transformers_alone_reads_the_export(smollm: Path, probe_run: Path, tmp_path: Path) -> None:
    export = probe_run / "hf" / "final" / "actor"
    script = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, report = AutoModelForCausalLM.from_pretrained("
        "sys.argv[1], output_loading_info=True)\n"
        "assert not report['missing_keys'] and not report['unexpected_keys'], report\n"
        "assert 'vapo_megatron' not in sys.modules\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "messages = [{'role': 'user', 'content': 'What is 2 + 2?'}]\n"
        "inputs = tokenizer.apply_chat_template("
        "messages, add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(export)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=DEADLINE,
    )
    assert ended.returncode == 0, ended.stderr
    assert "What is 2 + 2?<|im_end|>\n<|im_start|>assistant\n" in ended.stdout
    before = AutoModelForCausalLM.from_pretrained(smollm).state_dict()
    after = AutoModelForCausalLM.from_pretrained(export).state_dict()
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > 200  # of 273: two steps moved them
    drift = max(float((after[name] - before[name]).abs().max()) for name in moved)
    assert drift < 1e-3


def test_an_adapter_critic_trains(trained: Callable[..., Path]) -> None:
    run_dir = trained(
        "adapter", "critic.kind=adapter", "run.steps=2", "critic.max_tokens_per_microbatch=512"
    )
    last: dict[str, Any] = metrics(run_dir)[-1]
    assert last["critic/grad_norm"] > 0 and last["critic/value_std"] > 0
    assert not [name for name in last if "critic/fault" in name]


def test_a_critic_is_pretrained_on_recorded_responses(
    trained: Callable[..., Path], probe_run: Path
) -> None:
    run_dir = trained(
        "critic",
        "preset=vapo",
        f"value_pretraining.from=[{probe_run}]",
        "value_pretraining.replay_epochs=6",
        "value_pretraining.minibatch_size=4",
        "value_pretraining.stop_explained_variance=null",
        "critic.optimizer.lr=1e-4",
        "critic.max_tokens_per_microbatch=512",
        command="pretrain-critic",
    )
    key = "value_pretraining/value_loss"
    losses = [row[key] for row in metrics(run_dir) if key in row]
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0]
    export = run_dir / "hf" / "value_pretrained" / "critic"
    model, report = AutoModelForTokenClassification.from_pretrained(
        export, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    (row, *_) = (probe_run / "samples" / "step_000001.jsonl").read_text().splitlines()
    text = json.loads(row)["problem"] + json.loads(row)["response"]
    with torch.no_grad():
        values = model(**AutoTokenizer.from_pretrained(export)(text, return_tensors="pt")).logits
    assert values.shape[-1] == 1 and float(values.std()) > 0


def test_an_agent_uses_a_tool(trained: Callable[..., Path]) -> None:
    run_dir = trained(
        "agent",
        "critic.kind=probe",
        "run.steps=1",
        "rollout.agent=smollm_agent:run",
        "rollout.episode.max_tokens=96",
        "data.prompt.chat_template=true",
        "sampling.max_new_tokens=24",
        "rollout.context_length=256",
    )
    (row,) = metrics(run_dir)
    assert row["agent/turns"] == 2 and row["agent/tool_errors"] < 1
    assert row["rollout/train_infer_logprob_diff"] < TOLERANCE
    lines = (run_dir / "samples" / "step_000001.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        written, said, read = sample["turns"]
        assert [turn["observed"] for turn in (written, said, read)] == [False, True, False]
        assert "The calculator " in said["text"]
        assert sample["loss_mask"].count(0) == sample["episode"]["tokens_observed"] > 0
        values = sample["estimates"]["values"]
        assert [value is None for value in values] == [mask == 0 for mask in sample["loss_mask"]]


def test_a_short_run_is_in_the_corridors(smollm: Path, tmp_path: Path) -> None:
    recorded: dict[str, corridors.Figures] = json.loads(
        corridors.RECORDED_SMOLLM.read_text(encoding="utf-8")
    )
    figures = corridors.smollm_run(tmp_path, smollm, seed=1)
    assert corridors.outside(figures, recorded) == []

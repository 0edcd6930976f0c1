"""examples/gsm8k/vapo_mixed.yaml as a user runs it: several files, one of the Hub, and a verifier
for each row."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny_runs import make_model, problems, write_rows

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
MIXED = ROOT / "examples" / "gsm8k" / "vapo_mixed.yaml"
SMALL = {
    "cluster.ranks": 1,
    "model.dtype": "float32",
    "actor.layout.tp": 1,
    "critic.layout.tp": 1,
    "run.steps": 1,
    "value_pretraining.enabled": "false",
    "batch": "{prompts_per_step: 8, samples_per_prompt: 2}",
    "algorithm.update.minibatch_size": 16,
    "sampling.max_new_tokens": 8,
    "data.max_prompt_tokens": 32,
    "rollout.context_length": 128,
    "reward.workers": 1,
    "data.eval.0.limit": 2,
    "data.eval.0.samples": 1,
    "data.train": "{'hub:somebody/sums': {weight: 4}}",
}


@pytest.fixture
def judge() -> Iterator[tuple[str, list[str]]]:
    """The address of a judge to whom every response is worth half, and its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0][
                    "content"
                ]
            )
            message = {"role": "assistant", "content": "Score: 0.5"}
            body = json.dumps(
                {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def hub_cache(folder: Path, repository: str) -> Path:
    """A cache of the Hub that holds one data set, as huggingface_hub lays it out."""
    data_set = folder / "hub" / f"datasets--{repository.replace('/', '--')}"
    snapshot = data_set / "snapshots" / ("0" * 40)
    for part in (snapshot, data_set / "refs"):
        part.mkdir(parents=True)
    (data_set / "refs" / "main").write_text("0" * 40)
    write_rows(snapshot / "train.jsonl", problems(6))
    return folder


def test_each_row_is_drawn_by_weight_and_graded_by_its_verifier(
    tmp_path: Path, judge: tuple[str, list[str]]
) -> None:
    url, asked = judge
    data = tmp_path / "data"
    for name in ("gsm8k", "mixed"):
        (data / name).mkdir(parents=True)
    write_rows(
        data / "gsm8k" / "train.jsonl", [{"problem": "7 plus 8", "answer": 15, "verifier": "judge"}]
    )
    write_rows(data / "gsm8k" / "eval.jsonl", problems(2))
    write_rows(data / "mixed" / "code.jsonl", [{"text": "1 plus 2", "tests": "assert f(1) == 2"}])
    write_rows(data / "mixed" / "questions.jsonl", [{"problem": "3 plus 4", "answer": "seven"}])
    settings = SMALL | {
        "model.path": make_model(tmp_path / "model"),
        "reward.judge.url": url,
        "run.root": tmp_path,
    }
    command = [sys.executable, "-m", "vapo_megatron.cli", "train", str(MIXED)]
    environment = {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(hub_cache(tmp_path / "cache", "somebody/sums")),
    }
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())],
        cwd=tmp_path,
        env=os.environ | environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    lines = (tmp_path / "gsm8k_mixed" / "samples" / "step_000001.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    files = {"7 plus 8": "train", "1 plus 2": "code", "3 plus 4": "questions"}
    drawn = Counter(files.get(sample["problem"], "hub") for sample in samples)
    assert drawn == {"hub": 2 * 4, "train": 2 * 2, "code": 2 * 1, "questions": 2 * 1}, (
        "two responses to each of 8 prompts"
    )
    for sample in samples:
        file = files.get(sample["problem"], "hub")
        grade = (sample["grade_reason"], sample["reward"])
        if file == "hub":
            assert grade[0] in ("equal", "different", "no_answer", "truncated")
        elif grade[0] != "truncated":
            # A judge's half is half of the way from -1 to 1.
            assert grade == (("no_answer", -1.0) if file == "code" else ("scored", 0.0))
    assert any("seven" in prompt for prompt in asked) and not any(
        "assert f" in prompt for prompt in asked
    )

"""`vapo-megatron push` to a stand-in of the Hub on this machine, and the card that it sends."""

import base64
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import yaml
from called import exit_code_of
from safetensors.torch import load_file
from tiny_runs import make_model, train_config, write_config

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.load import load_config
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.evaluation.model_card import MARK, base_of, model_card, write_card
from vapo_megatron.weights.convert import hf_to_megatron
from vapo_megatron.weights.hf_writer import hf_writer


class Hub:
    """The requests of an upload, answered as huggingface.co does: files of a repository, commits,
    and large files by Git LFS."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.refuses = 0
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*hub.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                is_ours = self.headers.get("Authorization") == "Bearer hf_ours"
                answer = hub.post(self.path, body) if is_ours else (401, {"error": "who?"})
                self._answer(*answer)

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hub._large[self.path.rpartition("/")[2]] = body
                self._answer(200, {})

            def _answer(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, path: str) -> tuple[int, Any]:
        repository = "/".join(path.split("/")[3:5])
        if repository not in self.files:
            return 404, {"error": "Repository not found"}
        return 200, [
            {"type": "file", "path": name, "size": len(data), "oid": "0"}
            for name, data in self.files[repository].items()
        ]

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        if self.refuses:
            return self.refuses, {"error": "not now"}
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [
                one | {"actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}}
                for one in objects
            ]
            return 200, {"transfer": "basic", "objects": actions}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.files.setdefault(name, {})
            self.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        repository = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            return 200, {"files": [self._mode(one["path"]) for one in json.loads(body)["files"]]}
        assert "/commit/" in path, path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[repository][value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[repository][value["path"]] = self._large[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{repository}/commit/1", "commitOid": "1" * 40}

    @staticmethod
    def _mode(path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", stand_in.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


RESULT = {
    "name": "sums",
    "problems": 4,
    "samples": 2,
    "avg_at_k": 0.625,
    "low": 0.4,
    "high": 0.75,
    "pass_at_k": 0.75,
    "maj_at_k": 0.5,
    "response_length": 12.5,
    "truncated": 0.25,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of two steps with one evaluation, on a model of the Hub's cache."""
    run_dir = tmp_path / "runs" / "tiny"
    base = tmp_path / "cache" / "models--some--base" / "snapshots" / ("c" * 40)
    make_model(base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    make_model(run_dir / "hf/final/actor", seed=1)
    (run_dir / "hf/final/step.json").write_text('{"step": 2}')
    config = train_config(tmp_path, base)
    config["data"]["prompt"] = {"user_template": "Say ```{problem}``` | now"}
    write_config(run_dir / "config.yaml", config)
    rows: list[dict[str, Any]] = [
        {"step": 0, "evaluation/sums_avg@2": 0.125},
        {"step": 1, "rollout/tokens": 1000, "throughput/gpu_hours": 1.5},
        {"step": 2, "rollout/tokens": 500, "throughput/gpu_hours": 0.5, "alarm/loss_spike": 1.0},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {"step": 2, "sampling": {"temperature": 1.0, "top_p": 0.7}, "sets": [RESULT]}
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation))
    return run_dir


def test_a_model_and_its_card_arrive_in_one_commit(run_dir: Path, hub: Hub, capfd: Any) -> None:
    assert exit_code_of("push", run_dir, "hub:me/tiny", "--private") == 0
    said = capfd.readouterr().out
    assert f"{hub.url}/me/tiny/commit/1" in said
    folder = run_dir / "hf/final/actor"
    there = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files == {"me/tiny": there} and hub.private == {"me/tiny": True}
    assert hub.commits == ["tiny, final"] and "model.safetensors" in there
    card = there["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "some/base" and front["license"] == "apache-2.0"
    assert "| sums | 4 | 0.625 [0.400, 0.750], k = 2 | 0.125 | 0.750 |" in card
    assert "| response tokens | 1,500 |" in card and "| GPU-hours | 2.0 |" in card
    assert "| alarms | loss spike |" in card and "after step 2" in card
    assert f"revision `{'c' * 40}`" in card and "- `train.jsonl`" in card
    assert str(run_dir.parents[1]) not in card, "folders of a user's own"
    # A fence longer than those in the text keeps it a block
    assert "\n````\nSay ```{problem}``` | now\n````\n" in card


def test_what_the_hub_holds_is_not_overwritten_unasked(run_dir: Path, hub: Hub, capfd: Any) -> None:
    hub.files["me/tiny"] = {".gitattributes": b"", "weights.bin": b"dear"}
    assert exit_code_of("push", run_dir, "hub:me/tiny") == 2
    assert "holds 1 files already (weights.bin)" in capfd.readouterr().err
    assert not hub.commits
    assert exit_code_of("push", run_dir, "hub:me/tiny", "--update") == 0
    assert hub.files["me/tiny"]["weights.bin"] == b"dear" and len(hub.commits) == 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda run: (run / "hf/final/actor/model.safetensors").unlink(), "safetensors"),
        (lambda run: (run / "hf/final/actor/tokenizer.json").unlink(), "holds no tokenizer"),
        (lambda run: (run / "hf/final/step.json").unlink(), "was not written to its end"),
        (lambda run: (run / "hf/final/actor/config.json").unlink(), "has no exported model"),
        (lambda run: (run / "config.yaml").unlink(), "no run directory"),
    ],
)
def test_what_is_incomplete_is_not_sent(
    run_dir: Path, hub: Hub, damage: Any, named: str, capfd: Any
) -> None:
    damage(run_dir)
    assert exit_code_of("push", run_dir, "hub:me/tiny") == 2
    said = capfd.readouterr().err
    assert named in said and len(said.splitlines()) == 1
    assert not hub.files and not hub.commits


def test_wrong_names_logins_and_refusals_are_one_line(
    run_dir: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def said(code: int, *arguments: str) -> str:
        assert exit_code_of("push", run_dir, *arguments) == code
        line = str(capfd.readouterr().err)
        assert len(line.splitlines()) == 1, line
        return line

    assert "expected hub:OWNER/NAME" in said(2, "me/tiny")
    assert "expected hub:OWNER/NAME" in said(2, "hub:me/tiny@main")
    assert "holds final" in said(2, "hub:me/tiny", "--checkpoint", "step_9")
    assert "exported no critic" in said(2, "hub:me/tiny", "--model", "critic")
    hub.refuses = 403
    assert "may not write there (HTTP 403)" in said(2, "hub:me/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_theirs")
    hub.refuses = 0
    assert "may not write there (HTTP 401)" in said(2, "hub:me/tiny")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "no login" in said(2, "hub:me/tiny")
    assert not hub.commits


def test_a_run_without_exports_gets_one_of_its_checkpoint(run_dir: Path, hub: Hub) -> None:
    actor = run_dir / "hf/final/actor"
    hf_to_megatron(actor, run_dir / "checkpoints/step_000002/actor", lambda *_: lambda _: None)
    weights = load_file(actor / "model.safetensors")
    shutil.rmtree(run_dir / "hf")
    assert exit_code_of("push", run_dir, "hub:me/tiny") == 0
    assert hub.commits == ["tiny, step_000002"]
    (run_dir / "sent").write_bytes(hub.files["me/tiny"]["model.safetensors"])
    sent = load_file(run_dir / "sent")
    assert sent.keys() == weights.keys()
    assert all(torch.equal(sent[name], weights[name]) for name in weights)


def test_dry_run_writes_the_card_and_sends_nothing(run_dir: Path, hub: Hub, capfd: Any) -> None:
    assert exit_code_of("push", run_dir, "hub:me/tiny", "--dry-run") == 0
    assert "nothing was sent" in capfd.readouterr().out and not hub.files
    assert MARK in (run_dir / "hf/final/actor/README.md").read_text()


def test_a_card_of_ones_own_stays_and_later_evaluations_join(run_dir: Path) -> None:
    config = load_config(TrainConfig, run_dir / "config.yaml", [], PRESETS)
    folder = run_dir / "hf/final/actor"
    more = {"sampling": {"temperature": 0.0, "top_p": 1.0}, "sets": [RESULT | {"name": "aime"}]}
    text = model_card(run_dir, folder, config, [more])
    assert "| sums | 4 |" in text and "| aime | 4 |" in text and "temperature 0.0" in text
    card = write_card(run_dir, folder, config)
    card.write_text(card.read_text().replace(MARK, "") + "Mine.\n")
    before = hashlib.sha256(card.read_bytes()).digest()
    assert write_card(run_dir, folder, config, [more]) == card
    assert hashlib.sha256(card.read_bytes()).digest() == before


def test_a_base_says_what_is_known_of_it(tmp_path: Path) -> None:
    plain = tmp_path / "my_model"
    plain.mkdir()
    assert base_of(plain) == {"name": "my_model"}
    (plain / "README.md").write_text("---\nlicense: [broken\n---\n")
    (plain / "config.json").write_text('{"_name_or_path": "some/other"}')
    assert base_of(plain) == {"name": "my_model", "hub": "some/other"}
    (plain / "config.json").write_text('{"_name_or_path": "/home/me/secret"}')
    assert "hub" not in base_of(plain)


def test_a_card_names_the_code_and_the_steps_of_the_run(run_dir: Path) -> None:
    """Not the code that pushes, nor evaluations of an earlier hf/final as this one's."""
    config = load_config(TrainConfig, run_dir / "config.yaml", [], PRESETS)
    (run_dir / "environment.json").write_text('{"vapo-megatron": "0.1", "commit": "c0ffee"}')
    earlier = {"model_step": 1, "sets": [RESULT | {"name": "aime"}]}
    text = model_card(run_dir, run_dir / "hf/final/actor", config, [earlier])
    assert "| code | vapo-megatron 0.1, commit c0ffee |" in text
    sums, aime = (line for line in text.splitlines() if line.startswith(("| sums", "| aime")))
    assert "of step 1" in aime and "of step" not in sums


@pytest.mark.parametrize(("text", "stays"), [("Mine.", True), (MARK, False)])
def test_a_later_export_keeps_a_card_of_ones_own(tmp_path: Path, text: str, stays: bool) -> None:
    """hf/final is written again when a run is extended; a card of ours is of the other weights."""

    def export() -> Path:
        with hf_writer(tmp_path / "actor", {}, tmp_path, ()) as writer:
            writer.add("weight", torch.zeros(2))
        return tmp_path / "actor" / "README.md"

    export().write_text(text)
    assert export().exists() == stays


def test_a_critics_card_names_its_own_base_and_learning_rate(run_dir: Path, tmp_path: Path) -> None:
    """Its licence follows from what it was made of."""
    other = tmp_path / "cache/models--other--reward/snapshots" / ("d" * 40)
    other.mkdir(parents=True)
    (other / "README.md").write_text("---\nlicense: mit\n---\n")
    config = load_config(TrainConfig, run_dir / "config.yaml", [], PRESETS)
    values = config.model_dump(by_alias=True)
    values["critic"] |= {"init": "reward_model", "init_path": str(other)}
    values["critic"]["optimizer"]["lr"] = 3e-5
    config = TrainConfig.model_validate(values)
    text = model_card(run_dir, run_dir / "hf/final/critic", config)
    assert "`other/reward`" in text and "licence: `mit`" in text and "| 3e-05," in text
    text = model_card(run_dir, run_dir / "hf/final/actor", config)
    assert "`some/base`" in text and "licence: `apache-2.0`" in text and "| 1e-06," in text

"""A run that was resumed offline is one run after `wandb sync`: against a stand-in of its
server."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.monitoring.trackers import Record, WeightsAndBiases

pytest.importorskip("wandb")


class Server:
    """What wandb asks of its server while it sends runs: one history a run id, that it asks for
    before it sends a resumed one."""

    def __init__(self) -> None:
        self.histories: dict[str, list[str]] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path.endswith("/graphql"):
                    answer = server.graphql(json.loads(body))
                else:
                    answer = server.stream(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def stream(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            history = self.histories[path.split("/")[-2]]
            part = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if part:
                history[part["offset"] :] = part["content"]
        return {"exitcode": None, "limits": {}}

    def graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        query, name = asked["query"], (asked.get("variables") or {}).get("name")
        place = {"id": "p", "name": "vapo-megatron", "entity": {"id": "e", "name": "me"}}
        if "upsertBucket" in query:
            is_new = self.histories.setdefault(name, []) == []
            bucket = {"id": name, "name": name, "displayName": name, "config": "{}"}
            bucket |= {"project": place, "historyLineCount": len(self.histories[name])}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": is_new}}}
        if "RunResumeStatus" in query:
            held = self.histories.get(name)
            bucket = None
            if held is not None:
                last = held[-1] if held else "{}"
                bucket = {"id": name, "name": name, "summaryMetrics": last, "displayName": name}
                bucket |= {"logLineCount": 0, "eventsLineCount": 0, "config": "{}", "tags": []}
                bucket |= {"historyLineCount": len(held), "historyTail": json.dumps([last])}
                bucket |= {"eventsTail": "[]", "wandbConfig": '{"t": 1}'}
            return {"data": {"model": {**place, "bucket": bucket}}}
        if "createRunFiles" in query:
            return {"data": {"createRunFiles": {"runID": "", "uploadHeaders": [], "files": []}}}
        versions = {"cliVersionInfo": {"max_cli_version": "99.0.0"}, "features": []}
        viewer = {"id": "u", "entity": "me", "username": "me", "teams": {"edges": []}}
        return {"data": {"viewer": viewer, "serverInfo": versions}}


@pytest.fixture
def server() -> Iterator[Server]:
    stand_in = Server()
    yield stand_in
    stand_in.http.shutdown()
    stand_in.http.server_close()


@pytest.mark.full
def test_a_run_resumed_offline_is_one_run_after_sync(tmp_path: Path, server: Server) -> None:
    for first in (1, 3):  # the second attempt repeats a step
        tracker = WeightsAndBiases(offline=True, run_dir=tmp_path)
        for step in range(first, first + 3):
            tracker.write(Record(step, {"reward/mean": step / 10}))
        tracker.close(failed=False)
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
    program = "import sys; from wandb.cli.cli import cli; sys.argv[0] = 'wandb'; cli()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "sync", "--yes"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    (history,) = server.histories.values()
    rows = [json.loads(line) for line in history]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5]

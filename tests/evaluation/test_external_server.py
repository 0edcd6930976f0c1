"""`vapo-megatron evaluate` on a server that is not ours, a small one that speaks OpenAI's protocol
over real HTTP."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import dump_config
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.evaluation import openai_client
from vapo_megatron.evaluation.command import evaluate_checkpoint

pytestmark = pytest.mark.usefixtures("no_pauses")

PROBLEMS = 6
SAMPLES = 4


@dataclass
class Server:
    """Answers problem n with n where the request's seed is even, else with n + 1, after what
    `before` says.

    before: HTTP statuses to give first; fails_after: from that many answers on every request is
        refused;
    cancels_after: with that answer comes SIGTERM, to this process.
    """

    before: list[int] = field(default_factory=list)
    fails_after: int | None = None
    cancels_after: int | None = None
    broken_off: int = 0
    pause: float = 0.0
    body: bytes | None = None
    drips: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    answered: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if self.drips:  # a byte now and then, so that no read takes long
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(200):
                await response.write(b" ")
                await asyncio.sleep(0.1)
            return response
        await asyncio.sleep(self.pause)
        if self.before:
            return web.Response(
                status=self.before.pop(0), text="not now", headers={"Retry-After": "0"}
            )
        if self.fails_after is not None and self.answered >= self.fails_after:
            return web.Response(status=400, text="bad\nrequest")
        self.answered += 1
        if self.answered == self.cancels_after:
            os.kill(os.getpid(), signal.SIGTERM)
        self.requests.append(asked)
        self.keys.add(request.headers.get("Authorization"))
        if self.body is not None:
            return web.Response(body=self.body)
        text = asked["prompt"] if "prompt" in asked else asked["messages"][-1]["content"]
        number = int(text.split()[-1]) + asked["seed"] % 2
        said = f"I say \\boxed{{{number}}}"
        if self.broken_off:
            self.broken_off -= 1
            said = "I sa"
            reason = "abort"
        else:
            reason = "stop"
        choice = {"message": {"content": said}, "finish_reason": reason}
        if "prompt" in asked:
            choice = {"text": said, "finish_reason": reason}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 5 + number}})


@pytest.fixture
def server() -> Iterator[Server]:
    """On a free port, in its own thread."""
    server = Server()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", server.handle)
        application.router.add_post("/v1/completions", server.handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(timeout=240)
    yield server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=240)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=240)
    loop.close()


def _settings(folder: Path, server: Server, **changes: Any) -> EvaluateConfig:
    path = folder / "problems.jsonl"
    rows = [{"id": f"p{n}", "problem": f"What is {n}", "answer": str(n)} for n in range(PROBLEMS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {"name": "e", "root": str(folder / "runs"), "resume": "auto"} | changes.pop("run", {})
    external = {
        "url": server.url,
        "model": "m",
        "concurrency": 2,
        "retry_timeout_s": 5,
    } | changes.pop("external", {})
    data = {"eval": [{"name": "whole", "path": str(path), "samples": SAMPLES}]} | changes.pop(
        "data", {}
    )
    sampling = {"max_new_tokens": 50, "top_p": 0.7} | changes.pop("sampling", {})
    reward = {"workers": 1} | changes.pop("reward", {})
    return EvaluateConfig.model_validate(
        {"run": run, "server": external, "data": data, "sampling": sampling, "reward": reward}
    )


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "runs" / "e" / "evaluation.json").read_text())
    return report


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_every_problem_is_asked_with_seeds_of_its_own(
    tmp_path: Path, server: Server, api: str
) -> None:
    server.before = [503, 429]
    prompt = {"chat_template": api == "chat", "user_template": "Tell me: {problem}"}
    if api == "chat":
        prompt["system_prompt"] = "Be brief."
    settings = _settings(
        tmp_path, server, external={"api": api, "extra": {"min_p": 0.1}}, data={"prompt": prompt}
    )
    evaluate_checkpoint(settings)
    assert len(server.requests) == PROBLEMS * SAMPLES
    assert len({asked["seed"] for asked in server.requests}) == PROBLEMS * SAMPLES
    for asked in server.requests:
        assert (asked["model"], asked["top_p"], asked["max_tokens"], asked["min_p"]) == (
            "m",
            0.7,
            50,
            0.1,
        )
        texts = (
            [one["content"] for one in asked["messages"]] if api == "chat" else [asked["prompt"]]
        )
        assert texts[-1].startswith("Tell me: What is ") and len(texts) == (
            2 if api == "chat" else 1
        )
    assert server.keys == {None}
    right = sum(asked["seed"] % 2 == 0 for asked in server.requests)
    (found,) = _report(tmp_path)["sets"]
    assert found["avg_at_k"] == pytest.approx(right / (PROBLEMS * SAMPLES))
    assert 0 < right < PROBLEMS * SAMPLES
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/e/evaluation/whole.jsonl").read_text().splitlines()
    ]
    assert all(row["tokens"] == 5 + int(row["extracted"]) for row in rows)


def test_interrupted_evaluation_resumes_to_the_same_end(tmp_path: Path, server: Server) -> None:
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    evaluate_checkpoint(_settings(whole, server))
    asked_once = {asked["seed"] for asked in server.requests}
    server.requests = []
    server.answered = 0
    server.fails_after = 2 * SAMPLES + 1
    with pytest.raises(
        RunFailed, match=r"refused the request for problem p\d \(HTTP 400: bad request\): check"
    ):
        evaluate_checkpoint(_settings(broken, server))
    first = {asked["seed"] for asked in server.requests}
    kept = (broken / "runs/e/evaluation/whole.jsonl").read_text().count('"index"') // SAMPLES
    assert kept >= 1 and not (broken / "runs/e/evaluation.json").exists()
    server.requests = []
    server.fails_after = None
    evaluate_checkpoint(_settings(broken, server))
    second = {asked["seed"] for asked in server.requests}
    assert len(second) == (PROBLEMS - kept) * SAMPLES and first | second == asked_once
    for name in ("evaluation/whole.jsonl", "evaluation/whole_problems.jsonl"):
        assert (whole / "runs/e" / name).read_text() == (broken / "runs/e" / name).read_text()
    assert _report(whole)["sets"][0] == _report(broken)["sets"][0]
    server.requests = []
    evaluate_checkpoint(_settings(broken, server))
    assert not server.requests


def test_files_of_another_evaluation_are_not_taken_for_this_one(
    tmp_path: Path, server: Server
) -> None:
    server.fails_after = SAMPLES + 1
    with pytest.raises(RunFailed):
        evaluate_checkpoint(_settings(tmp_path, server))
    server.fails_after = None
    with pytest.raises(BadInput, match=r"whole\.jsonl: its responses come from another model"):
        evaluate_checkpoint(_settings(tmp_path, server, sampling={"temperature": 0.5}))
    evaluate_checkpoint(_settings(tmp_path, server))
    with pytest.raises(BadInput, match=r"whole\.jsonl: its responses come from another model"):
        evaluate_checkpoint(_settings(tmp_path, server, run={"seed": 5}))


def test_a_key_comes_from_the_environment_and_stands_in_no_file(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(tmp_path, server, external={"api_key_variable": "SOME_KEY"})
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(
        BadInput, match="api_key_variable=SOME_KEY: the environment has no such variable"
    ):
        evaluate_checkpoint(settings)
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("SOME_KEY", "very-secret")
    evaluate_checkpoint(settings)
    assert server.keys == {"Bearer very-secret"}
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert files and not any("very-secret" in path.read_text(errors="replace") for path in files)


def test_a_server_that_stays_away_is_named(tmp_path: Path, server: Server) -> None:
    server.before = [503] * 1000
    with pytest.raises(
        TryAgain,
        match=(
            r"not answered within server\.retry_timeout_s=0\.1 s, the last try: HTTP "
            r"503.*resume=auto"
        ),
    ):
        evaluate_checkpoint(_settings(tmp_path, server, external={"retry_timeout_s": 0.1}))


def test_a_server_that_answers_nothing_is_told_of_meanwhile(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.before = [500] * 12
    evaluate_checkpoint(_settings(tmp_path, server))
    (line,) = [
        record.getMessage() for record in caplog.records if "trying again" in record.getMessage()
    ]
    assert f"{server.url}/chat/completions: HTTP 500: not now: see the server's log" in line
    assert "server.retry_timeout_s=5 s" in line


@pytest.mark.parametrize(
    ("pause", "concurrency", "patience", "lines"), [(1.5, 64, 0.8, 1), (0.12, 1, 2.4, 0)]
)
def test_a_server_that_accepts_and_says_nothing_is_told_of_once(
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pause: float,
    concurrency: int,
    patience: float,
    lines: int,
) -> None:
    """Where the first response came in time there is nothing to tell of, however long the whole
    takes."""
    monkeypatch.setattr(openai_client, "_SILENT_SECONDS", patience)
    server.pause = pause
    evaluate_checkpoint(_settings(tmp_path, server, external={"concurrency": concurrency}))
    silent = [
        record.getMessage()
        for record in caplog.records
        if "no response within" in record.getMessage()
    ]
    assert len(silent) == lines
    assert all("within 0.8 s: see the server's log, check server.url" in line for line in silent)


def test_what_is_no_completion_is_named(tmp_path: Path, server: Server) -> None:
    server.body = b"<html>hello</html>"
    with pytest.raises(
        RunFailed, match=r"answered problem p\d with '<html>hello</html>', expected a completion"
    ):
        evaluate_checkpoint(_settings(tmp_path, server))


def test_a_response_that_the_server_broke_off_is_asked_for_again(
    tmp_path: Path, server: Server
) -> None:
    server.broken_off = 5
    evaluate_checkpoint(_settings(tmp_path, server))
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/e/evaluation/whole.jsonl").read_text().splitlines()
    ]
    assert len(server.requests) == PROBLEMS * SAMPLES + 5
    assert {row["finish_reason"] for row in rows} == {"stop"} and all(
        "boxed" in row["response"] for row in rows
    )


def test_mended_gold_answer_counts_without_asking_again(tmp_path: Path, server: Server) -> None:
    settings = _settings(tmp_path, server)
    evaluate_checkpoint(settings)
    before = _report(tmp_path)["sets"][0]["avg_at_k"]
    asked = len(server.requests)
    path = settings.data.eval[0].path
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"answer": "none"}) + "\n" for row in rows))
    evaluate_checkpoint(settings)
    assert len(server.requests) == asked
    assert before > 0 and _report(tmp_path)["sets"][0]["avg_at_k"] == 0


def test_function_reads_other_fields_and_regrades_on_change(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "rewards"))
    function = {"verifier": "function", "function": "reward_functions:obey"}
    settings = _settings(tmp_path, server, data={"fields": {"extra": ["score"]}}, reward=function)
    path = settings.data.eval[0].path
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for right in (1, 3):
        scored = [row | {"score": number < right} for number, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in scored))
        evaluate_checkpoint(settings)
        assert _report(tmp_path)["sets"][0]["avg_at_k"] == pytest.approx(right / PROBLEMS)
    assert len(server.requests) == PROBLEMS * SAMPLES


def test_evaluation_owns_run_directory_and_resumes_after_a_kill(
    tmp_path: Path, server: Server
) -> None:
    server.pause = 0.15
    settings = _settings(tmp_path, server)
    config = tmp_path / "e.yaml"
    dump_config(settings, config)
    command = [sys.executable, "-m", "vapo_megatron.cli", "evaluate", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while len(server.requests) < 2 * SAMPLES and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)  # it lives, and gets no further meanwhile
        with pytest.raises(BadInput, match=rf"runs/e: process {process.pid} on \S+ works in it"):
            evaluate_checkpoint(settings)
        process.kill()
    killed_after = len(server.requests)
    assert 2 * SAMPLES <= killed_after < PROBLEMS * SAMPLES
    server.pause = 0.0
    server.requests = []
    evaluate_checkpoint(settings)
    again = len(server.requests)
    assert (PROBLEMS - killed_after // SAMPLES) * SAMPLES <= again < PROBLEMS * SAMPLES
    assert (
        len((tmp_path / "runs/e/evaluation/whole.jsonl").read_text().splitlines())
        == PROBLEMS * SAMPLES
    )
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["e"], (
        "the lease of a finished evaluation stays"
    )


def test_cancelled_evaluation_ends_without_a_stack_trace(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.cancels_after = 2
    with pytest.raises(SystemExit) as end:
        evaluate_checkpoint(_settings(tmp_path, server))
    gc.collect()  # asyncio tells then of a task that nobody asked how it ended
    assert end.value.code == 143 and "asyncio" not in {record.name for record in caplog.records}


def test_a_server_that_drips_is_given_up_in_time(tmp_path: Path, server: Server) -> None:
    server.drips = True
    external = {"retry_timeout_s": 0.1, "request_timeout_s": 0.5}
    start = time.monotonic()
    with pytest.raises(TryAgain, match=r"the last try: no answer within 0\.5 s"):
        evaluate_checkpoint(_settings(tmp_path, server, external=external))
    assert time.monotonic() - start < 10


@pytest.mark.full
def test_an_evaluation_outlives_a_full_disk_under_its_output(
    tmp_path: Path, server: Server
) -> None:
    config = tmp_path / "config.yaml"
    dump_config(_settings(tmp_path, server), config)
    command = [sys.executable, "-m", "vapo_megatron.cli", "evaluate", str(config)]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=full, timeout=240)
    assert ended.returncode == 0
    assert _report(tmp_path)["sets"][0]["samples"] == SAMPLES

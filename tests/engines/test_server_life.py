"""How a server starts, fails to start, and ends with its owner."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from vapo_megatron.config.rollout import RolloutConfig, SamplingConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.engines.external_server import ask_health
from vapo_megatron.engines.server.address import cause_in_log
from vapo_megatron.engines.server.process import EngineServer
from vapo_megatron.engines.server.scratch import locked as _locked
from vapo_megatron.engines.server.scratch import remove_left_folders
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.request import GenerationRequest

pytestmark = pytest.mark.full

# Starts a server, forks a process that inherits the server's lifeline and outlives its parent, then
# waits for its end.
OWNER = """
import os, sys, time
from pathlib import Path
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server.process import EngineServer

config = RolloutConfig(max_total_tokens=2048, start_timeout_s=120)
server = EngineServer(sys.argv[1], config, "float32", Path(sys.argv[2]))
server.start()
server.wait_until_ready()
heir = os.fork()
if heir == 0:
    time.sleep(120)
    os._exit(0)
print(server.pid, heir, flush=True)
time.sleep(120)
"""

# Is killed in the middle of a start, when the server runs and its guard does not.
EARLY_END = """
import os, signal, sys, time
from pathlib import Path
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.server import process


def start_guard(group, *_):
    print(group, flush=True)
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)

process.start_guard = start_guard
process.EngineServer(sys.argv[1], RolloutConfig(), "float32", Path(sys.argv[2])).start()
"""


def living(group: int) -> list[psutil.Process]:
    """Processes of a process group, the dead that nobody has reaped left out."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def scratch_of(pid: int) -> Path:
    return Path(psutil.Process(pid).environ()["TMPDIR"])


def guard_of(group: int) -> psutil.Process:
    """The process beside a server that ends it with its owner."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "vapo_megatron.engines.inside.owner_guard" in command and str(group) in command:
            return process
    raise AssertionError(f"nobody guards {group}")


def wait_until_gone(group: int, seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (left := living(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def test_killed_owner_leaves_no_process_of_a_stopped_server(
    model_path: Path, tmp_path: Path
) -> None:
    # As on clusters: sockets have names of 107 bytes at most
    (temporary := tmp_path / ("x" * 100)).mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model_path), str(tmp_path / "engine.log")],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    group, heir = map(int, owner.stdout.readline().split())
    try:
        assert len(living(group)) >= 3  # HTTP server, scheduler, detokenizer
        scratch = scratch_of(group)
        guard = guard_of(group)
        # All of the machine's processes are suspended, and this one is killed
        os.killpg(group, signal.SIGSTOP)
        guard.send_signal(signal.SIGSTOP)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert psutil.pid_exists(heir)
        assert wait_until_gone(group, seconds=20) == []
        assert wait_until_gone(guard.pid, seconds=20) == []
        assert not scratch.exists()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        owner.kill()
        os.kill(heir, signal.SIGKILL)
        owner.stdout.close()


def test_a_server_without_a_guard_does_not_begin(model_path: Path, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    command = [sys.executable, "-c", EARLY_END, str(model_path), str(log)]
    ended = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    assert ended.returncode == -signal.SIGKILL
    assert wait_until_gone(int(ended.stdout), seconds=10) == []
    assert log.read_text() == "" and not list(tmp_path.glob("vapo-engine-*"))


def test_dying_server_is_transient_and_stop_leaves_nothing(
    model_path: Path, config: RolloutConfig, tmp_path: Path
) -> None:
    prompt = Prompt(id="0", problem="", answer="", token_ids=(5, 6))
    with EngineServer(model_path, config, "float32", tmp_path / "engine.log") as server:
        group = server.pid
        scratch = scratch_of(group)
        guard = guard_of(group)
        for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGKILL, "dead")):
            guard.send_signal(number)
            end = time.monotonic() + 120
            while (told := ask_health(server.address, 10)) is None or told["lost"] == []:
                assert time.monotonic() < end
            assert told["lost"] == [f"its guard (process {guard.pid}) is {state}"]
            guard.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        with Dispatcher([server.address], config, stop_token_ids=[1]) as dispatcher:
            os.killpg(group, signal.SIGKILL)
            with pytest.raises(
                TryAgain, match=r"127\.0\.0\.1:\d+ \(log .*engine\.log\): the server is gone"
            ):
                dispatcher.collect(
                    GenerationRequest(
                        [prompt], 1, SamplingConfig(max_new_tokens=4), seed=0, weight_version=0
                    )
                )
    assert wait_until_gone(group, seconds=10) == []
    assert not scratch.exists()


def test_a_server_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    server = EngineServer(
        tmp_path / "no-such-model", RolloutConfig(), "float32", tmp_path / "engine.log"
    )
    with pytest.raises(RunFailed) as raised:
        server.wait_until_ready()
    message = str(raised.value)
    assert "engine.log" in message
    assert "no-such-model" in message
    assert "\n" not in message


def test_folder_of_a_server_with_killed_owner_goes_at_next_start(
    tmp_path: Path,
) -> None:
    alive, dead, of_others = (
        tmp_path / f"vapo-engine-{name}" for name in ("alive", "dead", "others")
    )
    for folder in (alive, dead, of_others):
        folder.mkdir()
    lock = _locked(alive)
    _locked(dead).close()  # as the kernel does when its holder dies
    remove_left_folders(tmp_path)
    assert alive.exists() and of_others.exists() and not dead.exists()
    lock.close()


def test_the_cause_in_a_log_is_its_last_exception(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n  File x\nValueError: bad shape\n\nbye\n")
    assert cause_in_log(log) == 'its log says "ValueError: bad shape"'
    log.write_text('ValueError: bad shape\n"GET /x HTTP/1.1" 200\n')
    assert cause_in_log(log) == 'its log says "ValueError: bad shape"'
    for text in ("", "one\n(scheduler pid=3) two=0x7f\n"):
        log.write_text(text)
        assert cause_in_log(log) == f"no exception is in its log, {log}", (
            "no line that explains nothing"
        )
    assert "cannot be read" in cause_in_log(tmp_path / "none")

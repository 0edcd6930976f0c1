"""slurm/task.sh, without Slurm: signals reach the rank alone, ends are recorded, nothing stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

# A rank with a child; USR1 asks it to stop and say whether the child still lives.
STOPPABLE = """
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "300"])
print(child.pid, flush=True)
signal.signal(signal.SIGUSR1, lambda *_: None)
print("ready", flush=True)
signal.pause()
print("alive" if child.poll() is None else "dead", flush=True)
sys.exit(75)
"""
UNSTOPPABLE = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(300)
"""


class Task:
    """One task of a step, started as srun starts it."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.local_tmp, self.exits = folder / "local", folder / "exits"
        self.local_tmp.mkdir(exist_ok=True)
        self.exits.mkdir()
        environment = {
            **os.environ,
            **{"SLURM_JOB_ID": "42", "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURMD_NODENAME": "a", "RESTART": "2"},
            **{"LOCAL_TMP": str(self.local_tmp), "VENV": "", "SETUP": "", "KILL_WAIT": "4"},
        }
        self.process = subprocess.Popen(
            ["bash", "slurm/task.sh", str(self.exits), *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    @property
    def recorded(self) -> list[str]:
        return (self.exits / "1").read_text().split()[:2]


def until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_request_to_save_reaches_the_rank_alone(tmp_path: Path) -> None:
    task = Task(tmp_path, sys.executable, "-c", STOPPABLE)
    child = psutil.Process(int(task.line()))
    assert task.line() == "ready"
    # As scancel does it: to every process of the step.
    for process in (child, *psutil.Process(task.process.pid).children(recursive=True)):
        process.send_signal(signal.SIGURG)
    task.process.send_signal(signal.SIGURG)
    assert task.line() == "alive"
    assert task.process.wait(60) == 75
    assert task.recorded == ["75", "a"]
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert not list(task.local_tmp.iterdir())


def test_temporary_files_lie_in_a_folder_of_the_try_and_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "local" / "vapo-42.1.0").mkdir(parents=True)  # of the try before, which was killed
    show = "import os, tempfile; print(tempfile.mkdtemp()); print(os.environ['TRITON_CACHE_DIR']); input()"
    task = Task(tmp_path, sys.executable, "-c", show)
    scratch = task.local_tmp / "vapo-42.2.0"
    assert Path(task.line()).is_relative_to(scratch) and Path(task.line()).is_relative_to(scratch)
    assert task.process.wait(60) == 1  # it read from standard input, which is empty
    assert not list(task.local_tmp.iterdir())


def test_a_cancelled_task_cleans_up_before_it_is_killed(tmp_path: Path) -> None:
    task = Task(tmp_path, sys.executable, "-c", UNSTOPPABLE)
    assert task.line() == "ready" and list(task.local_tmp.iterdir())
    (rank,) = [
        process for process in psutil.Process(task.process.pid).children() if process.cmdline()[0] == sys.executable
    ]
    task.process.send_signal(signal.SIGTERM)
    until(lambda: not list(task.local_tmp.iterdir()))
    assert rank.is_running() and task.process.poll() is None
    rank.kill()
    assert task.process.wait(60) == 137
    # Killed because it was to end: that says nothing about its node.
    assert not list(task.exits.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_task_that_dies_of_a_signal_is_recorded_with_its_node(tmp_path: Path, number: signal.Signals) -> None:
    task = Task(tmp_path, sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert task.process.wait(60) == 128 + number
    assert task.recorded == [str(128 + number), "a"]

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
from command_lines import command_line

ROOT = Path(__file__).parents[2]

# A rank with a child; USR1 asks it to stop and say whether the child still lives.
STOPPABLE = """
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "300"])
print(child.pid, flush=True)
# A signal that comes before it waits is not lost.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print("ready", flush=True)
signal.sigwait({signal.SIGUSR1})
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

    def __init__(self, folder: Path, *command: str, **variables: str) -> None:
        self.local_tmp = folder / "local"
        self.exits = folder / "exits"
        self.local_tmp.mkdir(exist_ok=True)
        self.exits.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            **{
                "SLURM_JOB_ID": "42",
                "SLURM_NODEID": "0",
                "SLURM_PROCID": "1",
                "SLURMD_NODENAME": "a",
                "RESTART": "2",
            },
            **{"LOCAL_TMP": str(self.local_tmp), "VENV": "", "SETUP": "", "KILL_WAIT": "4"},
            **variables,
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
    assert not folders_of_tries(task.local_tmp)


def test_a_plain_usr1_to_the_whole_step_is_the_same_request(tmp_path: Path) -> None:
    child_passes_over_it = STOPPABLE.replace(
        "import signal, subprocess, sys",
        "import signal, subprocess, sys; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    )
    task = Task(tmp_path, sys.executable, "-c", child_passes_over_it)
    child = psutil.Process(int(task.line()))
    assert task.line() == "ready"
    for process in (
        psutil.Process(task.process.pid),
        child,
        *psutil.Process(task.process.pid).children(),
    ):
        process.send_signal(signal.SIGUSR1)
    assert task.line() == "alive"
    assert task.process.wait(60) == 75
    assert task.recorded == ["75", "a"]


def test_temporary_files_end_with_the_folder_of_their_try(tmp_path: Path) -> None:
    # Of earlier tries, which were killed; this node had another number in one. The last is another
    # job's.
    for left in ("vapo-42.1.0", "vapo-42.0.3", "vapo-421.0.0"):
        (tmp_path / "local" / left).mkdir(parents=True)
    show = (
        "import os, tempfile; print(tempfile.mkdtemp()); print(os.environ['XDG_CACHE_HOME']); "
        "input()"
    )
    task = Task(tmp_path, sys.executable, "-c", show)
    scratch = task.local_tmp / "vapo-42.2.0"
    assert Path(task.line()).is_relative_to(scratch) and Path(task.line()).is_relative_to(scratch)
    assert task.process.wait(60) == 1  # it read from standard input, which is empty
    assert folders_of_tries(task.local_tmp) == ["vapo-421.0.0"]


def folders_of_tries(local_tmp: Path) -> list[str]:
    return [path.name for path in local_tmp.iterdir() if not path.name.startswith("vapo-kernels-")]


@pytest.mark.parametrize(
    ("numa", "tasks"),
    [("1", "8(x2)"), ("1", "12"), ("-1", "8"), (None, "8"), ("1", "1"), ("1", "1(x16)")],
)
def test_a_task_runs_on_the_cores_beside_its_gpu(
    tmp_path: Path, numa: str | None, tasks: str
) -> None:
    """One alone on its node, as an evaluation's, has engines on all GPUs, and all cores."""
    core = min(os.sched_getaffinity(0))
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    node = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (node / "cpulist").write_text(f"{core}\n")
    if numa:
        (device / "numa_node").write_text(f"{numa}\n")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/bash\n[[ $1 = --id=3 ]] && echo 00000000:1B:00.0\n")
    smi.chmod(0o755)
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": tasks}
    task = Task(
        tmp_path, sys.executable, "-c", code, PATH=path, SYS_ROOT=str(tmp_path), **variables
    )
    is_bound = numa == "1" and not tasks.startswith("1")
    expected = [core] if is_bound or tasks == "12" else sorted(os.sched_getaffinity(0))
    assert task.line() == str(expected) and task.process.wait(60) == 0


def test_copies_of_an_earlier_try_of_the_job_go(tmp_path: Path) -> None:
    earlier = tmp_path / "vapo-job-42.1.a"
    others = tmp_path / "vapo-job-43.1.a"
    for folder in (earlier, others):
        folder.mkdir()
    assert Task(tmp_path, "true", SHARED_MEMORY=str(tmp_path)).process.wait(60) == 0
    assert not earlier.exists() and others.exists()


def test_compiled_kernels_stay_for_later_tries_in_environment(tmp_path: Path) -> None:
    caches = (
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "SGLANG_JIT_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    )
    names = (*caches, "DG_JIT_CACHE_DIR", "TILELANG_CACHE_DIR", "CUTE_DSL_CACHE_DIR")
    compile_ = (
        f"import os, pathlib; folders = [pathlib.Path(os.environ[n]) for n in {names}]; "
        "print(all((f / 'kernel').exists() for f in folders)); "
        "[(f.mkdir(parents=True, exist_ok=True), (f / 'kernel').touch()) for f in folders]"
    )
    for exists in ("False", "True"):
        task = Task(tmp_path, sys.executable, "-c", compile_)
        assert task.line() == exists and task.process.wait(60) == 0
    (environments,) = (tmp_path / "local").glob("vapo-kernels-*")
    assert len(list(environments.iterdir())) == 1 and environments.stat().st_mode & 0o077 == 0


def test_a_cancelled_task_cleans_up_before_it_is_killed(tmp_path: Path) -> None:
    task = Task(tmp_path, sys.executable, "-c", UNSTOPPABLE)
    assert task.line() == "ready" and folders_of_tries(task.local_tmp)
    (rank,) = [
        process
        for process in psutil.Process(task.process.pid).children()
        if command_line(process)[:1] == [sys.executable]
    ]
    task.process.send_signal(signal.SIGTERM)
    until(lambda: not folders_of_tries(task.local_tmp))
    assert rank.is_running() and task.process.poll() is None
    rank.kill()
    assert task.process.wait(60) == 137
    # Killed because it was to end: that says nothing about its node.
    assert not list(task.exits.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_task_that_dies_of_a_signal_is_recorded_with_its_node(
    tmp_path: Path, number: signal.Signals
) -> None:
    task = Task(tmp_path, sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert task.process.wait(60) == 128 + number
    assert task.recorded == [str(128 + number), "a"]


@pytest.mark.parametrize("kills", [0, 1])
def test_a_task_that_was_killed_for_memory_says_so(
    tmp_path: Path, kills: int, capfd: pytest.CaptureFixture[str]
) -> None:
    names = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    first = "memory" in names
    folder = tmp_path / "groups" / (f"memory{names['memory']}" if first else names[""].lstrip("/"))
    folder.mkdir(parents=True)
    (folder / ("memory.oom_control" if first else "memory.events")).write_text(
        f"oom 5\noom_kill {kills}\n"
    )
    (folder / ("memory.max_usage_in_bytes" if first else "memory.peak")).write_text(f"{3 << 30}\n")
    die = "import os; os.kill(os.getpid(), 9)"
    task = Task(tmp_path, sys.executable, "-c", die, CGROUP_ROOT=str(tmp_path / "groups"))
    assert task.process.wait(60) == 137
    why = (
        ": the system killed a process of this step for want of memory, which held up to 3072 MiB"
        if kills
        else ""
    )
    assert capfd.readouterr().err.strip() == f"task.sh: task 1 on a was ended by signal 9{why}"


def test_a_rank_that_is_stopped_for_good_is_killed_and_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After 16 s: a `sleep` that writes down its seconds, and sleeps less, stands in front of the
    system's."""
    sleeps = tmp_path / "sleeps"
    sleep = tmp_path / "bin" / "sleep"
    sleeps.touch()
    sleep.parent.mkdir()
    sleep.write_text(f'#!/bin/sh\necho "$1" >>{sleeps}\nPATH=${{PATH#*:}} exec sleep 0.03\n')
    sleep.chmod(0o755)

    def stopped_seconds() -> float:
        return sum(map(float, sleeps.read_text().split()))

    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    task = Task(tmp_path, sys.executable, "-c", code, PATH=f"{sleep.parent}:{os.environ['PATH']}")
    rank = int(task.line())
    os.kill(rank, signal.SIGSTOP)
    until(lambda: stopped_seconds() > 7)
    used = psutil.Process(task.process.pid).cpu_times()
    assert used.user + used.system < 0.4, "the shell that waits for it keeps a core busy"
    os.kill(rank, signal.SIGCONT)  # forgotten
    time.sleep(0.5)
    before = stopped_seconds()
    assert before < 16
    os.kill(rank, signal.SIGSTOP)
    assert task.process.wait(60) == 137 and stopped_seconds() - before == 16
    assert task.recorded == ["137", "a"]
    assert capfd.readouterr().err.strip() == (
        "task.sh: task 1 on a was ended by signal 9: a signal (SIGSTOP) had it stopped for good"
    )


def test_a_node_without_a_usable_disk_is_recorded_as_unfit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    task = Task(tmp_path, "touch", str(tmp_path / "ran"), LOCAL_TMP=str(tmp_path / "file"))
    assert task.process.wait(60) == 76
    assert task.recorded == ["76", "a"] and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("setup", ["false", "exit 5", "no_such_command_here"])
def test_a_setup_that_fails_ends_the_task_as_bad_input(tmp_path: Path, setup: str) -> None:
    (tmp_path / "setup.sh").write_text(f"export SITE=1\n{setup}\n")
    task = Task(tmp_path, "touch", str(tmp_path / "ran"), SETUP=str(tmp_path / "setup.sh"))
    assert task.process.wait(60) == 2
    assert task.recorded == ["2", "a"] and not (tmp_path / "ran").exists()
    assert not folders_of_tries(task.local_tmp)


def test_what_a_setup_exports_reaches_the_rank(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("export SITE=here\n")
    task = Task(tmp_path, "bash", "-c", "echo $SITE", SETUP=str(tmp_path / "setup.sh"))
    assert task.line() == "here"
    assert task.process.wait(60) == 0
    assert task.recorded == ["0", "a"]


def test_task_ended_during_its_setup_says_nothing_about_it(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("echo started\nsleep 1 & wait\nsleep 1\n")
    task = Task(tmp_path, "touch", str(tmp_path / "ran"), SETUP=str(tmp_path / "setup.sh"))
    assert task.line() == "started"
    task.process.send_signal(signal.SIGUSR1)  # passed over
    task.process.send_signal(signal.SIGTERM)
    assert task.process.wait(60) == 143
    assert (
        not list(task.exits.iterdir())
        and not list(task.local_tmp.iterdir())
        and not (tmp_path / "ran").exists()
    )

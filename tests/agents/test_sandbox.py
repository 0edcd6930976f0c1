"""What the kernel refuses to code in the sandbox, with the interpreter's own guard switched off.

The probes are harmless: files of the test's own, a process of the test's own, calls that would
change nothing if they were allowed.
"""

import asyncio
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vapo_megatron.agents import sandbox, tools
from vapo_megatron.agents.tools import run_python

# Calls through the C library, where no audit hook of the interpreter listens.
CALLS = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = "-1\n"


def run(code: str, seconds: float = 10.0) -> str:
    return asyncio.run(run_python(code, seconds))[0]


@pytest.fixture(autouse=True)
def without_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = "import os, sys\nsys.path += sys.argv.pop().split(os.pathsep)\nexec(sys.stdin.read())"
    monkeypatch.setattr(tools, "_GUARD", guard)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of the sandbox's business."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_answers_of_the_trainer_cannot_be_read(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("the answer is 42")
    assert "PermissionError" in run(f"print(open({str(answers)!r}).read())")
    relative = f"import os; print(open(os.path.relpath({str(answers)!r}, os.__file__)).read())"
    assert "PermissionError" in run(relative)
    by_folder = "import os, json\nplace = os.open(os.path.dirname(json.__file__), os.O_RDONLY)\n"
    by_folder += f"print(os.read(os.open('../' * 30 + {str(answers)[1:]!r}, 0, dir_fd=place), 99))"
    assert "PermissionError" in run(by_folder)


def test_nothing_outside_the_folder_is_written(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    code = CALLS + f"print(libc.open({str(kept)!r}.encode(), os.O_WRONLY | os.O_TRUNC))"
    assert run(code) == REFUSED
    assert run(CALLS + f"print(libc.truncate({str(kept)!r}.encode(), 0))") == REFUSED
    assert run(CALLS + f"print(libc.unlink({str(kept)!r}.encode()))") == REFUSED
    assert run(CALLS + f"print(libc.chmod({str(kept)!r}.encode(), 0))") == REFUSED
    assert run(CALLS + "print(libc.open(b'mine', os.O_RDWR | os.O_CREAT, 0o600) > 2)") == "True\n"
    assert kept.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


def test_another_process_is_out_of_reach(sleeper: "subprocess.Popen[bytes]") -> None:
    assert run(CALLS + f"print(libc.kill({sleeper.pid}, 15))") == REFUSED
    assert run(CALLS + f"print(libc.setpriority(0, {sleeper.pid}, 10))") == REFUSED
    assert run(CALLS + f"print(libc.syscall(302, {sleeper.pid}, 7, None, None))") == REFUSED
    assert run(CALLS + f"print(libc.ptrace(16, {sleeper.pid}, None, None))") == REFUSED
    assert "PermissionError" in run(f"print(open('/proc/{sleeper.pid}/environ').read())")
    assert sleeper.poll() is None


@pytest.mark.parametrize(
    "call",
    [
        "libc.fork()",
        "libc.vfork()",
        "libc.socket(2, 1, 0)",
        "libc.socket(1, 1, 0)",
        "libc.shmget(0, 4096, 0o1600)",
        "libc.memfd_create(b'x', 0)",
        "libc.syscall(425, 1, None)",  # io_uring_setup
        "libc.unshare(0x10000000)",
        "libc.prctl(1, 0, 0, 0, 0)",  # it would outlive the trainer
        "libc.execv(b'/bin/sh', None)",
    ],
)
def test_a_call_is_refused_by_the_kernel(call: str) -> None:
    assert run(f"{CALLS}print({call})") == REFUSED


def test_limits_cannot_be_raised_and_can_be_read() -> None:
    code = "import resource as r\nprint(r.getrlimit(r.RLIMIT_DATA)[0] >> 20)\n"
    assert run(code) == "512\n"
    assert "Error: not " in run(code + "r.setrlimit(r.RLIMIT_DATA, (1 << 40, 1 << 40))")


def test_numpy_and_sympy_work() -> None:
    assert run("import numpy; print(numpy.linalg.inv(2 * numpy.eye(2))[0, 0])") == "0.5\n"
    code = "import sympy; x = sympy.Symbol('x'); print(sympy.integrate(x**2, x))"
    assert run(code) == "x**3/3\n"


def test_threads_and_signals_to_itself_work() -> None:
    code = "import threading\nt = threading.Thread(target=print, args=('hi',)); t.start(); t.join()"
    assert run(code) == "hi\n"
    own = "import os, signal\nsignal.signal(10, lambda *_: print('got it'))\n"
    assert run(own + "os.kill(os.getpid(), 10)") == "got it\n"


def test_memory_is_what_a_process_allocates() -> None:
    assert "MemoryError" in run("bytearray(600 << 20)")
    # A library's text is mapped from its file and takes no memory that others could use.
    code = "import mmap\nfile = open('f', 'w+b'); file.truncate(16 << 20)\n"
    code += "maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for _ in range(50)]\n"
    assert run(code + "print(len(maps))") == "50\n"


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
def test_an_older_kernel_confines_as_well(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if version > sandbox.check_boundary():
        pytest.skip(f"this kernel has version {sandbox.check_boundary()} of Landlock's interface")
    monkeypatch.setattr(sandbox, "check_boundary", lambda: version)
    assert "PermissionError" in run("print(open('/etc/hostname').read())")
    assert run(CALLS + "print(libc.truncate(b'/etc/hostname', 0))") == REFUSED
    assert run("open('f', 'w').write('x'); print(open('f').read())") == "x\n"


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What the kernel has is looked up in the test, and again behind it."""
    sandbox.check_boundary.cache_clear()
    yield
    sandbox.check_boundary.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_a_kernel_without_seccomp_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "_SECCOMP_ACTIONS", tmp_path / "absent")
    with pytest.raises(sandbox.NoBoundary, match=r"needs seccomp.*CONFIG_SECCOMP_FILTER"):
        run("print(1)")


@pytest.mark.usefixtures("asked_anew")
def test_a_kernel_without_landlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutLandlock:
        @staticmethod
        def syscall(*_: object) -> int:
            ctypes.set_errno(38)
            return -1

    monkeypatch.setattr(sandbox, "_libc", WithoutLandlock)
    with pytest.raises(sandbox.NoBoundary, match=r"Landlock.*Function not implemented.*lsm="):
        run("print(1)")

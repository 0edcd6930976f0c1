"""Tools against what a policy may write."""

import asyncio
import mmap
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.agents import tools
from vapo_megatron.agents.tools import Search, run_python


def run(code: str, seconds: float = 5.0) -> tuple[str, bool]:
    return asyncio.run(run_python(code, seconds))


def test_python_prints_and_knows_nothing_of_the_trainer() -> None:
    assert run("print(6 * 7)") == ("42\n", True)
    assert run("import json; open('f', 'w').write('[1]'); print(json.load(open('f')))") == (
        "[1]\n",
        True,
    )
    assert (
        run("import os; print(sorted(os.environ), os.listdir('.'))")[0]
        == "['HOME', 'LANG', 'OPENBLAS_NUM_THREADS'] []\n"
    )


def test_a_call_starts_from_a_trainer_that_has_more_than_it_may(tmp_path: Path) -> None:
    """A rank has more memory than a call may have, and more files open."""
    with ExitStack() as opened:
        opened.enter_context(mmap.mmap(-1, 2 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for number in range(80):
            opened.enter_context((tmp_path / str(number)).open("w"))
        limits = "import resource as r; print(r.getrlimit(r.RLIMIT_DATA)[0] >> 20)"
        for _ in range(3):
            assert run(limits) == ("512\n", True)
        assert "MemoryError" in run("x = bytearray(1 << 30)")[0]
        assert "Too many open files" in run("files = [open(str(n), 'w') for n in range(80)]")[0]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os\nwhile True: os.fork()", "os.fork is not allowed"),
        ("import subprocess\nsubprocess.run(['sh'])", "is not allowed"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "is not allowed"),
        ("import os\nos.kill(os.getppid(), 9)", "os.kill is not allowed"),
        ("while True: print('x' * 999)", "[cut: too much output]"),
        ("x = bytearray(1 << 33)", "MemoryError"),
        ("open('f', 'wb').write(bytes(1 << 25))", ""),
        ("print(open('/etc/hostname').read())", "/etc/hostname is outside the folder"),
        ("import os; print(os.listdir('/tmp'))", "/tmp is outside the folder"),
        ("import os; os.open('../x', os.O_WRONLY | os.O_CREAT)", "../x is outside the folder"),
        (
            "import os; os.symlink('/etc', 'link'); print(open('link/hostname').read())",
            "outside the folder",
        ),
        ("import os; os.rename('/tmp', 'mine')", "/tmp is outside the folder"),
        ("import shutil; shutil.rmtree('/tmp/nothing')", "outside the folder"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256))); sys.exit(3)", "\ufffd"),
        ("1 +", "SyntaxError"),
    ],
)
def test_a_hostile_call_ends_with_a_reason(code: str, says: str) -> None:
    output, ended_well = run(code)
    assert not ended_well and says in output


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(60)",
        "import signal\nfor n in {*range(1, 65)} - {9, 19, 32, 33}: signal.signal(n, print)\nwhile "
        "True: pass",
        "import os\nos.close(1)\nos.close(2)\nwhile True: pass",
    ],
    ids=["sleep", "every signal caught", "output closed"],
)
def test_a_call_that_hangs_is_ended(code: str) -> None:
    output, ended_well = run(code, seconds=0.5)
    assert not ended_well and "[stopped after 0.5 s]" in output


@pytest.mark.parametrize(
    "code",
    [
        "import itertools\nfor n in itertools.count(): open(str(n), 'wb').write(bytes(1 << 23))",
        "import itertools, os\nfor n in itertools.count(): open(f'f{n}', 'w').close(); "
        "os.mkdir(str(n))",
        "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
        "import os, time\nfiles = []\nfor n in range(50):\n    files.append(open(str(n), 'wb'))\n"
        "    os.remove(str(n))\n"
        "    files[-1].write(bytes(1 << 23))\ntime.sleep(60)",
    ],
    ids=["files", "names", "folders", "removed files"],
)
def test_a_call_that_fills_the_disk_is_ended_and_leaves_nothing(code: str, temporary: Path) -> None:
    output, ended_well = run(code, seconds=20.0)
    assert not ended_well and "[stopped: it wrote more than 64 MiB]" in output
    assert not list(temporary.iterdir())


def test_a_file_that_vanishes_leaves_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"a": 5 << 20, "b": 1 << 20, "c": 2 << 20}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    scan = os.scandir

    def scan_and_remove(path: str) -> Any:
        entries = sorted(scan(path), key=lambda entry: entry.name)
        (tmp_path / "a").unlink(missing_ok=True)
        return nullcontext(entries)

    monkeypatch.setattr(os, "scandir", scan_and_remove)
    assert tools._written(0, str(tmp_path)) == sizes["b"] + sizes["c"]


def test_a_call_may_write_what_is_allowed() -> None:
    code = (
        "for n in range(5): open(str(n), 'wb').write(bytes(10 << 20))\n"
        "import time; time.sleep(0.5); print('done')"
    )
    assert run(code) == ("done\n", True)


def test_search_puts_the_rarer_word_first() -> None:
    search = Search(["the cat sat", "the dog sat", "the the the", "a zebra sat on the cat"])
    assert (
        search.find("zebra cat")[0] == "a zebra sat on the cat"
        and search.find("nothing here") == []
    )
    assert search.find("dog", most=1) == ["the dog sat"] and search.find("") == []
    assert search.find("unheard zebra", most=9) == ["a zebra sat on the cat"]
    with pytest.raises(ValueError, match="2 texts to search, none with a word"):
        Search(["", "?!"])

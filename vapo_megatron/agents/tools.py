"""Built-in tools: Python in a process with limits, and search over a local corpus."""

import asyncio
import math
import os
import re
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from vapo_megatron.agents.sandbox import boundary, library_folders
from vapo_megatron.signals import end_tree, end_with_parent

_MOST_OUTPUT = 16 << 10
_MIB = 1 << 20
_MOST_WRITTEN = 64 * _MIB
_LEAST_FILE = 64 << 10  # what a file or folder counts, however small
_LOOK_SECONDS = 0.1
_WORDS = re.compile(r"\w+")
# Given to `python -c`: an audit hook says in words what the kernel refuses (sandbox.py), which
# whoever reads the output can act on. The boundary and the limits hold whatever becomes of the
# hook.
_GUARD = """
import os, sys
sys.path += sys.argv.pop().split(os.pathsep)
def guard(real, decode, home, library, writing):
    refused = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix", "os.spawn", "os.system")
    refused += ("os.kill", "os.chmod", "os.chown", "os.utime", "signal.pthread_kill")
    quiet = ("os.putenv", "os.unsetenv")
    def check(event, arguments):
        if event.startswith(refused):
            raise PermissionError(event + " is not allowed here")
        if event != "open" and not event.startswith(("os.", "shutil.", "glob.")) or event in quiet:
            return
        reads = event in ("os.listdir", "os.scandir")
        reads = reads or event == "open" and not (arguments[2] or 0) & writing
        for path in arguments[: 1 if event == "open" else 2]:
            if isinstance(path, (str, bytes)):
                place = real(decode(path)) + "/"
                if not place.startswith(home) and not (reads and place.startswith(library)):
                    raise PermissionError(decode(path) + " is outside the folder of this call")
    return check
libraries = tuple(os.path.realpath(path) + "/" for path in sys.path if path)
writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
home = os.path.realpath(os.getcwd()) + "/"
sys.addaudithook(guard(os.path.realpath, os.fsdecode, home, libraries, writes))
del guard, home, libraries, writes
exec(compile(sys.stdin.read(), "<tool>", "exec"), {"__name__": "__main__"})
"""


async def run_python(code: str, seconds: float = 10.0, memory_mib: int = 512) -> tuple[str, bool]:
    """Run Python code in a separate process; returns its output, cut to 16 KiB, and whether it
    succeeded.

    The process has an empty folder, no environment, limits of time, memory, file size and open
    files, and no core file. It is killed when the time is over, or within a tenth of a second after
    it has written more than 64 MiB (a file or folder counts as 64 KiB at least). The kernel lets it
    read Python's modules and installed packages, write its folder, and nothing else: no network, no
    other process, no signal to one (sandbox.py). A container or a microVM protects against more, an
    exploit of the kernel for instance: agents may run their own.

    Args:
        code: Python source.
        seconds: time limit by the clock.
        memory_mib: limit of the memory that the process allocates (RLIMIT_DATA); libraries' files
            do not count.

    Raises:
        NoBoundary: the kernel of this machine cannot confine a process.
    """
    folder = tempfile.mkdtemp(prefix="vapo-tool-")
    try:
        return await _run(code, folder, seconds, memory_mib)
    finally:  # shutil.rmtree is recursive, and folders may be deep
        remove = ("sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', folder)
        removing = await asyncio.create_subprocess_exec(*remove, stderr=asyncio.subprocess.DEVNULL)
        await asyncio.shield(removing.wait())


async def _run(code: str, folder: str, seconds: float, memory_mib: int) -> tuple[str, bool]:
    limits = (
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_FSIZE, 16 * _MIB),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, memory_mib * _MIB),
    )
    confine = boundary(folder, limits)

    def begin() -> None:
        end_with_parent()
        confine()

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        _GUARD,
        os.pathsep.join(library_folders()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={"HOME": folder, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=begin,
    )
    output = b""
    over = ""
    watch = asyncio.create_task(_watch(process, folder))
    try:
        async with asyncio.timeout(seconds):
            output, over = await _talk(process, code.encode(errors="replace"))
    except TimeoutError:
        over = f"\n[stopped after {seconds:g} s]"
    finally:
        if watch.done():
            over = f"\n[stopped: it wrote more than {_MOST_WRITTEN // _MIB} MiB]"
        watch.cancel()
        _kill(process)
        await process.wait()
    return output.decode(errors="replace") + over, process.returncode == 0 and not over


async def _talk(process: asyncio.subprocess.Process, code: bytes) -> tuple[bytes, str]:
    """The output of a process, up to the limit."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(code)
    process.stdin.write_eof()
    output = b""
    while chunk := await process.stdout.read(_MOST_OUTPUT):
        output += chunk
        if len(output) > _MOST_OUTPUT:
            _kill(process)
            # Asyncio ends a process only when its pipe is empty
            while await process.stdout.read(_MOST_OUTPUT):
                pass
            return output[:_MOST_OUTPUT], "\n[cut: too much output]"
    await process.wait()
    return output, ""


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        end_tree(process.pid)
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _watch(process: asyncio.subprocess.Process, folder: str) -> None:
    """Kill a process that has written too much; returns then."""
    while _written(process.pid, folder) <= _MOST_WRITTEN:
        await asyncio.sleep(_LOOK_SECONDS)
    _kill(process)


def _written(pid: int, folder: str) -> int:
    """Bytes in a folder and in files that a process removed and has open; up to the limit."""
    total = 0
    left = [folder, f"/proc/{pid}/fd"]
    while left and total <= _MOST_WRITTEN:
        with suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                is_open = entry.path.startswith("/proc/")
                with suppress(OSError):  # others are still to be counted
                    facts = entry.stat(follow_symlinks=is_open)
                    if stat.S_ISDIR(facts.st_mode) and not is_open:
                        left.append(entry.path)
                    if not is_open or (stat.S_ISREG(facts.st_mode) and not facts.st_nlink):
                        total += max(facts.st_size, _LEAST_FILE)
                if total > _MOST_WRITTEN:
                    break
    return total


class Search:
    """BM25 (Robertson and Zaragoza 2009; k1 1.5, b 0.75), by the library bm25s, over texts held in
    memory.

    Raises:
        ValueError: no text has a word.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        import bm25s  # with NumPy, which code that only runs Python in a sandbox does not need

        self._texts = list(texts)
        self._index = bm25s.BM25(k1=1.5, b=0.75)
        words = [_WORDS.findall(text.lower()) for text in self._texts]
        if not any(words):
            raise ValueError(f"{len(words)} texts to search, none with a word in it")
        self._index.index(words, show_progress=False)

    def find(self, query: str, most: int = 3) -> list[str]:
        """The best texts for a query, best first, without those that share no word with it."""
        words = sorted(set(_WORDS.findall(query.lower())))
        if not words:
            return []
        scores = self._index.get_scores(words)
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[:most]
        return [self._texts[place] for place in best if scores[place] > 0]

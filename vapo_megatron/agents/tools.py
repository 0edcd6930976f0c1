"""Built-in tools: Python in a process with limits, and search over a local corpus."""

import asyncio
import math
import os
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from vapo_megatron.signals import adopt_orphans, end_tree, end_with_parent

_MOST_OUTPUT = 16 << 10
_MIB = 1 << 20
_WORDS = re.compile(r"\w+")
# Given to `python -c`: an audit hook refuses sockets, child processes, and files outside the call's folder, though
# Python's own modules may be read. The limits hold whatever becomes of the hook.
_GUARD = """
import os, sys
def guard(real, decode, home, library, writing):
    refused = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix", "os.spawn", "os.system", "os.kill", "ctypes")
    modules, quiet = ("_posixsubprocess", "_ctypes"), ("os.putenv", "os.unsetenv")
    def check(event, arguments):
        if event.startswith(refused) or event == "import" and arguments[0] in modules:
            raise PermissionError(event + " is not allowed here")
        if event != "open" and not event.startswith(("os.", "shutil.", "glob.")) or event in quiet:
            return
        reads = event in ("os.listdir", "os.scandir") or event == "open" and not (arguments[2] or 0) & writing
        for path in arguments[: 1 if event == "open" else 2]:
            if isinstance(path, (str, bytes)):
                place = real(decode(path)) + "/"
                if not place.startswith(home) and not (reads and place.startswith(library)):
                    raise PermissionError(decode(path) + " is outside the folder of this call")
    return check
libraries = tuple(os.path.realpath(path) + "/" for path in sys.path if path)
writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
sys.addaudithook(guard(os.path.realpath, os.fsdecode, os.path.realpath(os.getcwd()) + "/", libraries, writes))
del guard, libraries, writes
exec(compile(sys.stdin.read(), "<tool>", "exec"), {"__name__": "__main__"})
"""


async def run_python(code: str, seconds: float = 10.0, memory_mib: int = 512) -> tuple[str, bool]:
    """Run Python code in a separate process; returns its output, cut to 16 KiB, and whether it succeeded.

    The process has an empty folder, no environment, limits of time, memory, file size and open files, and no core file;
    it and all its descendants are killed when the time is over. Network, child processes and files outside that folder
    are refused by an audit hook of the interpreter: that stops code that a policy writes, not an attacker with an
    exploit of CPython. Use a container for the latter.
    """

    def limit() -> None:
        end_with_parent()
        adopt_orphans()
        cpu = math.ceil(seconds) + 1
        for kind, most in (
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_AS, memory_mib * _MIB),
            (resource.RLIMIT_FSIZE, 16 * _MIB),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, 0),  # root is not bound by it
        ):
            resource.setrlimit(kind, (most, most))

    with tempfile.TemporaryDirectory(prefix="vapo-tool-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _GUARD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"HOME": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=limit,
        )
        output, over = b"", ""
        try:
            async with asyncio.timeout(seconds):
                output, over = await _talk(process, code.encode(errors="replace"))
        except TimeoutError:
            over = f"\n[stopped after {seconds:g} s]"
        finally:
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
            while await process.stdout.read(_MOST_OUTPUT):  # asyncio ends a process only when its pipe is empty
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


class Search:
    """BM25 (Robertson and Zaragoza 2009; k1 1.5, b 0.75) over texts held in memory."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._counts = list(texts), [Counter(_WORDS.findall(text.lower())) for text in texts]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._lengths) / max(len(self._lengths), 1)
        self._documents = Counter(word for counts in self._counts for word in counts)

    def find(self, query: str, most: int = 3) -> list[str]:
        """The best texts for a query, best first, without those that share no word with it."""
        words = set(_WORDS.findall(query.lower()))
        scores = [(self._score(words, place), -place) for place in range(len(self._texts))]
        best = sorted((score for score in scores if score[0] > 0), reverse=True)[:most]
        return [self._texts[-place] for _, place in best]

    def _score(self, words: set[str], place: int) -> float:
        counts, score = self._counts[place], 0.0
        for word in words & counts.keys():
            with_it = self._documents[word]
            rarity = math.log1p((len(self._texts) - with_it + 0.5) / (with_it + 0.5))
            norm = 1.5 * (0.25 + 0.75 * self._lengths[place] / self._mean)
            score += rarity * counts[word] * 2.5 / (counts[word] + norm)
        return score

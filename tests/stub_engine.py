"""A server of two processes that tells of itself as an engine does, and starts in a moment; it
writes nothing."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import vapo_megatron
from vapo_megatron.engines.inside.heartbeat import HEALTH_PATH, lost_processes
from vapo_megatron.engines.remote_engines import PROTOCOL
from vapo_megatron.engines.server.address import EngineAddress


class StubServer:
    """What an EngineKeeper needs of an EngineServer."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._folder = folder
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: str | None = None

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(f"http://127.0.0.1:{self._port}", str(self._folder / "engine.log"))

    @property
    def processes(self) -> dict[str, int]:
        """Process ids, by role."""
        assert self._process is not None and self._scratch is not None
        names = [path.name.split("-") for path in Path(self._scratch).glob("process-*")]
        return {role: int(pid) for _, role, pid in names} | {"server": self._process.pid}

    def start(self) -> None:
        self.starts += 1
        self._scratch = tempfile.mkdtemp()
        environment = os.environ | {
            "TMPDIR": self._scratch,
            "PYTHONPATH": str(Path(vapo_megatron.__file__).parents[1]),
        }
        environment["STUB_PROTOCOL"] = str(PROTOCOL)
        command = [
            sys.executable,
            str(Path(__file__).with_name("stub_engine_main.py")),
            str(self._port),
        ]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    start_again = start

    def ended(self) -> str | None:
        code = None if self._process is None else self._process.poll()
        return None if code is None else f"exit code {code}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address.url}/{HEALTH_PATH}", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 20
        while not self.is_ready():
            assert time.monotonic() < end
            time.sleep(0.05)

    def lost(self) -> str | None:
        return (
            next(iter(lost_processes(self._scratch)), None) if self._scratch is not None else None
        )

    def end(self, cause: str) -> Path:
        self.stop()
        return self._folder / "engine.ended1.log"

    leads = True

    def lost_elsewhere(self) -> str | None:
        return None

    def is_closed(self) -> bool:
        return False

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            # It may have ended by itself, and have been waited for, since it was looked at.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch)
            self._scratch = None

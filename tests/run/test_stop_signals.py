"""What asks a run to save and stop is heeded wherever it waits, and a terminal that is gone is such
a request."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from threads import on_threads

from vapo_megatron.engines.keeper import EngineStatus
from vapo_megatron.engines.pool import EnginePool
from vapo_megatron.signals import take_note

SAVES = """
import sys, time
from pathlib import Path
from vapo_megatron.signals import ignore_stop_signals, listen, stop_requested
listen()
folder = Path(sys.argv[1])
(folder / "listens").touch()
while stop_requested() is None:
    time.sleep(0.01)
for _ in range(100):
    print("still working", flush=True)
    print("still working", file=sys.stderr, flush=True)
ignore_stop_signals()
(folder / "saved").write_text(stop_requested())
time.sleep(float(sys.argv[2]))
"""


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def test_a_terminal_that_goes_away_asks_for_a_save(tmp_path: Path) -> None:
    """Of a lost ssh: printing afterwards would be an error."""
    pid, terminal = pty.fork()
    if pid == 0:
        # Ignored where the tests themselves were started by nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-c", SAVES, str(tmp_path), "0"])
    wait_for(tmp_path / "listens")
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0 and (tmp_path / "saved").read_text() == "SIGHUP"


def test_one_that_was_started_by_nohup_goes_on(tmp_path: Path) -> None:
    ignores = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    program = [sys.executable, "-c", SAVES, str(tmp_path), "60"]
    with subprocess.Popen(
        program, preexec_fn=ignores, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_for(tmp_path / "listens")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGUSR1)
        wait_for(tmp_path / "saved")
        assert (tmp_path / "saved").read_text() == "SIGUSR1"
        process.send_signal(signal.SIGTERM)  # all is saved: it must not end with -15
        time.sleep(0.2)
        assert process.poll() is None
        process.kill()


def test_a_request_to_stop_is_heeded_while_no_engine_serves() -> None:
    """One that is not the run's own may be gone for hours."""
    take_note(signal.SIGTERM, None)
    engines = EnginePool.__new__(EnginePool)
    engines.failure = None
    engines._causes = []
    engines._noted_failures = {}
    engines._released = set()
    gone = EngineStatus("http://node:1", "starting", 1, 1, "gone")
    engines._placement = SimpleNamespace(engines=lambda: [gone], is_external=True)  # type: ignore[assignment]
    assert on_threads(1, engines.wait_for_one) == [False]
    assert str(engines.failure).startswith(
        "SIGTERM arrived while no engine was serving; the last step is saved: start the same"
    )

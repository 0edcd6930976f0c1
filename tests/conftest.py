"""Settings of every test: one thread a process, and the test helpers importable by name."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from slices import ONE_ENGINE, SLICE, in_order

from vapo_megatron import signals
from vapo_megatron.signals import STOP_SIGNALS

# Ranks that a test forks never collect what it left: a process group's end waits for threads that
# they do not have.
os.register_at_fork(after_in_child=gc.freeze)

pytest_plugins = ["engine_server", "stand_ins"]


# Imports make half a million objects, hardly any of them garbage.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Has the garbage collector pass over all that imports have made."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; otherwise in the order of the folders. Of a slice, its files alone."""
    left_out = in_order(items, os.environ.get(SLICE) or None)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Has --dist loadfile give the files of ONE_ENGINE to one worker, as if they were one file."""
    from xdist.scheduler import LoadFileScheduling

    class OneEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "one engine" if file.endswith(ONE_ENGINE) else file

    return OneEngine(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def stop_signals_as_before() -> Iterator[None]:
    """A command that ends in the test's own process ignores stop signals from then on, as do all it
    starts."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    signals._received.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


# In seconds since 1970, from the environment: no test begins after it (.ci/run).
END_AT = "TESTS_END_AT"
OUT_OF_TIME = "not run: the time of this run is over"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out the tests that are left once the time of the run is over."""
    if END_AT in os.environ and time.time() > float(os.environ[END_AT]):
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were left out for that reason: they have not passed."""
    skipped = terminalreporter.stats.get("skipped", ())
    late = sum(OUT_OF_TIME in str(report.longrepr) for report in skipped)
    if late:
        terminalreporter.write_line(
            f"{late} TESTS WERE NOT RUN: this machine is too slow for the time of this run"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the whole test run."""
    parser.addoption(
        "--require-slurm",
        action="store_true",
        help="fail, rather than skip, where there can be no Slurm",
    )
    parser.addoption(
        "--require-browser", action="store_true", help="fail, rather than skip, without Chromium"
    )


@pytest.fixture(scope="session")
def browse(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """A page after its scripts have run, as HTML. Without a browser it skips, or fails under
    --require-browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        if request.config.getoption("--require-browser"):
            pytest.fail("no Chromium")
        pytest.skip("no Chromium")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        "--virtual-time-budget=3000",
    ]
    flags.append(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")

    def dump(address: str) -> str:
        command = [browser, *flags, "--dump-dom", address]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120)
        shown = found.stdout
        assert "<body" in shown, found.stderr
        return shown

    return dump

"""Settings of every test: one thread a process, and the test helpers importable by name."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest

from vapo_megatron import signals
from vapo_megatron.signals import STOP_SIGNALS

# Ranks that a test forks never collect what it left: a process group's end waits for threads that
# they do not have.
os.register_at_fork(after_in_child=gc.freeze)

pytest_plugins = ["engine_server", "stand_ins"]

# Files whose tests use the engine of engine_server.py: one worker runs them all, and starts it
# once.
ONE_ENGINE = ("test_weight_sync.py", "test_episodes.py", "test_rollout_engine.py")
# Files that take a quarter of a minute and more, the longest first: begun at last, one would keep a
# worker after the others.
LONGEST = (
    "test_slurm_stories.py",
    "test_smollm_gates.py",
    "test_asynchronous.py",
    "test_gsm8k_two_steps.py",
    "test_gpu_suite.py",
    "test_invariance_full.py",
    "test_fault_soak.py",
    "test_distillation_example.py",
    "test_quickstart_one_gpu.py",
    "test_resume.py",
    *ONE_ENGINE,
    "test_train_command.py",
    "test_invariance.py",
    "test_step_switches.py",
    "test_watchdog.py",
    "test_dist_saver.py",
    "test_convert.py",
)


# From the environment, such as 2/3: the second of three parts of the files, about equally long.
SLICE = "TESTS_SLICE"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; otherwise in the order of the folders. Of a slice, its files alone."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if SLICE not in os.environ:
        return
    number, _, of = os.environ[SLICE].partition("/")

    def slice_of(item: pytest.Item) -> int:
        # The long ones in turn
        name = item.path.name
        return places.get(name, zlib.crc32(name.encode())) % int(of) + 1

    left_out = [item for item in items if slice_of(item) != int(number)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if slice_of(item) == int(number)]


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

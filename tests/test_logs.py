"""The log: one format with time, rank and phase, no more than the level asks for, on standard
error."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vapo_megatron
from vapo_megatron import logs
from vapo_megatron.monitoring.timers import PhaseTimer

LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) rank (\S+) (\S+): (.+)"
)
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("vapo_megatron")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers = before[0]
    logger.propagate = before[2]
    logger.setLevel(before[1])
    logs.set_rank(0)


def lines(error: str) -> list[tuple[str, ...]]:
    found = [LINE.fullmatch(line) for line in error.splitlines()]
    assert all(found), error
    return [line.groups() for line in found if line]


def test_a_line_has_rank_and_the_innermost_phase(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.LogLevel.DEBUG)
    logs.set_rank(3)
    log = logging.getLogger("vapo_megatron.anywhere")
    timer = PhaseTimer()
    with timer("rollout"):
        with timer("weight_sync"):
            log.info("inner")
        log.warning("outer")
    log.error("after")
    said = lines(capsys.readouterr().err)
    assert [line[1] for line in said] == ["3"] * len(said)
    by_text = {line[3]: (line[0], line[2]) for line in said}
    assert by_text["inner"] == ("INFO", "weight_sync")
    assert by_text["outer"] == ("WARNING", "rollout")
    assert by_text["after"] == ("ERROR", "-")
    assert sum(line[3] == "begins" and line[2] in ("rollout", "weight_sync") for line in said) == 2


def test_level_filters_lower_lines_and_no_line_comes_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(logs.LogLevel.DEBUG)
    logs.configure(logs.LogLevel.WARNING)
    assert logs.configured_level() == logs.LogLevel.WARNING
    log = logging.getLogger("vapo_megatron.anywhere")
    log.info("little")
    log.warning("much")
    assert [line[3] for line in lines(capsys.readouterr().err)] == ["much"]


def test_the_module_is_the_program_and_tells_its_version() -> None:
    def program(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "vapo_megatron", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)

    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"vapo-megatron {vapo_megatron.__version__}\n")
    assert f'version="{vapo_megatron.__version__}"' in (ROOT / "setup.py").read_text(
        encoding="utf-8"
    )
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)", changes, re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == vapo_megatron.__version__
    refused = program("--log-level", "loud", "plan", "x.yaml")
    assert refused.returncode == 2 and "--log-level" in refused.stderr

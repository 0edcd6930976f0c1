"""A run of tests whose time is over leaves the rest out, and says so."""

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


# It imports what engines need, for twenty times as long as the rest takes.
WITHOUT_ENGINES = ("-p", "no:engine_server", "-p", "no:stand_ins")


def test_what_begins_after_the_end_is_left_out_aloud() -> None:
    test = "test_evidence.py"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *WITHOUT_ENGINES,
            str(HERE / test),
        ],
        env={**os.environ, "TESTS_END_AT": str(time.time() - 1)},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "2 TESTS WERE NOT RUN" in done.stdout

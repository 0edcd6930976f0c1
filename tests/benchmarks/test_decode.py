"""The benchmark of decoding finds the overheads that were planted, and runs on a real engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import decode


@pytest.mark.parametrize(
    "constant,each,expected",
    [(2.0, 0.01, ("0.002", "1e-05")), (2.0, -0.001, ("0.0018", "0")), (-0.5, 0.02, ("0", "1.7e-05"))],
)
def test_overheads_are_fitted_and_never_negative(constant: float, each: float, expected: tuple[str, str]) -> None:
    rows = [{"running": running, "beyond ms": constant + each * running} for running in (50, 150, 250)]
    line = decode.fitted(rows)
    assert f"decode_overhead={expected[0]} " in line and f"request_overhead={expected[1]} " in line


@pytest.mark.full
def test_a_real_engine_is_measured_where_its_cache_has_room(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    command = [sys.executable, "-m", "benchmarks.decode", "--shapes", "tiny", "--running", "2", "4", "100000000"]
    done = subprocess.run(
        [*command, "--tokens", "4", "--repeats", "1", "--json", str(out)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["shape"], row["running"]) for row in rows] == [("tiny", 2), ("tiny", 4)]
    for row in rows:
        assert row["context"] == decode.PROMPT + 6
        assert row["step ms"] == pytest.approx(row["work ms"] + row["beyond ms"])
        assert row["tok/s"] == pytest.approx(1e3 * row["running"] / row["step ms"])
    assert "hardware.efficiency.decode_overhead=" in done.stdout

"""The benchmark of decoding finds the overheads that were planted, and runs on a real engine."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import decode


@pytest.mark.parametrize(
    "constant,each,expected",
    [
        (2.0, 0.01, ("0.002", "1e-05")),
        (2.0, -0.001, ("0.0018", "0")),
        (-0.5, 0.02, ("0", "1.7e-05")),
    ],
)
def test_overheads_are_fitted_and_never_negative(
    constant: float, each: float, expected: tuple[str, str]
) -> None:
    rows = [
        {"running": running, "beyond ms": constant + each * running} for running in (50, 150, 250)
    ]
    line = decode.fitted(rows)
    assert f"decode_overhead={expected[0]} " in line and f"request_overhead={expected[1]} " in line


def test_a_step_is_measured_without_prefill_and_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that an engine moves on; no prompt is sent twice."""
    now = [0.0]
    asked = set()

    class Engine:
        async def generate(
            self, prompts: list[list[int]], sampling: list[dict[str, Any]]
        ) -> list[Any]:
            tokens = sampling[0]["max_new_tokens"]
            now[0] += 0.5 + 0.1 * len(prompts) + tokens * 0.001 * len(prompts)
            assert not asked & set(map(tuple, prompts)), "a cache has its prefill"
            asked.update(map(tuple, prompts))
            return [SimpleNamespace(token_ids=range(tokens)) for _ in prompts]

        async def close(self) -> None: ...

    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    given = SimpleNamespace(repeats=2, tokens=16)
    engine: Any = Engine()
    steps = asyncio.run(decode.step_seconds(engine, [2, 8], 1000, given))
    assert steps == pytest.approx([0.002, 0.008])


@pytest.mark.full
def test_a_real_engine_is_measured_where_its_cache_has_room(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.decode",
        "--shapes",
        "tiny",
        "--running",
        "2",
        "4",
        "100000000",
    ]
    done = subprocess.run(
        [*command, "--tokens", "4", "--repeats", "1", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["shape"], row["running"]) for row in rows] == [("tiny", 2), ("tiny", 4)]
    for row in rows:
        assert row["context"] == decode.PROMPT + 6
        assert row["step ms"] == pytest.approx(row["work ms"] + row["beyond ms"])
        assert row["tok/s"] == pytest.approx(1e3 * row["running"] / row["step ms"])
    assert "hardware.efficiency.decode_overhead=" in done.stdout

"""The benchmark of agents measures every turn, and on which processors its work was done."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agents_load

LOAD = ["--episodes", "8", "--turns", "2", "--slots", "4", "--response-s", "0.05"]
AGENT_MS = 40.0


def measured(monkeypatch: pytest.MonkeyPatch, file: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr("sys.argv", ["agents_load", *LOAD, *options, "--json", str(file)])
    agents_load.main()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_every_request_of_the_load_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(2):  # nothing is left of an earlier load
        (row,) = measured(monkeypatch, tmp_path / "load.json")["rows"]
        assert (row["episodes"], row["requests"], row["broken"]) == (8, 16, 0)
        assert 0 < row["unavoidable"] < row["idle"] < 1
        assert row["seconds"] > 16 * 0.05 / 4, "four slots"
        assert 0 < row["loop ms"] + row["agents ms"] < row["all ms"] + 0.1


@pytest.mark.full
def test_processes_take_the_agents_work_off_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--processes", "0", "1", "--agent-ms", "0", str(AGENT_MS), "--repeats", "1")
    found = measured(monkeypatch, tmp_path / "processes.json", *options)
    rows = {(row["agent ms"], row["processes"]): row for row in found["rows"]}
    assert sorted(rows) == [(0, 0), (0, 1), (AGENT_MS, 0), (AGENT_MS, 1)]
    # Milliseconds of a turn are seconds of 1,000 turns
    assert rows[AGENT_MS, 0]["rank 0 s"] >= AGENT_MS > rows[AGENT_MS, 1]["rank 0 s"]
    assert rows[AGENT_MS, 1]["processes' s"] >= AGENT_MS > rows[0, 1]["processes' s"] > 0
    assert rows[0, 0]["processes' s"] < 1, "only their idle threads"
    ratios = {figure["name"]: figure["ratio"] for figure in found["figures"]}
    for agent_ms in (0, 40):
        base, other = (rows[agent_ms, count] for count in (0, 1))
        name = f"an agent of {agent_ms} ms a turn"
        # One round: its ratio is that of the medians
        assert ratios[f"{name}: rank 0's seconds, 0 processes over 1"] == pytest.approx(
            base["rank 0 s"] / other["rank 0 s"]
        )
        assert ratios[f"{name}: turns/s, 1 processes over 0"] == pytest.approx(
            other["turns/s"] / base["turns/s"]
        )

"""The table of a step beside TRL's adds up, whatever the two sides took."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_beside_trl


def test_parts_add_up_and_ratios_are_for_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ours(*_: Any) -> list[dict[str, Any]]:
        step = step_beside_trl.told(tokens=1000, generation=1.0, update=0.5, step=2.0)
        return [step | {"phases": {"rollout": 1.0}}] * 3

    def theirs(_: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
        return [step_beside_trl.told(tokens=2000, generation=3.0, update=1.0, step=5.0)] * 3

    monkeypatch.setattr(step_beside_trl, "make_inputs", lambda *_: None)
    monkeypatch.setattr(step_beside_trl, "ours", ours)
    monkeypatch.setattr(step_beside_trl, "theirs", theirs)
    monkeypatch.setattr(
        "sys.argv", ["step_beside_trl", "--rounds", "1", "--json", str(tmp_path / "step.json")]
    )
    step_beside_trl.main()
    found = json.loads((tmp_path / "step.json").read_text())
    shares = {(row["part"], row["of"]): row["of the step"] for row in found["rows"]}
    for side in ("ours", "TRL"):
        assert sum(
            shares[part, side] for part in ("generation", "update", "rest")
        ) == pytest.approx(1)
    # TRL's 3 s for 2,000 tokens are 1.5 s for our 1,000.
    assert [figure["ratio"] for figure in found["figures"]] == pytest.approx([1.5, 1.0, 1.25])

"""The example of on-policy distillation runs from nothing to its table, in its shortest form."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vapo_megatron.monitoring.metrics import read_metrics

ROOT = Path(__file__).parents[2]


def run(out: Path) -> str:
    short = ("--steps", "1", "--sft-steps", "4", "--responses", "64", "--problems", "8")
    command = [sys.executable, "-m", "examples.distillation.run", *short, "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout[ended.stdout.index("| responses |") :]


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_example_trains_three_ways_and_repeats_nothing(tmp_path: Path) -> None:
    table = run(tmp_path)
    assert table.startswith("| responses | teacher alone | verifier alone | teacher and verifier |")
    assert [row.split(" |")[0] for row in table.splitlines()[2:4]] == ["| 0", "| 64"]
    assert re.search(r"The teacher is right in 0\.\d{3} of its responses", table)
    folder = tmp_path / "seed1"
    for name, reward, teacher in (
        ("teacher_alone", 0, True),
        ("verifier_alone", 1, False),
        ("teacher_and_verifier", 1, True),
    ):
        config = yaml.safe_load((folder / name / "config.yaml").read_text())
        path = str(folder / "teacher" / "hf" / "final" / "actor")
        assert (config["algorithm"]["kl"]["reference_path"] == path) == teacher, name
        assert config["reward"]["correct"] == reward
        # A verifier has nothing to say where every answer of so short a cold start is wrong.
        assert not teacher or read_metrics(folder / name)[-1]["actor/grad_norm"] > 0, name
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    assert run(tmp_path) == table
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")} == written

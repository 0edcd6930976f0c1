"""docs/tour.md runs as it stands, and what it says of the run is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_tour_runs_block_after_block(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 7
    (tmp_path / "tour.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tour.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "length_adaptive 0.28" in found.stdout
    assert len(re.findall(r"^'.*' +value [+-]\d\.\d{3}  advantage [+-]\d\.\d{3}$", found.stdout, re.M)) > 1

"""docs/tour.md runs as written, and its statements about the run hold."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_notebook_is_the_page() -> None:
    notebook = ROOT / "docs" / "tour.ipynb"
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == re.findall(r"^```python\n(.*?)^```", page, re.M | re.S), (
        "python docs/make_notebook.py writes it"
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_tour_runs_block_after_block(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 7
    (tmp_path / "tour.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tour.py"]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=580, env=environment
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "length_adaptive 0.28" in found.stdout
    assert (
        len(re.findall(r"^'.*' +value [+-]\d\.\d{3}  advantage [+-]\d\.\d{3}$", found.stdout, re.M))
        > 1
    )

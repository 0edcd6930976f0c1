"""The figure of explained variance by quarter, and the figures that it is drawn from."""

import json
from pathlib import Path

import pytest

from examples.regression import quarters

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "examples" / "regression" / "measured"


@pytest.mark.parametrize("name", ["quickstart", "smollm_seed21", "smollm_seed41"])
def test_what_is_drawn_stands_in_the_results(name: str) -> None:
    page = (ROOT / "results" / "critic.md").read_text()
    rows = json.loads((MEASURED / f"{name}.json").read_text())["rows"]
    assert len(rows) == 7
    for row in rows.values():
        explained = f"{row['mean']:.3f} ± {row['margin']:.3f}"
        shares = " ".join(f"{share:.2f}" for share in row["quarters"])
        assert explained in page and f" {shares} |" in page


def test_each_report_is_a_panel(tmp_path: Path) -> None:
    image = tmp_path / "images" / "figure.png"
    file = MEASURED / "quickstart.json"
    quarters.main([f"one={file}", f"two={file}", "--image", str(image)])
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_report_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        quarters.main([f"one={tmp_path / 'missing.json'}", "--image", str(tmp_path / "x.png")])
    assert ended.value.code == 2 and "missing.json: expected TITLE=FILE" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()

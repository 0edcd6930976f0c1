"""docs/evidence.md has a row for every example and preset, at a level that the page explains."""

import re
from pathlib import Path

from vapo_megatron.cli import PRESETS

ROOT = Path(__file__).parents[1]
LEVELS = (
    "parses",
    "trains in CI",
    "learns",
    "learns, pretrained",
    "three seeds, pretrained",
)


def rows(title: str) -> dict[str, str]:
    """Name and level of each row of a section's table."""
    text = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w[\w.]*)` \| ([^|]+) \|", section, re.MULTILINE)
    assert len(dict(found)) == len(found), "a name stands twice"
    return dict(found)


def test_every_preset_and_every_example_has_a_row() -> None:
    presets = {path.stem for path in PRESETS.glob("*.yaml")}
    assert rows("Presets").keys() == presets
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert rows("Examples").keys() == folders - {"__pycache__"}


def test_every_level_is_one_that_the_page_explains() -> None:
    text = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE) == list(LEVELS)
    for title in ("Examples", "Presets"):
        for name, level in rows(title).items():
            stated = (
                level == known or level.startswith((f"{known}:", f"{known},")) for known in LEVELS
            )
            assert any(stated), f"{name}: {level}"

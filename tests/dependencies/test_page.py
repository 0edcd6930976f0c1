"""docs/dependencies.md names tests that exist, and every test of this folder."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    rows = [line for line in PAGE.splitlines() if "tests/" in line and line.startswith("|")]
    assert rows
    for row in rows:
        file = re.search(r"tests/[a-z_/0-9]+\.py", row)
        assert file, row
        content = (ROOT / file[0]).read_text(encoding="utf-8")
        assert all(f"def {name}(" in content for name in re.findall(r"::(test_\w+)", row)), row


def test_every_test_file_of_this_folder_is_named() -> None:
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert all(f"tests/dependencies/{name}" in PAGE for name in files)

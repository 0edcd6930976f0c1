"""A file is whole or as it was."""

from pathlib import Path

import pytest

from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write("old")
    with pytest.raises(KeyError), atomic_write(path) as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_bad_input(tmp_path: Path) -> None:
    with (
        pytest.raises(BadInput, match=r"file: cannot be written \(No space left"),
        atomic_write(tmp_path / "file"),
    ):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []

"""A model directory gets its name once all of it is on the disk, and none loses its name for
another."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_models import write_model

from vapo_megatron import files
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_megatron.weights.hf_writer import new_directory


def ignore(stage: str, total: int) -> Callable[[int], None]:
    """No progress bar."""
    return lambda nbytes: None


def test_every_file_of_a_conversion_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model", "qwen3")
    synced = set[tuple[int, int]]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced.add((status.st_dev, status.st_ino))

    monkeypatch.setattr(os, "fsync", noted)
    hf_to_megatron(source, tmp_path / "megatron", ignore)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", ignore)
    made = [path for name in ("megatron", "hf") for path in (tmp_path / name).rglob("*")]
    assert {"common.pt", "metadata.json", "config.json"} <= {path.name for path in made}
    status = {path.name: path.stat() for path in made}
    assert [name for name, s in status.items() if (s.st_dev, s.st_ino) not in synced] == []


def _write(target: Path, content: str) -> None:
    with new_directory(target) as folder:
        (folder / "config.json").write_text(content)


def test_a_directory_has_its_name_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    _write(target, "old")

    def moved(name: str) -> Callable[..., None]:
        def refuse(*_: object) -> None:
            raise AssertionError(f"{name} takes the name away from the old one for an instant")

        return refuse

    monkeypatch.setattr(os, "replace", moved("os.replace"))
    monkeypatch.setattr(Path, "rename", moved("Path.rename"))
    _write(target, "new")
    assert (target / "config.json").read_text() == "new" and [*tmp_path.iterdir()] == [target]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_directory_stays_where_it_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """On a file system that cannot swap two names, as NFS and Lustre."""
    target = tmp_path / "model"
    _write(target, "old")
    rename = Path.rename

    def refused(path: Path, new: Path) -> Path:
        if new == target and is_refused and not path.name.endswith(".old"):
            raise OSError(122, "Disk quota exceeded")
        return rename(path, new)

    monkeypatch.setattr(files, "exchanged", lambda *_: False)
    monkeypatch.setattr(Path, "rename", refused)
    if is_refused:
        with pytest.raises(BadInput, match="Disk quota exceeded"):
            _write(target, "new")
    else:
        _write(target, "new")
    kept = "old" if is_refused else "new"
    assert (target / "config.json").read_text() == kept and [*tmp_path.iterdir()] == [target]

"""Whatever happens to a file of a checkpoint is found, and told of by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flip

from vapo_megatron.checkpoint.manifest import (
    PROGRESS_FILE,
    Manifest,
    Progress,
    check_contents,
    check_structure,
    file_facts,
    needed_files,
    read_manifest,
    read_progress,
)
from vapo_megatron.errors import BadInput
from vapo_megatron.weights.hf_writer import write_json


def make_unit(folder: Path, checkpoint_id: str = "u1", step: int = 7) -> Path:
    facts = {}
    for name in ("actor", "critic"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_bytes(bytes([step]) * 200)
        facts |= file_facts(folder, [folder / name / "weights"])
    manifest = Manifest(
        checkpoint_id=checkpoint_id,
        run_id="r",
        step=step,
        kind="train",
        models=("actor", "critic"),
        world_size=1,
        layouts={},
        metrics={},
        files=facts,
    )
    write_json(folder / "manifest.json", manifest.model_dump(mode="json"))
    return folder


def check(checkpoint: Path) -> str | None:
    """Everything that is checked before a checkpoint is loaded."""
    manifest = read_manifest(checkpoint)
    check_structure(checkpoint, manifest)
    return check_contents(checkpoint, needed_files(checkpoint, manifest))


def test_a_whole_unit_passes(tmp_path: Path) -> None:
    assert check(make_unit(tmp_path / "checkpoint")) is None


@pytest.mark.parametrize(
    "harm,message",
    [
        (flip, "the content of progress.json has changed since it was saved"),
        (lambda path: path.unlink(), "progress.json cannot be read"),
    ],
)
def test_progress_is_read_as_it_was_saved_or_not_at_all(
    tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    checkpoint = make_unit(tmp_path / "checkpoint")
    path = checkpoint / PROGRESS_FILE
    saved = Progress(step=7, prompts={"cursor": 28}, weight_version=8)
    write_json(path, saved.model_dump(mode="json"))
    manifest = read_manifest(checkpoint)
    with pytest.raises(
        BadInput,
        match=r"checkpoint: its manifest knows no progress\.json: the checkpoint is damaged",
    ):
        read_progress(checkpoint, manifest)
    manifest = manifest.model_copy(
        update={"files": manifest.files | file_facts(checkpoint, [path])}
    )
    assert read_progress(checkpoint, manifest) == saved
    harm(path)
    with pytest.raises(BadInput, match=message):
        read_progress(checkpoint, manifest)


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    checkpoint = make_unit(tmp_path / "checkpoint")
    flip(checkpoint / "critic" / "weights")
    assert "critic/weights has changed" in str(check(checkpoint))


@pytest.mark.parametrize(
    "harm,message",
    [
        (
            lambda checkpoint: (checkpoint / "actor" / "weights").write_bytes(b"x"),
            "actor/weights has 1 bytes, its manifest says 200",
        ),
        (
            lambda checkpoint: (checkpoint / "critic" / "weights").unlink(),
            "critic/weights is missing",
        ),
        (lambda checkpoint: (checkpoint / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda checkpoint: (checkpoint / "manifest.json").write_text("{"), "manifest.json"),
        (
            lambda checkpoint: (checkpoint / "manifest.json").write_text('{"step": 1}'),
            "manifest.json: checkpoint_id: Field required",
        ),
    ],
)
def test_damage_is_named_with_the_unit_and_what_to_do(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    checkpoint = make_unit(tmp_path / "step_000007")
    harm(checkpoint)
    with pytest.raises(BadInput) as raised:
        check(checkpoint)
    text = str(raised.value)
    assert (
        text.startswith(str(checkpoint))
        and message in text
        and "delete this folder" in text
        and "\n" not in text
    )


def test_halves_of_two_units_are_not_mixed(tmp_path: Path) -> None:
    checkpoint = make_unit(tmp_path / "checkpoint")
    other = make_unit(tmp_path / "other", "u2", step=3)
    shutil.rmtree(checkpoint / "critic")
    (other / "critic").rename(checkpoint / "critic")
    assert "the content of critic/weights has changed since it was saved" in str(check(checkpoint))


@pytest.mark.parametrize("number", [2, 4])
def test_another_format_is_refused_as_such(tmp_path: Path, number: int) -> None:
    checkpoint = make_unit(tmp_path / "checkpoint")
    content = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"format": number}))
    with pytest.raises(
        BadInput,
        match=f"format {number}, this version reads format 3: continue with the version of",
    ):
        check(checkpoint)


def test_a_file_that_the_manifest_does_not_know_is_named(tmp_path: Path) -> None:
    checkpoint = make_unit(tmp_path / "checkpoint")
    (checkpoint / "critic" / "more").write_bytes(b"x")
    with pytest.raises(BadInput, match=r"does not know critic/more, which would be loaded"):
        check(checkpoint)


def test_a_checkpoint_of_another_step_than_its_name_is_refused(tmp_path: Path) -> None:
    checkpoint = make_unit(tmp_path / "checkpoints" / "step_000008", step=7)
    with pytest.raises(BadInput, match=r"name says step 8, its manifest 7"):
        check(checkpoint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "manifest.json cannot be read .it is nested too deeply"),
        ('{"format": "3"}', "format '3', this version reads format 3"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    checkpoint = make_unit(tmp_path / "checkpoint")
    (checkpoint / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        check(checkpoint)

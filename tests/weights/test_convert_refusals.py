"""What cannot be converted is named in one line, and nothing is left of it."""

import enum
import io
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import write_model, write_tensors
from ranks import run_ranks
from test_convert import SMALL, Silent
from torch.distributed.checkpoint.metadata import Metadata

from vapo_megatron.errors import BadInput
from vapo_megatron.weights.convert import hf_to_megatron, megatron_to_hf

UP = "model.layers.2.mlp.up_proj.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"


def _drop(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors.__delitem__(UP))


def _add(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors.update(other=torch.ones(1)))


def _mix(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors.update({UP: tensors[UP].double()}))


def _nan(path: Path) -> None:
    write_tensors(path, lambda tensors: tensors[UP][0, 0].fill_(float("nan")))


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _family(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))


def _change_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def _drop_key(path: Path) -> None:
    _change_metadata(path, lambda metadata: metadata.state_dict_metadata.__delitem__(FC1))


def _add_key(path: Path) -> None:
    _change_metadata(path, lambda m: m.state_dict_metadata.update(other=m.state_dict_metadata[FC1]))


def _drop_layer(path: Path) -> None:
    _change_metadata(path, lambda metadata: metadata.state_dict_metadata[FC1].chunks.pop())


def _reshape(path: Path) -> None:
    file = path / "hf" / "config.json"
    config = json.loads(file.read_text())
    config["intermediate_size"] += 1
    file.write_text(json.dumps(config))


def _truncate_part(path: Path) -> None:
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def _drop_part(path: Path) -> None:
    (path / "__1_0.distcp").unlink()


def _overwrite_part(path: Path) -> None:
    file = path / "__1_0.distcp"
    file.write_bytes(b"x" * file.stat().st_size)


def _truncate_metadata(path: Path) -> None:
    file = path / ".metadata"
    file.write_bytes(file.read_bytes()[:100])


def _no_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def _no_card(path: Path) -> None:
    (path / "model.json").unlink()


def _old_card(path: Path) -> None:
    (path / "model.json").write_text('{"format": 0}')


def _no_config(path: Path) -> None:
    (path / "hf" / "config.json").unlink()


def _gone(path: Path) -> None:
    shutil.rmtree(path)


FROM_HF = [
    (_drop, [UP, "is missing"]),
    (_add, ["tensor other is not known"]),
    (_mix, ["float64", "give --dtype"]),
    (_truncate, ["model.safetensors", "truncated"]),
    (_nan, [f"tensor {UP} holds NaN or infinity"]),
    (_family, ["'gpt2', expected one of"]),
    (_gone, ["no such directory"]),
]
FROM_MEGATRON = [
    (_drop_key, [FC1, "is missing"]),
    (_add_key, ["key other is not known"]),
    (_drop_layer, [FC1, "not there in full"]),
    (_reshape, ["has shape", "by hf/config.json"]),
    (_truncate_part, ["__1_0.distcp: truncated"]),
    (_drop_part, ["__1_0.distcp: no such file"]),
    (_overwrite_part, ["damaged"]),
    (_truncate_metadata, [".metadata: truncated"]),
    (_no_metadata, [".metadata: no such file"]),
    (_no_card, ["model.json: no such file"]),
    (_old_card, ["model.json: format 0, expected 1"]),
    (_no_config, ["config.json: no such file"]),
    (_gone, ["no such directory"]),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory and its checkpoint."""
    root = tmp_path_factory.mktemp("sound")
    source = write_model(root / "hf", "qwen2")
    hf_to_megatron(source, root / "megatron", Silent(), shard_bytes=SMALL)
    return source, root / "megatron"


@pytest.mark.parametrize(("damage", "told"), FROM_HF, ids=lambda x: getattr(x, "__name__", ""))
def test_a_damaged_directory_is_refused(
    sound: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], None], told: list[str]
) -> None:
    assert_refused(sound[0], tmp_path, damage, told, hf_to_megatron)


@pytest.mark.parametrize(
    ("damage", "told"), FROM_MEGATRON, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_damaged_checkpoint_is_refused(
    sound: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], None], told: list[str]
) -> None:
    assert_refused(sound[1], tmp_path, damage, told, megatron_to_hf)


def assert_refused(
    sound: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    told: list[str],
    convert: Callable[..., object],
) -> None:
    source = tmp_path / "source"
    shutil.copytree(sound, source)
    damage(source)
    with pytest.raises(BadInput) as error:
        convert(source, tmp_path / "out", Silent())
    message = str(error.value)
    assert all(part in message for part in (*told, str(source))), message
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir() if path != source] == []


@pytest.mark.parametrize("convert", [hf_to_megatron, megatron_to_hf])
def test_what_is_there_already_is_left_alone(
    sound: tuple[Path, Path], tmp_path: Path, convert: Callable[..., object]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BadInput, match="exists already"):
        convert(sound[convert is megatron_to_hf], out, Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_do_not_write_the_same_directory(sound: tuple[Path, Path], tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "work").write_text("of the other")
    with pytest.raises(BadInput, match="another process is writing it"):
        hf_to_megatron(sound[0], tmp_path / "out", Silent())
    assert (partial / "work").read_text() == "of the other"


def on_a_full_disk(source: Path, out: Path, to_hf: bool) -> str:
    # No file of this process may grow further: what a full disk does to a writer, for anyone.
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    with pytest.raises(BadInput) as error:
        (megatron_to_hf if to_hf else hf_to_megatron)(source, out, Silent(), shard_bytes=80_000)
    return str(error.value)


@pytest.mark.parametrize("to_hf", [False, True])
def test_a_full_disk_leaves_nothing(sound: tuple[Path, Path], tmp_path: Path, to_hf: bool) -> None:
    out = tmp_path / "out"
    (message,) = run_ranks(1, on_a_full_disk, sound[to_hf], out, to_hf)
    assert message.startswith(f"{out}: cannot be written (")
    assert "\n" not in message
    assert not list(tmp_path.iterdir())


class _RunsCode:
    """Pickled, it asks whoever unpickles it to make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_checkpoints_metadata_runs_no_code(sound: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(sound[1], folder)
    made = tmp_path / "made by a pickle"
    _change_metadata(folder, lambda m: m.state_dict_metadata.update(other=_RunsCode(made)))
    with pytest.raises(BadInput, match=r"\.metadata: .*names posix\.mkdir"):
        megatron_to_hf(folder, tmp_path / "hf", Silent())
    assert not made.exists()


class _AsPython311(pickle.Pickler):
    """Python 3.11.0 to 3.11.3, Debian 12's among them, write members of enumerations so."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


class _Looks:
    """Pickled, it asks whoever unpickles it for an attribute of what is no enumeration."""

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (Metadata, "__init__")


def test_metadata_of_an_older_python_is_read(sound: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(sound[1], folder)
    written = io.BytesIO()
    _AsPython311(written).dump(pickle.loads((folder / ".metadata").read_bytes()))
    assert b"getattr" in written.getvalue()
    (folder / ".metadata").write_bytes(written.getvalue())
    megatron_to_hf(folder, tmp_path / "hf", Silent())
    megatron_to_hf(sound[1], tmp_path / "same", Silent())
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


def test_metadata_takes_attributes_of_enumerations_alone(
    sound: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(sound[1], folder)
    _change_metadata(folder, lambda m: m.state_dict_metadata.update(other=_Looks()))
    with pytest.raises(BadInput, match=r"\.metadata: .*'__init__' of .*is no member of it"):
        megatron_to_hf(folder, tmp_path / "hf", Silent())

from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.data import FieldNames
from vapo_megatron.config.hub import (
    hub_files,
    hub_hint,
    repository_of,
    with_models_from_hub,
)
from vapo_megatron.config.load import load_config
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.data.rows import read_problems
from vapo_megatron.errors import BadInput

COMMIT = "a" * 40


def _repository(hub_cache: Path, folder: str, revision: str) -> Path:
    """An empty repository in the cache, as a download leaves it; its files' folder."""
    ref = hub_cache / folder / "refs" / revision
    ref.parent.mkdir(parents=True)
    ref.write_text(COMMIT)
    snapshot = hub_cache / folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def _shard(folder: Path, number: int, rows: list[dict[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{number:04}.parquet")


def test_hub_dataset_is_read_over_all_files_below_a_path(
    hub_cache: Path,
) -> None:
    snapshot = _repository(hub_cache, "datasets--some--sums", "main")
    _shard(snapshot / "main" / "train", 1, [{"question": "c", "answer": "3"}])
    _shard(
        snapshot / "main" / "train",
        0,
        [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}],
    )
    _shard(snapshot / "main" / "test", 0, [{"question": "t", "answer": "9"}])
    fields = FieldNames(problem="question")
    problems = read_problems(Path("hub:some/sums"), fields)
    assert [(p.problem, p.answer, p.id) for p in problems] == [
        ("a", "1", "sums:1"),
        ("b", "2", "sums:2"),
        ("c", "3", "sums:3"),
    ]
    pinned = read_problems(Path("hub:some/sums@main:main/test"), fields)
    assert [problem.problem for problem in pinned] == ["t"]
    with pytest.raises(
        BadInput, match=r"hub:some/sums:1: no field 'problem' among answer, question"
    ):
        read_problems(Path("hub:some/sums"), FieldNames())
    _shard(snapshot / "other" / "train", 0, [{"question": "x", "answer": "0"}])
    assert [problem.problem for problem in read_problems(Path("hub:some/sums"), fields)] == [
        "a",
        "b",
        "c",
    ], "main"
    assert len(read_problems(Path("hub:some/sums:other/train"), fields)) == 1
    with pytest.raises(
        BadInput,
        match=r"data\.train: hub:some/sums:train: its files lie in main/train, other/train",
    ):
        read_problems(Path("hub:some/sums:train"), fields, key="data.train")
    _shard(snapshot / "default" / "train", 0, [{"question": "y", "answer": "0"}])
    with pytest.raises(
        BadInput, match=r"its files lie in default/train, main/train, other/train; name one"
    ):
        read_problems(Path("hub:some/sums"), fields)


def test_a_model_of_the_hub_becomes_its_folder_here(hub_cache: Path) -> None:
    snapshot = _repository(hub_cache, "models--some--model", "main")
    config = load_config(SftConfig, None, ["model.path=hub:some/model", "data.path=x"], PRESETS)
    assert config.model.path == str(snapshot)
    values = {
        "algorithm": {"kl": {"reference_path": "hub:some/model@main"}},
        "critic": {"model_path": "elsewhere"},
    }
    with_models_from_hub(values)
    assert values == {
        "algorithm": {"kl": {"reference_path": str(snapshot)}},
        "critic": {"model_path": "elsewhere"},
    }


@pytest.mark.parametrize("name", ["hub:nobody/nothing", "hub:nobody", "hub:a/b/c"])
def test_what_cannot_be_had_is_refused_by_name(hub_cache: Path, name: str) -> None:
    with pytest.raises(BadInput, match=rf"^data\.train: {name}: "):
        read_problems(Path(name), FieldNames(), key="data.train")
    with pytest.raises(BadInput, match=rf"^model\.path: {name}: "):
        load_config(SftConfig, None, [f"model.path={name}", "data.path=x"], PRESETS)


def line(*name_and_key: str) -> str:
    with pytest.raises(BadInput) as refused:
        hub_files(*name_and_key)
    return str(refused.value)


def test_files_that_are_not_there_are_told_with_those_that_are(hub_cache: Path) -> None:
    folder = _repository(hub_cache, "datasets--some--sums", "main")
    assert line("hub:some/sums", "data.train") == (
        "data.train: hub:some/sums: no file among its .parquet and .json ones (none); name an "
        "existing one"
    )
    for number in range(9):
        _shard(folder / "all", number, [{"question": "a"}])
    (folder / "all" / "README.md").touch()
    listed = ", ".join(f"all/000{number}.parquet" for number in range(8))
    assert line("hub:some/sums:test") == (
        f"hub:some/sums:test: no file of test among its .parquet and .json ones ({listed}); name "
        "an existing one"
    )
    assert hub_files("hub:some/sums") == [
        folder / "all" / f"000{number}.parquet" for number in range(9)
    ]
    for name in ("zoo.json", "b.jsonl.gz", "c.jsonl"):
        (folder / "all" / name).touch()
    found = [path.name for path in hub_files("hub:some/sums")][-3:]
    assert found == ["b.jsonl.gz", "c.jsonl", "zoo.json"]


def test_of_several_folders_the_usual_one_is_read(hub_cache: Path) -> None:
    folder = _repository(hub_cache, "datasets--some--sums", "main")
    for part in ("default/train", "other/train"):
        _shard(folder / part, 0, [{"question": "a"}])
    assert hub_files("hub:some/sums") == [folder / "default" / "train" / "0000.parquet"]
    assert line("hub:some/sums:train", "data.train") == (
        "data.train: hub:some/sums:train: its files lie in default/train, other/train; name one, "
        "as hub:some/sums:default/train"
    )


def test_a_revision_is_read_where_one_is_named(hub_cache: Path) -> None:
    for kind in ("datasets--some--sums", "models--some--model"):
        _repository(hub_cache, kind, "v1/a")
    folder = hub_cache / "datasets--some--sums" / "snapshots" / COMMIT
    _shard(folder, 0, [{"question": "a"}])
    assert hub_files("hub:some/sums@v1/a") == [folder / "0000.parquet"]
    values = {"model": {"path": "hub:some/model@v1/a"}}
    with_models_from_hub(values)
    assert values["model"]["path"].endswith(f"models--some--model/snapshots/{COMMIT}")
    assert "cannot be downloaded" in line("hub:some/sums")
    with pytest.raises(BadInput, match="cannot be downloaded"):
        with_models_from_hub({"model": {"path": "hub:some/model"}})


def test_only_what_is_read_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(*names: Any, **settings: Any) -> str:
        asked.append((*names, settings))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "train.jsonl").touch()
    hub_files("hub:some/sums@v1:train")
    with_models_from_hub({"model": {"path": "hub:some/model"}, "critic": None})
    rows = ["*.parquet", "*.jsonl", "*.jsonl.gz", "*.json"]
    model = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
    assert asked == [
        ("some/sums", {"repo_type": "dataset", "revision": "v1", "allow_patterns": rows}),
        ("some/model", {"repo_type": "model", "revision": None, "allow_patterns": model}),
    ]


def test_every_model_of_a_config_may_be_on_the_hub(hub_cache: Path) -> None:
    folder = str(_repository(hub_cache, "models--some--model", "main"))
    values: dict[str, Any] = {
        "model": {"path": "hub:some/model"},
        "critic": {"model_path": "hub:some/model", "init_path": "hub:some/model"},
        "algorithm": {"kl": {"reference_path": "hub:some/model"}},
        "data": {"train": "hub:some/model"},
    }
    with_models_from_hub(values)
    assert values == {
        "model": {"path": folder},
        "critic": {"model_path": folder, "init_path": folder},
        "algorithm": {"kl": {"reference_path": folder}},
        "data": {"train": "hub:some/model"},
    }
    strange: dict[str, Any] = {"model": "hub:some/model", "critic": {"model_path": 3}}
    with_models_from_hub(strange)
    assert strange == {"model": "hub:some/model", "critic": {"model_path": 3}}
    part = {"algorithm": {"kl": {"reference_path": "hub:some/model"}}}
    with_models_from_hub(part)
    assert part == {"algorithm": {"kl": {"reference_path": folder}}}


def test_what_cannot_be_downloaded_says_how_to_have_it(hub_cache: Path) -> None:
    told = line("hub:no/data", "data.train")
    assert told.startswith("data.train: hub:no/data: cannot be downloaded (LocalEntryNotFoundErr")
    assert told.endswith(
        "); check the name, or run `hf download --repo-type dataset no/data` on a machine with "
        "network and set HF_HOME to its cache"
    )
    with pytest.raises(BadInput) as refused:
        with_models_from_hub({"critic": {"init_path": "hub:no/model"}})
    assert str(refused.value).startswith("critic.init_path: hub:no/model: cannot be downloaded (")
    assert "or run `hf download no/model` on a" in str(refused.value)
    with pytest.raises(BadInput) as refused:
        with_models_from_hub({"model": {"path": "hub:model"}})
    assert str(refused.value) == (
        "model.path: hub:model: expected hub:OWNER/NAME@REVISION, of a data set "
        "hub:OWNER/NAME@REVISION:PART"
    )


HERE = " (of the Hugging Face Hub: hub:org/name)"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("org/name", HERE),
        ("org/name-1.5B", " (of the Hugging Face Hub: hub:org/name-1.5B)"),
        ("https:/huggingface.co/org/name", HERE),
        ("http://huggingface.co/org/name", HERE),
        ("https:/hf.co/org/name", HERE),
        ("hf.co/org/name/tree/main", HERE),
        ("https:/huggingface.co/datasets/org/name", HERE),
        ("https:/huggingface.co/datasets/org/name/tree/main", HERE),
        ("https:/huggingface.co/org/name.json", " (of the Hugging Face Hub: hub:org/name.json)"),
        ("https:/huggingface.co/models/name", " (of the Hugging Face Hub: hub:models/name)"),
        ("https:/elsewhere.org/org/name", ""),
        ("name", ""),
        ("/org/name", ""),
        ("./org/name", HERE),
        ("a/org/name", ""),
        ("org/name.json", ""),
        ("org/name.parquet", ""),
        ("data/name", ""),
        ("models/name", ""),
        ("runs/name", ""),
        ("here/name", ""),
    ],
)
def test_a_path_that_looks_like_a_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert hub_hint(Path(path)) == hint


def test_a_repository_to_write_to_has_no_revision() -> None:
    assert repository_of("hub:org/name-1.5B") == "org/name-1.5B"
    for name in ("hub:org/name@main", "hub:org/name:part", "hub:org/name@a:b", "org/name", "hub:a"):
        with pytest.raises(BadInput) as refused:
            repository_of(name)
        assert str(refused.value) == f"{name}: expected hub:OWNER/NAME, without a revision"

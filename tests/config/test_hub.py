from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.data import FieldNames
from vapo_megatron.config.hub import with_models_from_hub
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

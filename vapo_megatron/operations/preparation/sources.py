"""Where problems come from: files of this machine, or a data set of the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vapo_megatron.data.rows import read_file
from vapo_megatron.errors import BadInput

HUB = "hub:"
_READABLE = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json")


def source_files(source: str) -> list[Path]:
    """The files of a source: a path, or hub:ORG/NAME[@REVISION][:SPLIT], which is downloaded.

    Of a hub data set those files are taken whose path names the split; without one those that name train, if there are
    any, else all.

    Raises:
        BadInput: it cannot be downloaded, or holds no such file.
    """
    if not source.startswith(HUB):
        return [Path(source)]
    place, _, split = source.removeprefix(HUB).partition(":")
    repository, _, revision = place.partition("@")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                repository, repo_type="dataset", revision=revision or None, allow_patterns=list(_READABLE)
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"{source}: cannot be downloaded ({reason}); on a machine with network run `hf download --repo-type "
            f"dataset {repository}`, bring its files here and give their paths"
        ) from None
    found = sorted({path for pattern in _READABLE for path in folder.rglob(pattern)})
    named = [path for path in found if (split or "train") in str(path.relative_to(folder))]
    chosen = named or ([] if split else found)
    if not chosen:
        names = ", ".join(str(path.relative_to(folder)) for path in found[:8]) or "none"
        wanted = f"no file of split {split}" if split else "no file"
        raise BadInput(f"{source}: {wanted} among its .parquet and .json ones ({names}); name a split that is there")
    return chosen


def source_rows(source: str) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """(file, number of the row from 1, row) of every row of a source.

    Raises:
        BadInput: see source_files and experience.rows.read_file.
    """
    for path in source_files(source):
        for number, row in read_file(path):
            yield path, number, row

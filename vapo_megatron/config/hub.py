"""Downloads models and data sets that a config names on the Hugging Face Hub."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.errors import BadInput, reason_of

HUB = "hub:"
_NAME = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([\w./-]+))?")
_ROWS = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json")
_FILES = {".jsonl", ".json", ".gz", ".parquet", ".csv"}
_USUAL_FOLDERS = {"models", "data", "datasets", "runs", "checkpoints", "outputs"}
_MODEL = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
_MODEL_KEYS = ("model.path", "critic.model_path", "critic.init_path", "algorithm.kl.reference_path")


def hub_files(name: str, key: str = "") -> list[Path]:
    """The files of a data set, hub:OWNER/NAME[@REVISION][:PART], sorted by path, which is the order
    of shards.

    Those whose path holds PART, such as test or main/train; without it those that name train, if
    there are any, else all, and of several folders those in the only one named main or default.

    Raises:
        BadInput: it cannot be downloaded, or holds no such file; key names the setting.
    """
    place = f"{key}: " if key else ""
    repository, revision, part = _parts(name, place)
    folder = _snapshot(name, place, repository, "dataset", revision, _ROWS)
    paths = {
        path: str(path.relative_to(folder))
        for pattern in _ROWS
        for path in sorted(folder.rglob(pattern))
    }
    named = [path for path, inside in paths.items() if (part or "train") in inside]
    chosen = named or ([] if part else list(paths))
    if not chosen:
        names = ", ".join(list(paths.values())[:8]) or "none"
        if part:
            lacking = f"no file of {part}"
        else:
            lacking = "no file"
        raise BadInput(
            f"{place}{name}: {lacking} among its .parquet and .json ones ({names}); name an "
            "existing one"
        )
    folders = sorted({str(path.parent.relative_to(folder)) for path in chosen})
    usual = [
        parent for parent in folders if not part and {"main", "default"} & set(Path(parent).parts)
    ]
    if len(folders) > 1 and len(usual) != 1:
        raise BadInput(
            f"{place}{name}: its files lie in {', '.join(folders)}; name one, as "
            f"{HUB}{repository}:{folders[0]}"
        )
    return sorted(path for path in chosen if path.is_relative_to(folder.joinpath(*usual)))


def hub_hint(path: Path) -> str:
    """For a path that does not exist and looks like a name or URL of the Hub: how to write it; else
    empty."""
    text = re.sub(r"^https?:/+", "", str(path))
    is_url = text.startswith(("huggingface.co/", "hf.co/"))
    name = text.partition("/")[2].removeprefix("datasets/") if is_url else text
    name = "/".join(name.split("/")[:2]) if is_url else name
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return ""
    parent = Path(name).parent
    if not is_url and (
        Path(name).suffix in _FILES or parent.is_dir() or parent.name in _USUAL_FOLDERS
    ):
        return ""
    return f" (of the Hugging Face Hub: {HUB}{name})"


def repository_of(name: str) -> str:
    """OWNER/NAME of hub:OWNER/NAME, a place to write to. Raises BadInput for anything else."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] or match[3]:
        raise BadInput(f"{name}: expected hub:OWNER/NAME, without a revision")
    return match[1]


def with_models_from_hub(values: Any) -> None:
    """Replace hub:OWNER/NAME[@REVISION] in a config's values by the downloaded model's directory,
    in place.

    A model is downloaded once: other processes wait for the lock of the first. Raises BadInput.
    """
    for key in _MODEL_KEYS:
        *sections, last = key.split(".")
        parent = values
        for section in sections:
            parent = parent.get(section) if isinstance(parent, dict) else None
        if not isinstance(parent, dict):
            continue
        name = parent.get(last)
        if isinstance(name, str) and name.startswith(HUB):
            repository, revision, _ = _parts(name, f"{key}: ")
            folder = _snapshot(name, f"{key}: ", repository, "model", revision, _MODEL)
            parent[last] = str(folder)


def _parts(name: str, place: str) -> tuple[str, str | None, str | None]:
    if (match := _NAME.fullmatch(name)) is None:
        raise BadInput(
            f"{place}{name}: expected hub:OWNER/NAME@REVISION, of a data set "
            "hub:OWNER/NAME@REVISION:PART"
        )
    return match[1], match[2], match[3]


def _snapshot(
    name: str, place: str, repository: str, kind: str, revision: str | None, patterns: Sequence[str]
) -> Path:
    import httpx
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=list(patterns)
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        if kind == "dataset":
            option = "--repo-type dataset "
        else:
            option = ""
        raise BadInput(
            f"{place}{name}: cannot be downloaded ({reason_of(error)[:200]}); check the name, or "
            f"run `hf download {option}{repository}` on a machine with network and set HF_HOME to "
            "its cache"
        ) from None
    return Path(folder)

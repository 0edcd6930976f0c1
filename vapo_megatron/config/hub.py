"""Models and data sets that a config names on the Hugging Face Hub, as files of its cache here."""

import re
from pathlib import Path
from typing import Any

from vapo_megatron.errors import BadInput, reason_of

HUB = "hub:"
_NAME = re.compile(r"hub:([\w.-]+/[\w.-]+?)(?::([\w.-]+)(?:/([\w.-]+))?)?(?:@([\w./-]+))?")
# Where the Hub keeps every public data set as CONFIG/SPLIT/NUMBER.parquet.
_PARQUET = "refs/convert/parquet"
_MODEL_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt")
_MODEL_KEYS = (("model", "path"), ("critic", "model_path"), ("critic", "init_path"))


def hub_rows(name: str, key: str) -> list[Path]:
    """The parquet files of hub:OWNER/NAME[:CONFIG[/SPLIT]][@REVISION], in their order; without SPLIT that of training.

    Raises BadInput naming the key of the config where they cannot be had.
    """
    repository, config, split, revision = _parts(name, key)
    folder = f"{config or '*'}/{split or 'train'}"
    root = _snapshot(name, key, repository, "dataset", revision or _PARQUET, [f"{folder}/*.parquet"])
    files = sorted(root.glob(f"{folder}/*.parquet"))
    configs = sorted({file.parent.parent.name for file in files})
    if len(configs) != 1:
        there = f"several configs ({', '.join(configs)})" if configs else f"no {folder}/*.parquet"
        raise BadInput(f"{key}: {name}: {there} on the Hub; name one, such as {HUB}{repository}:CONFIG/SPLIT")
    return files


def with_models_from_hub(values: Any) -> None:
    """Put the folders of models here for hub:OWNER/NAME[@REVISION] into what a config holds, in place.

    A model is downloaded once, whichever process asks first: the others wait for its lock. Raises BadInput.
    """
    for section, key in _MODEL_KEYS:
        held = values.get(section)
        if isinstance(held, dict) and str(name := held.get(key)).startswith(HUB):
            repository, *_, revision = _parts(str(name), f"{section}.{key}")
            folder = _snapshot(str(name), f"{section}.{key}", repository, "model", revision or "main", _MODEL_FILES)
            held[key] = str(folder)


def _parts(name: str, key: str) -> tuple[str, ...]:
    if (match := _NAME.fullmatch(name)) is None:
        raise BadInput(f"{key}: {name}: expected hub:OWNER/NAME@REVISION, of data hub:OWNER/NAME:CONFIG/SPLIT@REVISION")
    return match.groups()


def _snapshot(name: str, key: str, repository: str, kind: str, revision: str, patterns: Any) -> Path:
    import httpx
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=list(patterns)
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        remedy = "check the name and the network, or download it where there is one and set HF_HOME to that cache"
        raise BadInput(f"{key}: {name}: not to be had from the Hub ({reason_of(error)}); {remedy}") from None
    return Path(folder)

"""Reads a model directory without importing torch, which would take longer than the reading."""

import json
from pathlib import Path
from typing import Any

from vapo_megatron.errors import BadInput

CARD_FILE = "model.json"


def read_config(hf_dir: Path, name: str = "config.json") -> dict[str, Any]:
    """config.json of a Hugging Face directory. Raises BadInput where it is missing or not a JSON object."""
    path = hf_dir / name
    if not hf_dir.is_dir():
        raise BadInput(f"{hf_dir}: no such directory; give a Hugging Face model directory ({name}, *.safetensors)")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; {hf_dir} is not a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path}: a {type(config).__name__} was found, expected a JSON object")
    return config


def check_absent(out: Path) -> None:
    """Raises BadInput where the output would overwrite something."""
    if out.exists() or out.is_symlink():
        raise BadInput(f"{out}: exists already; name another place, or remove it")

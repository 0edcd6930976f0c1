"""Reads a model directory without importing torch, which would take longer than the reading."""

import re
from pathlib import Path
from typing import Any

from vapo_megatron.config.hub import hub_hint
from vapo_megatron.errors import BadInput
from vapo_megatron.files import parse_json

CARD_FILE = "model.json"


def _of_a_run(directory: Path) -> str:
    """What to give instead of a folder of a run that holds models in other forms."""
    if (directory / CARD_FILE).is_file():
        return (
            ": it is a checkpoint of training: `vapo-megatron convert-megatron-to-hf --checkpoint "
            f"{directory} --out DIR` makes one of it"
        )
    inside = sorted(path.parent.name for path in directory.glob("*/config.json"))
    return f": give {directory / inside[0]}" if inside else ""


def read_config(hf_dir: Path, name: str = "config.json") -> dict[str, Any]:
    """config.json of a Hugging Face directory. Raises BadInput where it is missing or not a JSON
    object."""
    path = hf_dir / name
    if not hf_dir.is_dir():
        raise BadInput(
            f"{hf_dir}: no such directory; give a Hugging Face model directory ({name}, "
            f"*.safetensors){hub_hint(hf_dir)}"
        )
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"{path}: no such file; {hf_dir} is not a Hugging Face model directory"
            f"{_of_a_run(hf_dir)}"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path}: a {type(config).__name__} was found, expected a JSON object")
    return config


def has_quantised_files(hf_dir: Path) -> bool:
    """Whether a directory holds quantised weights, by its config.json; not where it has none."""
    if not (hf_dir / "config.json").is_file():  # whoever reads the directory says so
        return False
    return read_config(hf_dir).get("quantization_config") is not None


def check_absent(out: Path) -> None:
    """Raises BadInput where the output would overwrite something."""
    if out.exists() or out.is_symlink():
        raise BadInput(f"{out}: exists already; name another place, or remove it")


def family_names() -> list[str]:
    """The model types of all families, read from the text of their modules: to import these takes
    torch."""
    named = re.compile(r'^FAMILY = Family\(\s*"([^"]+)"', re.MULTILINE)
    modules = Path(__file__).parent.glob("*.py")
    texts = (module.read_text(encoding="utf-8") for module in modules)
    return sorted(name for text in texts for name in named.findall(text))

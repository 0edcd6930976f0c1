"""Where a plan reads the sizes of a model; nothing is imported for it."""

from pathlib import Path

from vapo_megatron.errors import BadInput

# The numbers of config.json, as the makers publish them, of models that plans are made for before their weights are
# there; by the last part of their path.
SHIPPED = Path(__file__).parent / "sizes"


def model_directory(path: str) -> Path:
    """Where the config.json of a model is: its own directory, or where that has none what is shipped under its name.

    Raises:
        BadInput: there is no such directory, and none of that name is shipped.
    """
    shipped = SHIPPED / Path(path).name
    if shipped.is_dir() and not (Path(path) / "config.json").exists():
        return shipped
    if not Path(path).exists():
        names = sorted(folder.name for folder in SHIPPED.iterdir())
        raise BadInput(
            f"{path}: no such directory; give a Hugging Face model directory (its config.json is enough), or plan with "
            f"the sizes of a model of the same shape: model.path={'|'.join(names)}"
        )
    return Path(path)

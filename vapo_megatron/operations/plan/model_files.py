"""Where a plan reads the sizes of a model; nothing is imported for it."""

from pathlib import Path

# The numbers of config.json, as the makers publish them, of models that plans are made for before their weights are
# there; by the last part of their path.
SHIPPED = Path(__file__).parent / "sizes"


def model_directory(path: str) -> Path:
    """Where the config.json of a model is: its own directory, or where that has none what is shipped under its name."""
    shipped = SHIPPED / Path(path).name
    return shipped if shipped.is_dir() and not (Path(path) / "config.json").exists() else Path(path)

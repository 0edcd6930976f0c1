"""The directory that an engine is given: of a vision-language model its language model alone, and
config.json as SGLang reads it rightly."""

from pathlib import Path

from vapo_megatron.errors import BadInput
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.registry import engine_config_of, read_spec
from vapo_megatron.models.rotary import BadConfig
from vapo_megatron.weights.hf_writer import CONFIG, write_json


def engine_directory(model: Path, scratch: Path) -> Path:
    """A model directory in the form that is synced: `model` itself, or a folder in `scratch` with
    another config.json and links to all other files. That is the language model's of a
    vision-language model, whose memory and start are then those of the language model. Raises
    BadInput where config.json cannot be used."""
    if not (model / CONFIG).is_file():  # SGLang says so
        return model
    config = read_config(model)
    try:
        read_rightly = engine_config_of(config)
    except BadConfig as error:
        raise BadInput(f"{model / CONFIG}: {error}") from None
    if read_rightly == config:
        return model
    folder = scratch / "model"
    folder.mkdir()
    for path in model.iterdir():
        if path.name != CONFIG:
            (folder / path.name).symlink_to(path.resolve())
    read_rightly["architectures"] = [read_spec(model).causal_lm]
    write_json(folder / CONFIG, read_rightly)
    return folder

"""The directory that an engine is given: what is trained of a model, and config.json as SGLang
reads it rightly."""

from pathlib import Path

from vapo_megatron.errors import BadInput
from vapo_megatron.models.model_files import read_config
from vapo_megatron.models.registry import engine_config_of, family_of
from vapo_megatron.models.rotary import BadConfig
from vapo_megatron.weights.hf_writer import CONFIG, write_json


def engine_directory(model: Path, scratch: Path) -> Path:
    """A model directory in the form that is synced: `model` itself, or a folder in `scratch` with
    another config.json and links to all other files. That is the language model's of a
    vision-language model, whose memory and start are then those of the language model, and the one
    without indexers of a model that has some. Raises BadInput where config.json cannot be used."""
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
    family = family_of(read_rightly)
    if family is not None:
        read_rightly["architectures"] = [family.causal_lm]
    write_json(folder / CONFIG, read_rightly)
    return folder

"""Load a validated config from files and overrides, and write it back to a file.

Layers, each over the one before: the preset (named by the key `preset`), the YAML file named by
the key `extends` of the user's file, if any, the user's YAML file, and overrides of the form
`section.key=value`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from vapo_megatron.config.base import Section, nearest
from vapo_megatron.config.explain import LONGEST_VALUE, explain
from vapo_megatron.config.hub import with_models_from_hub
from vapo_megatron.config.secret_values import refuse_secrets
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write

SectionT = TypeVar("SectionT", bound=Section)


def load_config(
    model: type[SectionT], path: Path | None, overrides: Sequence[str], presets_dir: Path
) -> SectionT:
    """The validated config of type `model`.

    path is the user's YAML (None: overrides alone), overrides are `dotted.key=value` with the value
    read as YAML, presets_dir holds the `<name>.yaml` files that the key `preset` chooses from;
    where `model` has no field of that name the key is dropped. A section that is null takes back
    what the files say of it: the preset's values, or else the defaults, hold again. `extends` is a
    path beside the file that has it; of several files in a row the user's own `preset` counts, or
    else the nearest. OmegaConf interpolations (`${section.key}`) are resolved. Other relative paths
    are kept as they are given.

    Raises BadInput, in one line, for whatever is wrong with any of these; of several wrong values
    it names the first.
    """
    parsed = [_parse_override(override) for override in overrides]
    user = OmegaConf.create({})
    if path is not None:
        user = _read_extended(path)
    _take_back_sections(user, model)
    preset = dict(parsed).get("preset", user.get("preset"))
    below = OmegaConf.create({})
    if preset is not None:
        below = _read_preset(preset, presets_dir)
    config = OmegaConf.merge(below, user)
    assert isinstance(config, DictConfig)
    for key, value in parsed:
        is_taken_back = value is None and _is_section(model, key)
        try:
            if is_taken_back:
                value = OmegaConf.select(below, key, default={})
            OmegaConf.update(config, key, value, merge=not is_taken_back)
        except OmegaConfBaseException as error:
            raise BadInput(f"override {key}={value}: {_one_line(error)}") from error
    if "preset" not in model.model_fields:
        config.pop("preset", None)
    if path is not None:
        source = str(path)
    elif preset is not None:
        source = f"preset {preset}"
    else:
        source = "config"
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise BadInput(f"{source}: {_one_line(error)}") from error
    with_models_from_hub(values)
    refuse_secrets(values, source)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BadInput(explain(error, model, values, source, [key for key, _ in parsed])) from error


def _is_section(model: type[Section], key: str) -> bool:
    name, _, rest = key.partition(".")
    field = model.model_fields.get(name)
    if field is None or not isinstance(field.default, Section):
        return False
    return not rest or _is_section(type(field.default), rest)


def _take_back_sections(config: DictConfig, model: type[Section]) -> None:
    for name, field in model.model_fields.items():
        if isinstance(field.default, Section) and name in config:
            if config[name] is None:
                del config[name]
            elif isinstance(config[name], DictConfig):
                _take_back_sections(config[name], type(field.default))


def dump_config(config: Section, path: Path) -> None:
    """Write every value of `config` as YAML, atomically; load_config reads an equal config from it.

    Raises BadInput where the file cannot be written.
    """
    text = shown_config(config)
    with atomic_write(path) as file:
        file.write(text)


def shown_config(config: Section) -> str:
    """Every value of `config` as YAML."""
    plain = _escape(config.model_dump(mode="json"))
    return str(OmegaConf.to_yaml(OmegaConf.create(plain)))


def _read_extended(path: Path, before: tuple[Path, ...] = ()) -> DictConfig:
    """The file over the one that it extends, over the one that this extends, and so on."""
    config = _read(path)
    resolved = path.resolve()
    if resolved in before:
        raise BadInput(
            f"{path}: extends itself, by way of {before[-1].name}: take one `extends` out"
        )
    if (base := config.pop("extends", None)) is None:
        return config
    if not isinstance(base, str):
        raise BadInput(f"{path}: extends={base!r}; expected the path of one YAML config next to it")
    if not (path.parent / base).is_file():
        raise BadInput(
            f"{path}: extends={base}: no such file next to it; give the path of a YAML config"
        )
    merged = OmegaConf.merge(_read_extended(path.parent / base, (*before, resolved)), config)
    assert isinstance(merged, DictConfig)
    return merged


def _read(path: Path) -> DictConfig:
    try:
        config = OmegaConf.create(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file; give the path of a YAML config") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise BadInput(
            f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read as a YAML config: {_one_line(error)}") from error
    except yaml.MarkedYAMLError as error:
        if error.problem_mark:
            line = f" at line {error.problem_mark.line + 1}"
        else:
            line = ""
        raise BadInput(f"{path}: not valid YAML{line}: {error.problem}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise BadInput(f"{path}: not valid YAML: {_one_line(error)}") from error
    if not isinstance(config, DictConfig):
        raise BadInput(f"{path}: holds a list at its top; expected `key: value` sections")
    return config


def _read_preset(name: object, presets_dir: Path) -> DictConfig:
    names = sorted(file.stem for file in presets_dir.glob("*.yaml"))
    if name not in names:
        guess = nearest(str(name).lower(), names)
        hint = f"expected one of: {', '.join(names) or 'none there'}"
        if guess:
            hint = f"did you mean {guess}?"
        raise BadInput(f"unknown preset {name}; {hint}")
    return _read(presets_dir / f"{name}.yaml")


def _parse_override(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key or not all(part for part in key.split(".")):
        raise BadInput(f"override {override!r} is not of the form section.key=value")
    if any(part.startswith("-") for part in key.split(".")):
        raise BadInput(
            f"override {key}: entries of a list are counted from 0, such as data.eval.0.limit"
        )
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        assert isinstance(parsed, dict)
        return key, parsed["value"] if text else ""
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        if len(text) > LONGEST_VALUE:
            text = text[:LONGEST_VALUE] + "..."
        raise BadInput(
            f"override {key}: {text!r} is not a YAML value; quote it if it is a text"
        ) from error


def _escape(value: Any) -> Any:
    """Keep `${` in texts from being read as an interpolation (a backslash before it; those before
    it are doubled)."""
    if isinstance(value, dict):
        return {key: _escape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escape(entry) for entry in value]
    if isinstance(value, str) and "${" in value:
        pieces = value.split("${")
        for index, piece in enumerate(pieces[:-1]):
            backslashes = len(piece) - len(piece.rstrip("\\"))
            pieces[index] = piece + "\\" * (backslashes + 1)
        return "${".join(pieces)
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

"""Writes docs/configuration.md from the config models and presets."""

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import typer
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.base import Section
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.explain import OTHER_TRAINERS
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.files import atomic_write

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
COMMANDS: dict[str, type[Section]] = {
    "train": TrainConfig,
    "sft": SftConfig,
    "evaluate": EvaluateConfig,
    "plan": PlanConfig,
    "critic": ProbedRunConfig,
}

INTRODUCTION = """\
# Configuration

<!-- Written by tools/describe_config.py from the models in vapo_megatron/config; do not edit. -->

A config is one YAML file. Nearly every training config sets these keys; all others have usable
defaults. Start from [examples/gsm8k/vapo.yaml](../examples/gsm8k/vapo.yaml).
"""
# The keys that a first config sets.
FIRST_KEYS = (
    "preset",
    "run.name",
    "run.steps",
    "run.resume",
    "model.path",
    "model.dtype",
    "actor.layout.tp",
    "critic.layout.tp",
    "actor.max_tokens_per_microbatch",
    "actor.optimizer.lr",
    "critic.optimizer.lr",
    "data.train",
    "data.eval",
    "batch.prompts_per_step",
    "batch.samples_per_prompt",
    "sampling.max_new_tokens",
    "rollout.tp",
    "rollout.mem_fraction_static",
    "reward.verifier",
    "checkpoint.every",
)
LAYERS = """\
## How a config is read

`vapo-megatron train CONFIG [SECTION.KEY=VALUE]...`, and likewise `sft`, `evaluate`, `plan`,
`doctor` and `critic`, merges these layers, later ones over earlier ones:

1. the defaults below;
2. the preset named by the key `preset`: the published settings of an algorithm;
3. the YAML file named by the key `extends`, beside the config;
4. the config itself;
5. overrides, `section.key=value`, with the value read as YAML; `section=null` removes a section
   of the files, so that the preset or the defaults apply again.

```
vapo-megatron train examples/gsm8k/vapo.yaml model.path=models/Qwen2.5-7B-Instruct \\
    actor.layout.tp=4 critic.layout.tp=4 \\
    'actor.optimizer={lr: 1e-6, warmup_steps: 20}' data.eval.0.limit=64
```

- Overriding a section merges into it. Entries of a list are numbered from 0.
- `${section.key}` in a value refers to another value of the file.
- Everything (keys, types, ranges, files, tokenizer, layouts) is checked before any process starts.
  An error is one line with exit code 2; for an unknown key it names the nearest one.
- Relative paths are relative to the working directory.
- The result is written to `config.yaml` in the run directory, which can be used as CONFIG.

`plan` and `doctor` also have the sections `hardware` and `plan`, and `critic` has `critic_probes`.
`train` refuses these, so give them as overrides or in a file that extends the training config
(`examples/aime_qwen2.5_32b/plan.yaml`). In the tables below, `plan` stands for `plan` and `doctor`.
"""


@dataclass
class Place:
    """Where a section stands: command and dotted key, and the value that it has if nothing is
    given."""

    command: str
    key: str
    default: Section | None


@dataclass
class Described:
    """A section's class and all its places."""

    model: type[Section]
    places: list[Place] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """Dotted keys, each once."""
        return list(dict.fromkeys(place.key for place in self.places))


def main(
    out: Annotated[Path, typer.Option(help="file to write")] = PAGE,
) -> None:
    """Write the page."""
    with atomic_write(out) as file:
        file.write(page())
    typer.echo(out)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, _first_keys(), LAYERS, _commands(), _presets(), "## Sections\n"]
    parts += [_section(described) for described in sections().values()]
    return "\n".join([*parts, _keys_of_others()])


def sections() -> dict[type[Section], Described]:
    """Every section of every command, in the order of train's; of several at one key train's is the
    first."""
    described: dict[type[Section], Described] = {}

    def visit(command: str, key: str, model: type[Section], default: Section | None) -> None:
        described.setdefault(model, Described(model)).places.append(Place(command, key, default))
        for name, info in model.model_fields.items():
            for inner in _inner_sections(info.annotation):
                value = getattr(default, name) if default is not None else _default(info)
                inner_key = f"{key}.{name}" if key else name
                if get_origin(info.annotation) in (tuple, list):
                    inner_key += ".<number>"
                visit(command, inner_key, inner, value if isinstance(value, inner) else None)

    for command, root in COMMANDS.items():
        visit(command, "", root, None)
    for root in COMMANDS.values():
        del described[root]
    order = {
        key: number
        for number, key in enumerate(dict.fromkeys(d.keys[0] for d in described.values()))
    }
    return dict(sorted(described.items(), key=lambda item: order[item[1].keys[0]]))


def _first_keys() -> str:
    lines = ["| key | default | |", "|---|---|---|"]
    places = {
        place.key: (d.model, place.default)
        for d in sections().values()
        for place in d.places
        if place.command == "train"
    }
    for key in FIRST_KEYS:
        section, _, name = key.rpartition(".")
        model, default = places[section] if section else (TrainConfig, None)
        value = _default(model.model_fields[name]) if default is None else getattr(default, name)
        text = "**required**" if value is PydanticUndefined else _code(value)
        link = f"[`{key}`](#{model.__name__})" if section else f"`{key}`"
        lines.append(f"| {link} | {text} | {_text(model.model_fields[name])} |")
    return "\n".join(lines) + "\n"


def _commands() -> str:
    lines = ["## Commands\n", "| | " + " | ".join(f"`{name}`" for name in COMMANDS) + " | |"]
    lines.append("|---|" + "---|" * len(COMMANDS) + "---|")
    for name in dict.fromkeys(name for root in COMMANDS.values() for name in root.model_fields):
        cells = []
        texts = []
        for root in COMMANDS.values():
            info = root.model_fields.get(name)
            if info is None:
                cells.append("")
                continue
            inner = next(_inner_sections(info.annotation), None)
            word = "required" if info.is_required() else "optional"
            cells.append(f"[{word}](#{inner.__name__})" if inner is not None else word)
            texts.append(_text(info))
        # Sections of one key differ by command: train's text describes the key, the links the rest.
        lines.append(f"| `{name}` | {' | '.join(cells)} | {texts[0]} |")
    return "\n".join(lines) + "\n"


def _presets() -> str:
    lines = ["## Presets\n", "| `preset` | |", "|---|---|"]
    for path in sorted(PRESETS.glob("*.yaml")):
        comment = " ".join(line[1:].strip() for line in _leading_comment(path))
        lines.append(
            f"| [`{path.stem}`](../vapo_megatron/config/presets/{path.name}) | {_cell(comment)} |"
        )
    return "\n".join(lines) + "\n"


def _keys_of_others() -> str:
    """Keys of other trainers and their names here."""
    lines = ["## Keys of other trainers\n"]
    lines.append("A config with one of these keys is refused, and the message names ours.\n")
    lines += ["| | theirs | here |", "|---|---|---|"]
    for trainer, keys in OTHER_TRAINERS.items():
        lines += [f"| {trainer} | {key} | {ours} |" for key, ours in keys.items()]
    return "\n".join(lines) + "\n"


def _leading_comment(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        yield line


def _section(described: Described) -> str:
    model = described.model
    users = list(dict.fromkeys(place.command for place in described.places))
    title = ", ".join(f"`{key}`" for key in described.keys)
    only = "" if len(users) == len(COMMANDS) else f" ({', '.join(users)})"
    lines = [f'### <a id="{model.__name__}"></a>{title}{only}\n', f"{_first_line(model)}\n"]
    lines += ["| key | type | default | |", "|---|---|---|---|"]
    for name, info in model.model_fields.items():
        inner = next(_inner_sections(info.annotation), None)
        title = info.alias or name
        key = f"[`{title}`](#{inner.__name__})" if inner is not None else f"`{title}`"
        lines.append(f"| {key} | {_type(info)} | {_defaults(described, name)} | {_text(info)} |")
    return "\n".join(lines) + "\n"


def _text(info: FieldInfo) -> str:
    inner = next(_inner_sections(info.annotation), None)
    text = info.description or ""
    if not text and inner is not None:
        text = _first_line(inner)
    return _cell(text)


def _defaults(described: Described, name: str) -> str:
    """The default, or each with its places (its commands, where they share one place) if they
    differ."""
    info = described.model.model_fields[name]
    if any(_inner_sections(info.annotation)):
        if info.is_required():
            return "**required**"
        return _code(None) if _default(info) is None else ""
    one_place = len(described.keys) == 1
    where: dict[str, dict[str, None]] = {}
    for place in described.places:
        value = getattr(place.default, name) if place.default is not None else _default(info)
        text = "**required**" if value is PydanticUndefined else _code(value)
        where.setdefault(text, {})[place.command if one_place else place.key] = None
    if len(where) == 1:
        return next(iter(where))
    return ", ".join(f"{text} ({', '.join(places)})" for text, places in where.items())


def _type(info: FieldInfo) -> str:
    return _cell(_with_limits(_annotation(info.annotation), info.metadata))


def _with_limits(text: str, metadata: Iterable[Any]) -> str:
    """A type with its limits; a pattern already implies that a string is not empty."""
    limits = [limit for limit in map(_limit, metadata) if limit]
    if any(limit.startswith("pattern") for limit in limits):
        limits = [limit for limit in limits if limit != "not empty"]
    return ", ".join([text, *limits])


def _annotation(annotation: Any) -> str:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _with_limits(_annotation(arguments[0]), _metadata(arguments[1:]))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(
            "none" if part is types.NoneType else _annotation(part) for part in arguments
        )
    if origin in (tuple, list):
        entry = _annotation(arguments[0])
        return "list of strings" if entry == "string" else f"list of {entry}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    names = {str: "string", Path: "path", bool: "true, false", int: "integer", float: "number"}
    return names[annotation]


def _metadata(entries: tuple[Any, ...]) -> Iterator[Any]:
    for entry in entries:
        yield from entry.metadata if isinstance(entry, FieldInfo) else [entry]


def _limit(entry: Any) -> str:
    match entry:
        case annotated_types.Ge():
            return f"≥ {entry.ge:g}"
        case annotated_types.Gt():
            return f"> {entry.gt:g}"
        case annotated_types.Le():
            return f"≤ {entry.le:g}"
        case annotated_types.Lt():
            return f"< {entry.lt:g}"
        case annotated_types.MinLen():
            return "not empty"
    pattern = getattr(entry, "pattern", None)
    return f"pattern `{pattern}`" if pattern else ""


def _inner_sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            yield from _inner_sections(argument)


def _default(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True)


def _code(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"`{value:g}`"
    plain = list(value) if isinstance(value, tuple) else value
    text = (
        plain
        if isinstance(plain, str)
        else yaml.safe_dump(plain, default_flow_style=True).split("\n")[0]
    )
    return f"`{text}`"


def _first_line(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    typer.run(main)

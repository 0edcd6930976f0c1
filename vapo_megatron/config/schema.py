"""JSON schemas of configs, by which editors complete keys and mark wrong ones.

A file is one layer of several: nothing is required in it, a section may be null, and any value may
be an interpolation.
"""

from collections.abc import Sequence
from typing import Any

from vapo_megatron.config.base import Section

_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
# Forms that validators take besides the type of a key.
_MORE_FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("LayoutConfig", "sequence_parallel"): {"const": "auto"},
    ("DataConfig", "train"): {
        "anyOf": [
            {"type": "array", "items": {"type": "string"}},
            {"type": "object", "additionalProperties": {"type": ["number", "object"]}},
        ]
    },
}


def editor_schema(model: type[Section], presets: Sequence[str]) -> dict[str, Any]:
    """The schema of a file of this config (JSON Schema 2020-12). presets: names for `preset`."""
    schema = model.model_json_schema(by_alias=True)
    sections = schema.pop("$defs", {})
    for name, section in sections.items():
        _loosen(name, section)
    _loosen(model.__name__, schema)
    properties = schema["properties"]
    properties["extends"] = {
        "type": "string",
        "description": "a YAML config beside this one, whose values hold where this has none",
    }
    if "preset" in properties:
        description = properties["preset"]["description"]
        properties["preset"] = {"enum": [*presets, None], "description": description}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"vapo_megatron {model.__name__}",
        **schema,
        "$defs": sections,
    }


def _loosen(name: str, section: dict[str, Any]) -> None:
    """Let a section be one layer of several, in place."""
    section.pop("required", None)
    section.pop("title", None)
    for key, field in section.get("properties", {}).items():
        field.pop("title", None)
        kept = {part: field.pop(part) for part in ("description", "default") if part in field}
        if isinstance(kept.get("default"), dict):  # a section's, whose keys have their own
            del kept["default"]
        forms = [dict(field), _INTERPOLATION, {"type": "null"}]
        if (name, key) in _MORE_FORMS:
            forms.append(_MORE_FORMS[name, key])
        field.clear()
        field.update(kept, anyOf=forms)

"""The JSON schema for editors takes every config of the project and marks what the program
refuses; shells complete commands and keys."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from called import exit_code_of
from omegaconf import OmegaConf
from pydantic import Field

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.base import Section
from vapo_megatron.config.critic_probes import ProbedRunConfig
from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.load import load_config
from vapo_megatron.config.plan import PlanConfig
from vapo_megatron.config.schema import editor_schema
from vapo_megatron.config.sft import SftConfig
from vapo_megatron.config.train import TrainConfig

ROOT = Path(__file__).parents[2]
VAPO = ROOT / "examples" / "gsm8k" / "vapo.yaml"
# Files of other programs.
OTHERS = {"kubernetes", "skypilot", "ablation"}
EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*.yaml") if path.parent.name not in OTHERS
)


@cache
def validator(model: type[Section]) -> jsonschema.Draft202012Validator:
    presets = [path.stem for path in PRESETS.glob("*.yaml")]
    schema = editor_schema(model, presets)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _read(path: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False)


def _fits(content: Any) -> bool:
    kinds = (TrainConfig, SftConfig, EvaluateConfig, PlanConfig, ProbedRunConfig)
    return any(validator(kind).is_valid(content) for kind in kinds)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_examples_fit_a_schema(path: Path) -> None:
    assert _fits(_read(path))


def test_presets_and_resolved_configs_fit() -> None:
    for preset in PRESETS.glob("*.yaml"):
        assert not list(validator(TrainConfig).iter_errors(_read(preset))), preset
    resolved = load_config(TrainConfig, VAPO, [], PRESETS).model_dump(mode="json")
    assert not list(validator(TrainConfig).iter_errors(resolved))


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (lambda c: c["actor"]["optimizer"].update(learning_rate=1), ["actor", "optimizer"]),
        (lambda c: c["sampling"].update(max_new_tokens=0), ["sampling", "max_new_tokens"]),
        (lambda c: c["run"].update(steps="many"), ["run", "steps"]),
        (lambda c: c.update(preset="vapoo"), ["preset"]),
        (lambda c: c.update(trainer={}), []),
    ],
)
def test_what_the_program_refuses_is_marked_there(
    spoil: Callable[[dict[str, Any]], None], place: list[str]
) -> None:
    content = _read(VAPO)
    spoil(content)
    places = [list(error.absolute_path) for error in validator(TrainConfig).iter_errors(content)]
    assert len(places) == 1 and places[0] == place[: len(places[0])]


def test_sections_can_be_null_and_values_be_references() -> None:
    content = _read(VAPO) | {"extends": "other.yaml", "critic": None}
    content["run"]["name"] = "${model.path}"
    content["run"]["steps"] = "${batch.prompts_per_step}"
    content["data"]["train"] = ["a.jsonl", "b.jsonl"]
    assert validator(TrainConfig).is_valid(content)


class Part(Section):
    size: int = Field(3, ge=1, description="how much")
    old: str = Field("", alias="from")


class Whole(Section):
    preset: str | None = Field(None, description="which values")
    path: str
    part: Part = Part()


class Plain(Section):
    path: str = "a"


def test_a_schema_says_what_a_file_may_hold() -> None:
    reference = {"type": "string", "pattern": r"\$\{"}
    null = {"type": "null"}
    extends = {
        "type": "string",
        "description": "a YAML config beside this one, whose values hold where this has none",
    }
    dialect = "https://json-schema.org/draft/2020-12/schema"
    assert editor_schema(Whole, ["vapo", "ppo"]) == {
        "$schema": dialect,
        "title": "vapo_megatron Whole",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "extends": extends,
            "preset": {"enum": ["vapo", "ppo", None], "description": "which values"},
            "path": {"anyOf": [{"type": "string"}, reference, null]},
            "part": {"anyOf": [{"$ref": "#/$defs/Part"}, reference, null]},
        },
        "$defs": {
            "Part": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "size": {
                        "description": "how much",
                        "default": 3,
                        "anyOf": [{"type": "integer", "minimum": 1}, reference, null],
                    },
                    "from": {"default": "", "anyOf": [{"type": "string"}, reference, null]},
                },
            }
        },
    }
    assert editor_schema(Plain, ["vapo"]) == {
        "$schema": dialect,
        "title": "vapo_megatron Plain",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "extends": extends,
            "path": {"default": "a", "anyOf": [{"type": "string"}, reference, null]},
        },
        "$defs": {},
    }


def test_forms_that_a_validator_takes_are_in_the_schema() -> None:
    whole = jsonschema.Draft202012Validator(editor_schema(TrainConfig, []))
    for values, fits in (
        ({"actor": {"layout": {"sequence_parallel": "auto"}}}, True),
        ({"actor": {"layout": {"sequence_parallel": "maybe"}}}, False),
        ({"data": {"train": {"a.jsonl": 2, "b.jsonl": {"weight": 3}}}}, True),
        ({"data": {"train": {"a.jsonl": "often"}}}, False),
        ({"data": {"train": ["a.jsonl", "b.jsonl"]}}, True),
        ({"data": {"train": ["a.jsonl", 3]}}, False),
        ({"data": {"shuffle": "auto"}}, False),
    ):
        assert whole.is_valid(values) is fits, values


def test_the_command_prints_schemas_and_whole_configs(capfd: Any, tmp_path: Path) -> None:
    assert exit_code_of("config", "--schema", "--command", "sft") == 0
    schema = json.loads(capfd.readouterr().out)
    assert "batch_size" in schema["$defs"]["SftDataConfig"]["properties"]
    assert exit_code_of("config", VAPO, "run.steps=7") == 0
    content = yaml.safe_load(capfd.readouterr().out)
    assert content["run"]["steps"] == 7 and content["algorithm"]["advantage"]["gamma"] == 1.0
    assert exit_code_of("config") == 2
    assert exit_code_of("config", VAPO, "run.step=7") == 2
    assert "did you mean run.steps" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("vapo-megatron pu", "push"),
        ("vapo-megatron train x.yaml actor.optimizer.l", "optimizer.lr="),
    ],
)
def test_shells_complete_commands_and_keys(words: str, expected: str) -> None:
    variables = {"_VAPO_MEGATRON_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}
    program = "import sys; sys.argv[0] = 'vapo-megatron'; from vapo_megatron.cli import app; app()"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert expected in ended.stdout, ended.stderr

"""docs/configuration.md is what the config's models say."""

import re
from pathlib import Path

import pytest
import typer
from called import called

from tools import describe_config
from vapo_megatron.config.base import known_keys
from vapo_megatron.config.explain import OTHER_TRAINERS


def test_the_page_is_up_to_date() -> None:
    written = describe_config.PAGE.read_text(encoding="utf-8")
    assert written == describe_config.page(), "run .venv/bin/python tools/describe_config.py"


def test_the_page_has_every_key_of_other_trainers() -> None:
    table = describe_config.page().partition("\n## Keys of other trainers\n")[2]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", table, re.M)
    named = {(trainer, theirs): ours for trainer, theirs, ours in rows}
    for trainer, keys in OTHER_TRAINERS.items():
        for theirs, ours in keys.items():
            assert named[trainer, theirs] == ours


def test_the_page_has_every_key_of_every_command() -> None:
    page = describe_config.page()
    rows: dict[str, set[str]] = {}
    for part in page.split("\n### ")[1:]:
        title = part.partition("\n")[0]
        for place in re.findall(r"`([^`]+)`", title):
            rows.setdefault(place.replace(".<number>", ""), set()).update(
                re.findall(r"^\| \[?`(\w+)`", part, re.M)
            )
    for command, model in describe_config.COMMANDS.items():
        for key in known_keys(model):
            section, _, name = key.rpartition(".")
            assert (name in rows[section]) if section else f"| `{name}` |" in page, (
                f"{command}: {key}"
            )


@pytest.mark.parametrize("model", describe_config.sections())
def test_every_key_says_what_it_does(model: type) -> None:
    undescribed = [
        name
        for name, info in model.model_fields.items()
        if not info.description and not any(describe_config._inner_sections(info.annotation))
    ]
    assert not undescribed, f"{model.__name__}: give these a description"


def test_every_link_within_the_page_has_its_place() -> None:
    page = describe_config.page()
    assert set(re.findall(r"\(#(\w+)\)", page)) == set(re.findall(r'<a id="(\w+)">', page))


def test_a_default_that_depends_on_the_place_is_given_for_each() -> None:
    row = next(line for line in describe_config.page().splitlines() if line.startswith("| `lr` |"))
    assert "`1e-06` (actor.optimizer)" in row and "`2e-06` (critic.optimizer)" in row


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(describe_config.main)
    code, output = called(app, "--out", tmp_path / "page.md")
    assert code == 0, output
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == describe_config.page()

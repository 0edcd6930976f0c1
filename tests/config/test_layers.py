"""Layers of a config to the word: presets, files, overrides, null for a section, references."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pydantic import Field

from vapo_megatron.config.base import Section
from vapo_megatron.config.load import dump_config, load_config, shown_config
from vapo_megatron.errors import BadInput


class Optimizer(Section):
    lr: float = 1e-6
    decay: float = 0.1


class Actor(Section):
    tp: int = 1
    optimizer: Optimizer = Optimizer()


class Root(Section):
    preset: str | None = None
    seed: int = 1
    text: str = ""
    texts: list[str] = Field(default_factory=list)
    table: dict[str, str] = Field(default_factory=dict)
    actor: Actor = Actor()
    critic: Actor = Actor(tp=2)
    maybe: Actor | None = None
    old: int = Field(0, alias="from")


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "large.yaml").write_text("seed: 2\nactor: {tp: 4, optimizer: {lr: 0.5}}\n")
    (folder / "small.yaml").write_text("seed: 3\n")
    (folder / "notes.txt").write_text("")
    return folder


def load(presets: Path, text: str | bytes | None, *overrides: str) -> Root:
    path = None
    if text is not None:
        path = presets.parent / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(Root, path, overrides, presets)


def line(presets: Path, text: str | bytes | None, *overrides: str) -> str:
    with pytest.raises(BadInput) as refused:
        load(presets, text, *overrides)
    return str(refused.value).replace(f"{presets.parent}/", "")


@pytest.mark.parametrize(
    ("text", "overrides", "tp", "lr"),
    [
        (None, [], 1, 1e-6),
        (None, ["preset=large"], 4, 0.5),
        ("preset: large", [], 4, 0.5),
        ("preset: large", ["preset=small"], 1, 1e-6),
        ("preset: small", ["preset=large"], 4, 0.5),
        ("preset: large", ["preset=null"], 1, 1e-6),
        ("preset: large\nactor: {tp: 8}", [], 8, 0.5),
        ("preset: large\nactor: {optimizer: {decay: 0}}", ["actor.tp=2"], 2, 0.5),
        ("preset: large\nactor: {tp: 8}", ["actor={optimizer: {lr: 0.25}}"], 8, 0.25),
        ("preset: large\nactor: {tp: 8}", ["actor=null"], 4, 0.5),
        ("preset: large\nactor: {tp: 8}", ["actor=null", "actor.tp=16"], 16, 0.5),
        ("preset: large\nactor: {tp: 8, optimizer: {lr: 1}}", ["actor.optimizer=null"], 8, 0.5),
        ("preset: large\nactor: {tp: 8, optimizer: }", [], 8, 0.5),
        ("preset: large\nactor:", [], 4, 0.5),
        ("actor: {tp: 8, optimizer: {lr: 1}}", ["actor.optimizer=null"], 8, 1e-6),
        ("actor: {tp: 8}", ["actor=null"], 1, 1e-6),
        (None, ["actor.optimizer=null"], 1, 1e-6),
        (None, ["critic.tp=3", "actor.tp=${critic.tp}"], 3, 1e-6),
        ("critic: {tp: 3}", ["actor.optimizer.lr=${critic.tp}"], 1, 3.0),
        ("actor: {tp: '${seed}'}", ["seed=5"], 5, 1e-6),
        (None, [" actor.tp =3"], 3, 1e-6),
    ],
)
def test_each_layer_lies_over_the_one_below(
    presets: Path, text: str | None, overrides: list[str], tp: int, lr: float
) -> None:
    actor = load(presets, text, *overrides).actor
    assert (actor.tp, actor.optimizer.lr) == (tp, lr)


def test_the_place_of_a_section_keeps_its_defaults(presets: Path) -> None:
    config = load(presets, "critic: {optimizer: {lr: 1}}\nmaybe: {}", "maybe.optimizer.lr=2")
    assert (config.critic.tp, config.critic.optimizer) == (2, Optimizer(lr=1))
    assert config.maybe == Actor(optimizer=Optimizer(lr=2))
    assert load(presets, "critic: {tp: 9}", "critic=null").critic == Actor(tp=2)
    assert load(presets, "maybe: {tp: 9}", "maybe=null").maybe is None
    assert load(presets, None, "text=").text == "" == load(presets, None, "text=''").text
    assert load(presets, None, "texts=[a=b, c]", "from=3").texts == ["a=b", "c"]


A60 = "[" + "a" * 59
NO_VALUE = "is not a YAML value; quote it if it is a text"
NO_FORM = "is not of the form section.key=value"
COUNTED = "entries of a list are counted from 0, such as data.eval.0.limit"
NOWHERE = "Interpolation key 'nowhere' not found full_key: seed object_type=dict"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["seed=x"], "override: seed is 'x'; expected a valid integer"),
        (["preset=large", "seed=x"], "override: seed is 'x'; expected a valid integer"),
        (["seed=null"], "override: seed is None; expected a valid integer"),
        (["actor.qqq=null"], "override: unknown key actor.qqq; known keys of actor: tp, optimizer"),
        (
            ["qqq=null"],
            "override: unknown key qqq; known keys at the top: preset, seed, text, texts, table, "
            "actor, critic, maybe, from",
        ),
        (["preset=notes"], "unknown preset notes; expected one of: large, small"),
        (["text=${seed"], f"override text: '${{seed' {NO_VALUE}"),
        (["text={a"], f"override text: '{{a' {NO_VALUE}"),
        ([f"text={A60}"], f"override text: '{A60}' {NO_VALUE}"),
        ([f"text={A60}b"], f"override text: '{A60}...' {NO_VALUE}"),
        (["text"], f"override 'text' {NO_FORM}"),
        (["=3"], f"override '=3' {NO_FORM}"),
        ([" =3"], f"override ' =3' {NO_FORM}"),
        (["actor..tp=3"], f"override 'actor..tp=3' {NO_FORM}"),
        (["texts.-1=3"], f"override texts.-1: {COUNTED}"),
        (["-texts=3"], f"override -texts: {COUNTED}"),
        (
            ["texts=[]", "texts[2]=a"],
            "override texts[2]=a: list index out of range full_key: texts[2] object_type=list",
        ),
        (["seed=${nowhere}"], f"config: {NOWHERE}"),
        (["preset=small", "seed=${nowhere}"], f"preset small: {NOWHERE}"),
    ],
)
def test_a_wrong_override_is_told_in_these_words(
    presets: Path, overrides: list[str], told: str
) -> None:
    assert line(presets, None, *overrides) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: x", "run.yaml: seed is 'x'; expected a valid integer"),
        ("preset: large\nseed: x", "run.yaml: seed is 'x'; expected a valid integer"),
        ("preset: larg", "unknown preset larg; did you mean large?"),
        ("preset: LARG", "unknown preset LARG; did you mean large?"),
        ("preset: 7", "unknown preset 7; expected one of: large, small"),
        ("seed: ${nowhere}", f"run.yaml: {NOWHERE}"),
        (
            "seed: 1\nactor: [",
            "run.yaml: not valid YAML at line 3: did not find expected node content",
        ),
        ("seed: 1\n\nseed: 2", "run.yaml: not valid YAML at line 3: found duplicate key seed"),
        ("- seed", "run.yaml: holds a list at its top; expected `key: value` sections"),
        (
            b"seed: 1\ntext: \xff",
            "run.yaml:2: not UTF-8 (invalid start byte); save the file as UTF-8",
        ),
        (
            "text: a\0",
            "run.yaml: not valid YAML: unacceptable character #x0000: control characters are not "
            'allowed in "<unicode string>", position 7',
        ),
        ("extends: 3", "run.yaml: extends=3; expected the path of one YAML config next to it"),
        (
            "extends: none.yaml",
            "run.yaml: extends=none.yaml: no such file next to it; give the path of a YAML config",
        ),
        (
            "extends: run.yaml",
            "run.yaml: extends itself, by way of run.yaml: take one `extends` out",
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_these_words(
    presets: Path, text: str | bytes, told: str
) -> None:
    assert line(presets, text) == told


def test_presets_that_are_not_there_are_told_of(presets: Path) -> None:
    for path in presets.iterdir():
        path.unlink()
    told = "unknown preset small; expected one of: none there"
    assert line(presets, None, "preset=small") == told


def test_files_may_not_extend_each_other_in_a_ring(presets: Path) -> None:
    (presets.parent / "base.yaml").write_text("extends: run.yaml\nseed: 7\n")
    assert line(presets, "extends: base.yaml") == (
        "run.yaml: extends itself, by way of base.yaml: take one `extends` out"
    )
    (presets.parent / "base.yaml").write_text("seed: 7\nactor: {tp: 2}\n")
    config = load(presets, "extends: base.yaml\nactor: {optimizer: {lr: 3}}")
    assert (config.seed, config.actor) == (7, Actor(tp=2, optimizer=Optimizer(lr=3)))


def test_a_file_that_is_none_is_told_of(presets: Path) -> None:
    with pytest.raises(BadInput) as refused:
        load_config(Root, presets / "gone.yaml", [], presets)
    assert str(refused.value) == (
        f"{presets}/gone.yaml: no such file; give the path of a YAML config"
    )
    with pytest.raises(BadInput) as refused:
        load_config(Root, presets, [], presets)
    told = f"{presets}: cannot be read as a YAML config: [Errno 21] Is a directory: '{presets}'"
    assert str(refused.value) == told


@pytest.mark.parametrize(
    "text",
    ["${a}", "a ${b} ${c}", "\\${a}", "\\\\${a}", "a\\ ${b} \\", "$ {a}", "${", "é\n'\"", "1e-6"],
)
def test_any_text_reads_back_as_it_was(presets: Path, text: str) -> None:
    config = Root(text=text, texts=[text, "x"], table={"k": text, "l": text})
    dump_config(config, presets.parent / "new" / "run.yaml")
    assert load_config(Root, presets.parent / "new" / "run.yaml", [], presets) == config
    shown = OmegaConf.to_container(OmegaConf.create(shown_config(config)), resolve=True)
    assert shown == config.model_dump(by_alias=True)
    assert "from" in shown

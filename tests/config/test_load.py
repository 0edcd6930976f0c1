"""The config: layers in their order, one line for each mistake, a file that reads back as it
was."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from vapo_megatron.cli import PRESETS
from vapo_megatron.config.base import Section
from vapo_megatron.config.load import dump_config, load_config
from vapo_megatron.config.secret_values import refuse_secrets
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput


class Optimizer(Section):
    lr: float = Field(1e-6, gt=0)
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


class FromPolicy(Section):
    kind: Literal["policy"] = "policy"


class FromCheckpoint(Section):
    kind: Literal["checkpoint"]
    path: Path


class Trainable(Section):
    tp: int = Field(1, ge=1)
    optimizer: Optimizer = Optimizer()
    tokens: int | Literal["auto"] = "auto"


class Pretraining(Section):
    iterations: int = 50

    @model_validator(mode="after")
    def _even(self) -> "Pretraining":
        if self.iterations % 2:
            raise ValueError("iterations must be even: add one")
        return self


class Stage(Section):
    name: str


class Root(Section):
    preset: str | None = None
    seed: int = 1
    template: str = ""
    actor: Trainable = Trainable()
    critic: Trainable = Trainable()
    init: Annotated[FromPolicy | FromCheckpoint, Field(discriminator="kind")] = FromPolicy()
    value_pretraining: Pretraining | None = None
    stages: list[Stage] = Field(default_factory=list)
    data: Path


class Rootless(Section):
    seed: int = 1


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "vapo.yaml").write_text(
        "seed: 2\nactor: {optimizer: {lr: 2e-6, weight_decay: 0.2}}\ndata: p.jsonl\n"
    )
    (folder / "dapo.yaml").write_text("seed: 3\ndata: other.jsonl\n")
    return folder


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def refused(presets: Path, path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(BadInput) as caught:
        load_config(Root, path, overrides, presets)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "override",
    [
        "monitoring.mlflow=https://me:word@host:5000",
        "monitoring.mlflow=postgresql://me:word@host/db",
        "rollout.external_urls=[http://:word@node:30000]",
        "monitoring.mlflow=https://word@host:5000",
        "monitoring.mlflow=https://host:5000/?access_token=word",
        "data.train=https://host/file.jsonl?X-Amz-Signature=word",
        "rollout.server_args.hf_token=word",
        "server.extra.api_key=word",
        "data.prompt.system_prompt='Authorization: Bearer word12345678'",
        "model.path=hf_wordABCDEFGHIJKLMNOPQRSTUV",
        "rollout.server_args.headers={Authorization: word}",
    ],
)
def test_a_secret_is_refused_unseen(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(BadInput, match=rf"{key}.*\*\*\*.*password or key") as error:
        load_config(TrainConfig, None, [override], PRESETS)
    assert "word@" not in str(error.value) and "word" not in str(error.value).replace(
        "password", ""
    )


def test_what_only_looks_like_a_secret_is_taken() -> None:
    refuse_secrets(
        {
            "rollout": {"api_key_variable": "ENGINE_KEY", "external_urls": ["http://h:30000"]},
            "sampling": {"max_new_tokens": "64", "stop": ["<|im_end|>"]},
            "data": {"prompt": {"user_template": "Keep it a secret: {problem}? a@b.c"}},
            "train": "hub:org/hf_data@0123456789abcdef",
        },
        "config",
    )


def test_each_layer_lies_over_the_one_before(tmp_path: Path, presets: Path) -> None:
    path = write(tmp_path, "preset: vapo\nactor: {optimizer: {lr: 3e-6}}\ndata: user.jsonl\n")
    config = load_config(
        Root, path, ["actor.optimizer.betas=[0.8, 0.9]", "data=given.jsonl"], presets
    )
    assert config.seed == 2
    assert config.actor.optimizer == Optimizer(lr=3e-6, weight_decay=0.2, betas=(0.8, 0.9))
    assert config.critic.optimizer == Optimizer()
    assert config.data == Path("given.jsonl")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("actor: {tp: 2, optimizer: {lr: 0.5}}", ["actor=null"], {}),
        ("actor: {tp: 2, optimizer: {lr: 0.5}}", ["actor.optimizer=null"], {"tp": 2}),
        ("actor: {tp: 2, optimizer: {lr: 0.5}}", ["actor.tp=4", "actor=null"], {}),
        ("actor: {tp: 2, optimizer: {lr: 0.5}}", ["actor=null", "actor.tp=4"], {"tp": 4}),
        ("actor:", [], {}),
        ("actor: {tp: 2, optimizer: }", [], {"tp": 2}),
    ],
)
def test_null_takes_back_what_a_file_says_of_a_section(
    tmp_path: Path, presets: Path, text: str, overrides: list[str], expected: dict[str, int]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"preset: vapo\ndata: d\n{text}\n")
    plain = tmp_path / "plain.yaml"
    plain.write_text("preset: vapo\ndata: d\n")
    actor = load_config(
        Root, plain, [f"actor.{key}={value}" for key, value in expected.items()], presets
    ).actor
    assert load_config(Root, path, overrides, presets).actor == actor != Trainable()
    with pytest.raises(BadInput, match="seed"):
        load_config(Root, path, ["seed=null"], presets)


def test_the_last_override_of_a_key_counts_null_too(presets: Path) -> None:
    overrides = ["data=d", "value_pretraining={iterations: 2}", "value_pretraining=null"]
    assert load_config(Root, None, overrides, presets).value_pretraining is None
    overrides = ["data=d", "value_pretraining=null", "value_pretraining={iterations: 2}"]
    assert load_config(Root, None, overrides, presets).value_pretraining == Pretraining(
        iterations=2
    )


def test_an_override_chooses_another_preset(tmp_path: Path, presets: Path) -> None:
    path = write(tmp_path, "preset: vapo\n")
    config = load_config(Root, path, ["preset=dapo"], presets)
    assert (config.preset, config.seed, config.data) == ("dapo", 3, Path("other.jsonl"))


def test_a_model_without_the_field_still_takes_a_preset(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("seed: 7\n")
    assert load_config(Rootless, None, ["preset=small"], tmp_path) == Rootless(seed=7)


@pytest.mark.parametrize(
    ("override", "value"),
    [("1e-4", 1e-4), ("0.5", 0.5), ("3", 3.0)],
)
def test_override_values_are_read_as_yaml(presets: Path, override: str, value: float) -> None:
    config = load_config(Root, None, ["data=x", f"actor.optimizer.lr={override}"], presets)
    assert config.actor.optimizer.lr == value


def test_override_keeps_what_follows_the_first_equals_sign(presets: Path) -> None:
    config = load_config(Root, None, ["data=x", "template='a: b=c'"], presets)
    assert config.template == "a: b=c"
    assert load_config(Root, None, ["data=x", "template="], presets).template == ""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["actor.optimizer.learning_rate=1"],
            "unknown key actor.optimizer.learning_rate; did you mean actor.optimizer.lr?",
        ),
        (
            ["actr.optimizer.lr=1"],
            "unknown key actr.optimizer.lr; did you mean actor.optimizer.lr?",
        ),
        (
            ["critic.weight_decay=1"],
            "unknown key critic.weight_decay; did you mean critic.optimizer.weight_decay?",
        ),
        (["value_pretraining.iteration=4"], "did you mean value_pretraining.iterations?"),
        (["actor.tensor_model_parallel_size=2"], "did you mean actor.tp?"),
        (["sed=4"], "unknown key sed; did you mean seed?"),
        (["plan.turn=4"], "it belongs to `vapo-megatron plan`"),
        (
            ["init.kind=checkpoint", "init.path=x", "init.pth=y"],
            "unknown key init.pth; did you mean init.path?",
        ),
        (["actor.optimizer.qqq=1"], "known keys of actor.optimizer: lr, weight_decay, betas"),
        (["stages=[{name: a, nam: b}]"], "unknown key stages.0.nam; did you mean stages.name?"),
    ],
)
def test_unknown_key_comes_with_the_nearest_known_one(
    presets: Path, overrides: list[str], expected: str
) -> None:
    assert expected in refused(presets, None, "data=x", *overrides)


def test_unknown_key_in_a_file_names_the_file(tmp_path: Path, presets: Path) -> None:
    path = write(tmp_path, "data: x\ncritic:\n  optimizer:\n    wieght_decay: 0.1\n")
    expected = (
        f"{path}: unknown key critic.optimizer.wieght_decay; did you mean "
        f"critic.optimizer.weight_decay?"
    )
    assert refused(presets, path) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=many", "override: seed is 'many'; expected a valid integer"),
        ("actor.tp=0", "override: actor.tp is 0; expected greater than or equal to 1"),
        ("actor.tokens=few", "actor.tokens is 'few'; expected a valid integer"),
        ("actor.tokens=few", "or 'auto'"),
        ("actor=3", "actor is 3; expected a section of keys"),
        ("value_pretraining.iterations=3", "value_pretraining: iterations must be even: add one"),
        ("init.kind=nothing", "init"),
        ("seed=.inf", "seed is inf; expected"),
        ("data=12", "data is 12; expected a path"),
    ],
)
def test_wrong_values_name_the_key_the_value_and_the_expectation(
    presets: Path, override: str, expected: str
) -> None:
    assert expected in refused(presets, None, "data=x", override)


def test_several_mistakes_are_counted(presets: Path) -> None:
    message = refused(presets, None, "data=x", "seed=many", "actor.tokens=few", "critic.tp=0")
    assert message.startswith("override: seed is 'many'") and message.endswith("(and 2 more)")


def test_missing_value_is_named(tmp_path: Path, presets: Path) -> None:
    assert (
        refused(presets, write(tmp_path, "seed: 1\n"))
        == f"{tmp_path}/run.yaml: missing key data: give it a value"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nactor: {optimizer: [\n", "not valid YAML at line"),
        ("seed: 1\n\tactor: 2\n", "not valid YAML at line 2"),
        ("seed: 1\nseed: 2\n", "not valid YAML at line 2"),
        ("- seed\n", "holds a list at its top"),
        ("data: ${nowhere}\n", "nowhere"),
        ("preset: vappo\n", "unknown preset vappo; did you mean vapo?"),
        ("preset: x\n", "expected one of: dapo, vapo"),
    ],
)
def test_broken_files_are_named_in_one_line(
    tmp_path: Path, presets: Path, text: str, expected: str
) -> None:
    assert expected in refused(presets, write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path, presets: Path) -> None:
    assert "no such file" in refused(presets, tmp_path / "absent.yaml")
    assert "cannot be read" in refused(presets, tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    assert "binary.yaml:1: not UTF-8" in refused(presets, tmp_path / "binary.yaml")


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=3", ".seed=3"])
def test_malformed_overrides(presets: Path, override: str) -> None:
    assert "section.key=value" in refused(presets, None, override)


def test_override_below_a_list_that_is_not_there(presets: Path) -> None:
    assert refused(presets, None, "data=x", "stages=[]", "stages[2].name=a").startswith(
        "override stages[2].name=a: "
    )


def test_a_dumped_config_reads_back_equal(tmp_path: Path, presets: Path) -> None:
    overrides = [
        "preset=vapo",
        "actor.tokens=5",
        "value_pretraining.iterations=8",
        "init.kind=checkpoint",
        "init.path='1e-6'",
        "stages=[{name: yes it is}, {name: '012'}]",
    ]
    config = load_config(Root, None, overrides, presets)
    config = config.model_copy(
        update={"template": "literal ${braces} \\${kept}\nand 'lines': here"}
    )
    dump_config(config, tmp_path / "new" / "config.yaml")
    assert load_config(Root, tmp_path / "new" / "config.yaml", [], presets) == config
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["config.yaml"]


def test_dump_into_an_impossible_place_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        dump_config(Rootless(), tmp_path / "file" / "config.yaml")


def test_a_file_lies_over_the_one_it_extends(tmp_path: Path, presets: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text("preset: vapo\ndata: base.jsonl\ntemplate: base\n")
    (tmp_path / "deep" / "middle.yaml").write_text("extends: ../base.yaml\ntemplate: middle\n")
    path = tmp_path / "top.yaml"
    path.write_text("extends: deep/middle.yaml\ndata: top.jsonl\n")
    whole = tmp_path / "whole.yaml"
    whole.write_text("preset: vapo\ndata: top.jsonl\ntemplate: middle\n")
    assert load_config(Root, path, [], presets) == load_config(Root, whole, [], presets)
    path.write_text("extends: deep/middle.yaml\npreset: dapo\ndata: top.jsonl\n")
    assert load_config(Root, path, [], presets) == load_config(
        Root, whole, ["preset=dapo"], presets
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: top.yaml\n", r"top\.yaml: extends itself"),
        ("extends: none.yaml\n", r"top\.yaml: extends=none\.yaml: no such file"),
        ("extends: [a, b]\n", r"top\.yaml: extends=\['a', 'b'\]; expected the path"),
    ],
)
def test_what_cannot_be_extended_is_named(
    tmp_path: Path, presets: Path, text: str, message: str
) -> None:
    (tmp_path / "top.yaml").write_text(text)
    with pytest.raises(BadInput, match=message):
        load_config(Root, tmp_path / "top.yaml", [], presets)

"""Input that once ended in a stack trace, in silence, or was blamed on the wrong place."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CONFIGS, Command, Ranks, assert_refused
from stand_ins import Python
from tiny_runs import problems, train_config, write_config, write_rows

from vapo_megatron.checkpoint.resume import check_config_change
from vapo_megatron.config.load import dump_config, load_config
from vapo_megatron.config.run import RunConfig
from vapo_megatron.config.run_directory import make_run_dir
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.errors import BadInput, RunFailed

ROWS: dict[str, tuple[bytes, list[str]]] = {
    "surrogate": (
        b'{"problem": "1 plus 1", "answer": 2}\n{"problem": "\\ud800", "answer": 2}\n',
        [":2:", "\\ud800"],
    ),
    "latin1": (
        b'{"problem": "1 plus 1", "answer": 2}\n{"problem": "caf\xe9", "answer": 2}\n',
        [":2:", "not UTF-8"],
    ),
    "utf16": ('{"problem": "1 plus 1", "answer": 2}\n'.encode("utf-16"), [":1:", "not UTF-8"]),
    "nan": (b'{"problem": "1 plus 1", "answer": NaN}\n', [":1:", "answer is nan"]),
    "infinite": (b'{"problem": "1 plus 1", "answer": 1e999}\n', [":1:", "answer is inf"]),
    "numeric": (
        b'{"problem": 11, "answer": 2}\n',
        [":1:", "problem is the number 11", "expected a text"],
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows(command: Command, capfd: pytest.CaptureFixture[str], case: str) -> None:
    content, named = ROWS[case]
    path = command.folder / f"{case}.jsonl"
    path.write_bytes(content)
    code = command.exit_code("train", f"data.train={path}")
    assert_refused(command, code, capfd.readouterr().err, f"{case}.jsonl", *named)


def test_byte_order_mark_before_the_first_row_is_ignored(command: Command, tmp_path: Path) -> None:
    from vapo_megatron.data.jsonl import read_rows

    path = write_rows(tmp_path / "rows.jsonl", problems(2))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row["id"] for _, row in read_rows(path)] == ["p0", "p1"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([f"run.seed={'9' * 4000}"], ["override: run.seed", "9..."]),
        ([f"run.seed={'9' * 5000}"], ["override run.seed", "9...'", "is not a YAML value"]),
        (
            ["rollout.router_replay=perhaps"],
            ["override: rollout.router_replay is 'perhaps'", "a valid boolean"],
        ),
        (["data.eval=[{name: a, path: b, limit: x}]"], ["data.eval.0.limit is 'x'"]),
        (["sampling.temperature=0"], ["override: sampling.temperature=0: it is greedy"]),
    ],
)
def test_values_are_named_in_words_and_where_they_came_from(
    command: Command, capfd: pytest.CaptureFixture[str], overrides: list[str], named: list[str]
) -> None:
    code = command.exit_code("train", *overrides)
    error = capfd.readouterr().err
    assert_refused(command, code, error, *named)
    assert "unable to" not in error.lower() and "Value error" not in error


def test_a_config_in_another_encoding_is_named_by_its_line(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_config(command.folder / "run.yaml", train_config(command.folder, command.model))
    line = path.read_bytes().count(b"\n") + 1
    path.write_bytes(path.read_bytes() + b"# caf\xe9\n")
    code = command.exit_code("train", config=path)
    assert_refused(command, code, capfd.readouterr().err, f"run.yaml:{line}: not UTF-8")


def _wrong_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for message in messages %}")


def _template_that_raises(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_wrong_template, ["chat template cannot be applied", "TemplateSyntaxError"]),
        (_template_that_raises, ["chat template cannot be applied", "no system message"]),
    ],
)
def test_models(
    command: Command,
    capfd: pytest.CaptureFixture[str],
    name: str,
    spoil: Callable[[Path], None],
    named: list[str],
) -> None:
    import shutil

    directory = shutil.copytree(command.model, command.folder / "spoilt")
    spoil(directory)
    code = command.exit_code(name, f"model.path={directory}")
    assert_refused(command, code, capfd.readouterr().err, str(directory), *named)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, ["WORLD_SIZE is 'x'", "expected a number"]),
        ({"RANK": "", "WORLD_SIZE": "2"}, ["RANK is ''"]),
        ({"SLURM_NTASKS": "many"}, ["SLURM_NTASKS is 'many'"]),
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            ["SLURM_LOCALID is not set"],
        ),
    ],
)
def test_variables_of_a_launcher(
    command: Command,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    named: list[str],
) -> None:
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = command.exit_code("train")
    assert_refused(command, code, capfd.readouterr().err, *named)


def test_all_keys_that_changed_at_a_resume_are_named(command: Command, tmp_path: Path) -> None:
    path = write_config(tmp_path / "run.yaml", train_config(command.folder, command.model))
    dump_config(load_config(TrainConfig, path, [], tmp_path), tmp_path / "config.yaml")
    now = load_config(
        TrainConfig, path, ["run.seed=5", "sampling.temperature=0.9", "run.steps=7"], tmp_path
    )
    with pytest.raises(BadInput) as refusal:
        check_config_change(now, tmp_path, ())
    assert "run.seed=5" in str(refusal.value) and "sampling.temperature=0.9" in str(refusal.value)
    assert "run.allow_config_change=[run.seed,sampling.temperature]" in str(refusal.value)
    check_config_change(now, tmp_path, ("run.seed", "sampling.temperature"))


def test_early_failed_start_does_not_block_the_mended_command(
    command: Command, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        for name in ("logs/engine.log", "metrics.jsonl", "environment.json"):
            (command.run_dir / name).parent.mkdir(exist_ok=True)
            (command.run_dir / name).touch()
        raise RunFailed("no engine")

    ranks.may_start(failing)
    assert command.exit_code("train") == 1
    assert command.exit_code("train", "run.seed=2") == 1, capfd.readouterr().err
    assert "seed: 2" in (command.run_dir / "config.yaml").read_text()
    capfd.readouterr()
    (command.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert command.exit_code("train") == 2
    assert "exists" in capfd.readouterr().err


def test_ctrl_c_tells_what_is_saved_and_how_to_go_on(
    command: Command, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    saved: list[str] = []

    def interrupted() -> None:
        for name in saved:
            (command.run_dir / "checkpoints" / name).mkdir(parents=True)
        raise KeyboardInterrupt

    ranks.may_start(interrupted)
    assert command.exit_code("train") == 130
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "no checkpoint yet" in error
    saved[:] = ["step_000010", "step_000020"]
    assert command.exit_code("train", "run.overwrite=true") == 130
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "step_000020: rerun the command with run.resume=auto" in error


@pytest.mark.full
def test_arguments_refused_by_sglang_are_named_before_any_start(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    code = command.exit_code("train", "rollout.server_args.schedule_policy=best")
    told = "rollout.server_args", "schedule_policy=best", "--schedule-policy", "best"
    assert_refused(command, code, capfd.readouterr().err, *told)


def test_an_engine_started_by_hand_is_asked_the_same(
    command: Command,
    capfd: pytest.CaptureFixture[str],
    python: Python,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python.refuse("no such size")
    config = train_config(command.folder, command.model)
    monkeypatch.setenv("ENGINE_KEY", "secret")
    key = "rollout.api_key_variable=ENGINE_KEY"
    code = command.exit_code("engine", "rollout.server_args.ep_size=2", key, config=config)
    assert_refused(
        command, code, capfd.readouterr().err, "rollout.server_args: ", "ep_size=2 (no such size)"
    )
    ((arguments, _),) = python.programs()
    assert arguments[2] == "check" and arguments[-2:] == ["--ep-size", "2"], "none was started"


@pytest.mark.parametrize("name", ["train", "sft"])
def test_missing_tracker_is_refused_before_the_run(
    command: Command, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python finds no such package
    code = command.exit_code(name, "monitoring.wandb=online")
    assert_refused(command, code, capfd.readouterr().err, "monitoring.wandb", "pip install")


def test_a_manifest_nested_too_deeply_is_one_line(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    make_run_dir(RunConfig(), RunConfig(name="tiny", root=str(command.run_dir.parent)))
    checkpoint = command.run_dir / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"format": ' + "[" * 100_000)
    code = command.exit_code("train", "--check", "run.resume=auto")
    error = capfd.readouterr().err
    assert code == 2 and error.count("\n") == 1, error
    said = "manifest.json cannot be read (it is nested too deeply): the checkpoint is damaged"
    assert f"{checkpoint}: {said}" in error

"""What `evaluate --check` sees before a job waits in a queue."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from tiny_runs import evaluate_config, make_model, train_config

from vapo_megatron.config.evaluate import EvaluateConfig
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.evaluation.check import Evaluation


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The export of a run that was trained with a chat template."""
    config = TrainConfig.model_validate(
        train_config(tmp_path, make_model(tmp_path / "model"))
        | {"run": {"name": "trained", "root": str(tmp_path / "others")}}
    )
    values = config.model_dump(mode="json")
    values["data"]["prompt"]["user_template"] = "Question: {problem}"
    run_dir = tmp_path / "others" / "trained"
    actor = run_dir / "hf" / "final" / "actor"
    shutil.copytree(tmp_path / "model", actor)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(values))
    return actor


def test_a_model_that_was_trained_on_another_prompt(
    tmp_path: Path, exported: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = Command(tmp_path, exported)
    assert command.exit_code("evaluate", "--check") == 0
    said = capfd.readouterr().err
    assert "caution: data.prompt.user_template='{problem}'" in said
    run_dir = exported.parents[2]
    assert f"evaluate {run_dir}/config.yaml --checkpoint final`" in said
    same = "data.prompt.user_template='Question: {problem}'"
    assert command.exit_code("evaluate", "--check", same) == 0
    assert not capfd.readouterr().err
    (run_dir / "config.yaml").write_text("run: [of, another, version]")
    assert command.exit_code("evaluate", "--check") == 0
    assert not capfd.readouterr().err


def test_responses_of_another_model_are_refused(
    tmp_path: Path, exported: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = Command(tmp_path, tmp_path / "model")
    file = command.run_dir / "evaluation" / "sums.jsonl"
    file.parent.mkdir(parents=True)
    row = {
        "id": "0",
        "index": 0,
        "response": "4",
        "tokens": 1,
        "finish_reason": "stop",
        "origin": "that of another model",
    }
    file.write_text(json.dumps(row) + "\n")
    before = file.read_bytes()
    assert command.exit_code("evaluate", "--check", "run.resume=auto") == 2
    assert f"{file}: its responses come from another model" in capfd.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        ("hf/final", "give {run}/hf/final/actor"),
        ("checkpoints/step_000002/actor", "convert-megatron-to-hf --checkpoint {run}/checkpoints"),
    ],
)
def test_a_folder_of_a_run_that_is_no_model(
    tmp_path: Path,
    exported: Path,
    capfd: pytest.CaptureFixture[str],
    folder: str,
    remedy: str,
) -> None:
    run_dir = exported.parents[2]
    saved = run_dir / "checkpoints" / "step_000002" / "actor"
    saved.mkdir(parents=True)
    (saved / "model.json").write_text("{}")
    command = Command(tmp_path, run_dir / folder)
    assert command.exit_code("evaluate", "--check") == 2
    assert remedy.format(run=run_dir) in capfd.readouterr().err


def _origin(folder: Path, changes: dict[str, Any], **row: Any) -> str:
    values = evaluate_config(folder, folder / "model") | changes
    if "server" in values:
        del values["model"]
    settings = EvaluateConfig.model_validate(values)
    prompt = Prompt(**{"id": "0", "problem": "1 + 1", "answer": "2", "token_ids": ()} | row)
    return Evaluation(settings, {"sums": [prompt]}).origin("sums")


def test_responses_are_told_apart_by_all_they_depend_on(tmp_path: Path) -> None:
    """Those of a start with other settings were taken for this one's, and graded again."""
    plain = _origin(tmp_path, {})
    assert plain == _origin(tmp_path, {}, answer="3")  # grades are made again
    assert plain != _origin(tmp_path, {"rollout": {"server_args": {"kv_cache_dtype": "fp8_e5m2"}}})

    (tmp_path / "model").mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"):
        before = _origin(tmp_path, {})
        (tmp_path / "model" / name).write_text('{"rope_theta": 10000.0}')
        assert before != _origin(tmp_path, {}), name
    before = _origin(tmp_path, {})
    (tmp_path / "model" / "config.json").write_text('{"rope_theta": 1000000.0}')
    assert before != _origin(tmp_path, {})
    before = _origin(tmp_path, {})
    (tmp_path / "model" / "README.md").touch()
    assert before == _origin(tmp_path, {})

    agent: dict[str, Any] = {"rollout": {"agent": "module:run"}}
    above = {"reward": {"verifier": "function", "function": "module:f", "correct_above": 0.9}}
    rows: list[dict[str, Any]] = [{}, {"answer": "3"}, {"extra": {"map": "a"}}]
    origins = [_origin(tmp_path, agent, **row) for row in rows]
    assert len({*origins, _origin(tmp_path, agent | above)}) == 4

    server = {"server": {"url": "http://host/v1", "model": "m"}}
    rows = [{}, {"before": ({"role": "system", "content": "short"},)}]
    assert len({_origin(tmp_path, server, **row) for row in rows}) == 2

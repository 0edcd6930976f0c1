"""`vapo-megatron evaluate` for real: a tiny model on its own SGLang server."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from called import exit_code_of
from command_lines import command_line
from tiny_runs import evaluate_config, make_model, problems, write_config, write_rows

from vapo_megatron import cli
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.engines.engine_limits import engine_devices
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.metrics import maj_at_k
from vapo_megatron.megatron.platform import Platform

pytestmark = pytest.mark.full

SAMPLES = 8


@pytest.fixture(scope="module")
def running_before() -> set[int]:
    """Processes of other tests: the engine that a session shares may be among them."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, running_before: set[int]
) -> Iterator[tuple[Path, str]]:
    """The run directory of an evaluation and its output: one file as two sets, and a part of
    it as a third."""
    folder = tmp_path_factory.mktemp("evaluation")
    config = evaluate_config(folder, make_model(folder / "model"))
    path = str(write_rows(folder / "eval.jsonl", problems(12)))
    config["data"]["eval"] = [
        {"name": "first", "path": path, "samples": SAMPLES},
        {"name": "again", "path": path, "samples": SAMPLES},
        {"name": "part", "path": path, "samples": 2, "limit": 3},
    ]
    config["sampling"]["max_new_tokens"] = 24
    config |= {
        "reward": {"answer_format": "auto", "workers": 1},
        "rollout": {"max_total_tokens": 16384},
    }
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        output = _Output()
        patch.setattr(sys, "stdout", output)
        patch.setattr(
            sys, "argv", ["vapo-megatron", "evaluate", str(write_config(folder / "e.yaml", config))]
        )
        cli.main()
    assert not end.value.code
    yield folder / "runs" / "tiny", "".join(output.lines)


class _Output:
    """Standard output that is no terminal."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        self.lines.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_check_says_what_can_be_read_and_answers_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "model")
    file = str(write_config(tmp_path / "e.yaml", evaluate_config(tmp_path, model)))

    def check(*overrides: str) -> tuple[int, str]:
        code = exit_code_of("evaluate", file, "--check", *overrides)
        said = capfd.readouterr()
        return code, said.out + said.err

    code, said = check()
    assert code == 0 and "sums: 4 problems\n" in said and f"model.path={model}: qwen3, " in said
    code, said = check("model.path=later")  # a run that writes it is still to come
    assert code == 0 and "sums: 4 problems\n" in said and "model.path=later: missing" in said
    agent = ("rollout.agent=module:run", "rollout.episode.max_tokens=100000")
    code, said = check(*agent)
    assert (
        code == 2 and "rollout.episode.max_tokens=100000" in said and "the model's context" in said
    )
    external = (
        "model=null",
        "server.url=http://127.0.0.1:9",
        "server.model=m",
        "server.api_key_variable=NOT_SET",
    )
    code, said = check(*external)
    assert code == 2 and "NOT_SET" in said
    (model / "model.safetensors").write_bytes(b"cut")
    code, said = check()
    assert code == 2 and "model.safetensors" in said
    (tmp_path / "eval.jsonl").write_text('{"problem": "1"}\n')
    code, said = check("model.path=later")
    assert code == 2 and "eval.jsonl" in said
    assert not (tmp_path / "runs").exists()


def _responses(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run_dir / "evaluation" / f"{name}.jsonl").read_text().splitlines()
    ]


def test_the_figures_are_those_of_the_responses(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    metrics = json.loads((run_dir / "evaluation.json").read_text())
    assert [entry["name"] for entry in metrics["sets"]] == ["first", "again", "part"]
    assert time.time() - 3600 < metrics["unix_seconds"] <= time.time()
    first = metrics["sets"][0]
    rows = _responses(run_dir, "first")
    assert len(rows) == 12 * SAMPLES and (first["problems"], first["samples"]) == (12, SAMPLES)
    groups = [rows[start : start + SAMPLES] for start in range(0, len(rows), SAMPLES)]
    assert [{row["id"] for row in group} for group in groups] == [{f"p{n}"} for n in range(12)]
    # A random model says the right digit now and then: neither never nor always.
    assert 0 < sum(row["correct"] for row in rows) < len(rows)
    assert first["avg_at_k"] == pytest.approx(sum(row["correct"] for row in rows) / len(rows))
    assert first["low"] <= first["avg_at_k"] <= first["high"]
    assert first["pass_at_k"] == pytest.approx(
        sum(any(row["correct"] for row in group) for group in groups) / 12
    )
    votes = [
        maj_at_k([row["extracted"] or None for row in g], [row["correct"] for row in g])
        for g in groups
    ]
    assert first["maj_at_k"] == pytest.approx(sum(votes) / 12)
    assert first["response_length"] == pytest.approx(sum(row["tokens"] for row in rows) / len(rows))
    assert first["truncated"] == pytest.approx(
        sum(row["finish_reason"] == "length" for row in rows) / len(rows)
    )


def test_a_verdict_follows_from_what_the_response_says(finished: tuple[Path, str]) -> None:
    for row in _responses(finished[0], "first"):
        if row["correct"]:
            assert (
                row["finish_reason"] == "stop"
                and re.findall(r"\d", row["extracted"])[-1] == row["answer"]
            )
        assert row["tokens"] <= 24 and row["weight_version"] == 0


def test_a_set_depends_on_its_problems_and_the_seed_alone(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    first = _responses(run_dir, "first")
    assert first == _responses(run_dir, "again")
    assert len({row["response"] for row in first}) > len(first) / 4
    part = _responses(run_dir, "part")
    of_first = [row for row in first if row["index"] < 2][: len(part)]
    assert [row | {"origin": ""} for row in part] == [row | {"origin": ""} for row in of_first]
    assert len(part) == 3 * 2 and part[0]["origin"] != first[0]["origin"]


def test_the_table_shows_every_set_and_where_its_files_are(
    finished: tuple[Path, str],
) -> None:
    run_dir, output = finished
    metrics = json.loads((run_dir / "evaluation.json").read_text())
    for title in ("avg@k", "95 % interval", "pass@k", "maj@k", "tokens", "truncated"):
        assert title in output
    for entry in metrics["sets"]:
        line = next(
            line for line in output.splitlines() if line.strip().startswith(entry["name"] + " ")
        )
        for name in ("avg_at_k", "low", "high", "pass_at_k", "maj_at_k"):
            assert f"{entry[name]:.3f}" in line
    for name in ("evaluation.json", "evaluation", "logs"):
        assert str(run_dir / name) in output and (run_dir / name).exists()


def test_nothing_runs_on(finished: tuple[Path, str], running_before: set[int]) -> None:
    children = (
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in running_before
    )
    commands = [" ".join(command_line(child)) for child in children]
    assert not [
        command for command in commands if "server_main" in command or "rewards.worker" in command
    ]


CPU = Platform("cpu", "gloo", "fork")


@pytest.mark.parametrize(("tp", "engines"), [(1, 8), (2, 4), (8, 1)])
def test_engines_take_all_gpus_of_a_machine(
    gpus: Callable[[int], None], tp: int, engines: int
) -> None:
    gpus(8)
    config = RolloutConfig(tp=tp, num_engines=3)
    found = engine_devices(config, replace(CPU, device_type="cuda"))
    assert len(found) == engines and [gpu for one in found for gpu in one or ()] == list(range(8))
    assert engine_devices(config, CPU) == [None] * 3


def test_engines_that_would_leave_gpus_idle_are_refused(gpus: Callable[[int], None]) -> None:
    gpus(8)
    with pytest.raises(BadInput, match=r"rollout\.tp=3 does not divide the 8 GPUs"):
        engine_devices(RolloutConfig(tp=3), replace(CPU, device_type="cuda"))

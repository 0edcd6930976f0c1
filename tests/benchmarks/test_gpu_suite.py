"""`make bench-gpu`: every part's options are such as its program takes, and without a GPU all parts
run at sizes of a CPU."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_suite import PARTS, checks_of, main

ROOT = Path(__file__).parents[2]


class Parsed(Exception):
    """The program has understood its options."""


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_a_program_understands_the_options_of_its_part(
    name: str, has_gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *given: Any) -> argparse.Namespace:
        raise Parsed(parse_args(parser, *given).json)

    (check,) = checks_of([name], tmp_path, has_gpu)
    module = check.command[check.command.index("-m") + 1]
    monkeypatch.setattr("sys.argv", [module, *check.command[check.command.index(module) + 1 :]])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed, match=f"{name}.json"):
        importlib.import_module(module).main()


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["hed"])
    assert ended.value.code == 2
    assert "hed: no such part; choose from head, update" in capsys.readouterr().err


def test_parts_that_the_budget_leaves_out_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["update", "--budget", "1", "--out", str(tmp_path)]) == 3
    assert "no time left of the budget of 1 s" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("parts", [("head", "update", "fixed"), ("phases", "collection", "sync")])
def test_parts_run_without_a_gpu_and_print_their_ratios(
    parts: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_suite", *parts, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + (tmp_path / "results.md").read_text()[-3000:]
    for part in parts:
        figures = json.loads((tmp_path / f"{part}.json").read_text())["figures"]
        assert figures and all(figure["ratio"] > 0 for figure in figures)
        assert f"{part}: {figures[0]['name']}: " in done.stdout
    assert "# Benchmarks beside peers" in (tmp_path / "results.md").read_text()

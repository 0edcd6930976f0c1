"""The command line of every benchmark, which no type checker sees."""

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHARED = {"json"}  # of benchmarks.common.parser
PARSED = ("given", "args")  # what the parsed arguments are called


def taken(tree: ast.Module) -> set[str]:
    """Names of the arguments that a program takes."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "add_argument":
            flags = [flag.value for flag in node.args if isinstance(flag, ast.Constant)]
            names |= {str(flag).lstrip("-").replace("-", "_") for flag in flags}
    return names


def read(tree: ast.Module) -> set[str]:
    """Names of the arguments that it reads."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in PARSED
    }


def with_arguments() -> list[Path]:
    """The benchmarks that have a command line of their own."""
    sources = sorted(BENCHMARKS.glob("*.py"))
    return [path for path in sources if taken(ast.parse(path.read_text()))]


@pytest.mark.parametrize("path", with_arguments(), ids=lambda path: path.stem)
def test_a_benchmark_reads_the_arguments_it_takes(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert read(tree) <= taken(tree) | SHARED


def test_most_benchmarks_have_a_command_line() -> None:
    assert len(with_arguments()) > 20

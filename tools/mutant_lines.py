"""Which tests reach the line that a mutant changes: the others cannot kill it, and are not run.

mutmut knows the tests of a function. A function with many branches has many that go elsewhere.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import coverage
from mutmut.configuration import config

RECORD = Path("tests_of_lines.json")
# The tests of each line of a function as it is without a mutant, counted from its first; with its
# text, to know it by.
Lines = dict[str, tuple[str, dict[int, list[str]]]]


class LinesReached:
    """Lines of what is mutated, by who is at work: a test or a fixture. In the folder that holds
    the mutants."""

    def __init__(self) -> None:
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, include=config().only_mutate
        )
        self._tests: dict[str, set[str]] = defaultdict(set)  # of each that is at work
        self._coverage.start()

    def at_work(self, name: str) -> None:
        """From now on lines are reached by this test or fixture."""
        self._coverage.switch_context(name)

    def counts_for(self, name: str, test: str) -> None:
        """What a test or fixture reaches is reached by this test."""
        self._tests[name].add(test)

    def save(self, every_test: bool) -> None:
        """End, and keep what was found for the runs of the mutants, beside what other tests reached
        unless there are none."""
        self._coverage.stop()
        data = self._coverage.get_data()
        found = {} if every_test else _read()
        for path in map(Path, data.measured_files()):
            by_line = data.contexts_by_lineno(str(path))
            module = ".".join(path.relative_to(Path.cwd()).with_suffix("").parts)
            for name, function, text in _originals(path):
                before, lines = found.pop(f"{module}.{name}", (text if every_test else "", {}))
                if before != text:  # what the other tests reach is not known
                    continue
                for number in range(function.lineno, (function.end_lineno or 0) + 1):
                    tests = {t for who in by_line.get(number, ()) for t in self._tests[who]}
                    if tests:
                        offset = number - function.lineno
                        lines[offset] = sorted(tests | set(lines.get(offset, ())))
                found[f"{module}.{name}"] = text, lines
        RECORD.write_text(json.dumps(found))
        _read.cache_clear()


def reaching(mutant: str, tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Of the tests of a mutant's function, those that reach what it changes, all where that is not
    known: the quickest first, and those that reach a line of the function which few others do.
        seconds: that each takes."""
    known = _read().get(mutant.rpartition("__mutmut_")[0])
    changed = _changed(mutant)
    if known is None or changed is None or changed[0] != known[0]:
        return sorted(tests, key=lambda test: seconds[test])
    found = {test for offset in changed[1] for test in known[1].get(offset, ())}
    others: dict[str, int] = {}
    for line in known[1].values():
        for test in found.intersection(line):
            others[test] = min(len(line), others.get(test, len(line)))
    return sorted(found.intersection(tests), key=lambda test: (seconds[test] * others[test], test))


@cache
def _read() -> Lines:
    if not RECORD.is_file():
        return {}
    kept = json.loads(RECORD.read_text())
    return {
        name: (text, {int(n): tests for n, tests in lines.items()})
        for name, (text, lines) in kept.items()
    }


def _originals(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """mutmut's name, definition and text of each function as it is without a mutant."""
    for name, (function, text) in _functions(path).items():
        if name.endswith("__mutmut_orig"):
            yield name.removesuffix("__mutmut_orig"), function, text


@cache
def _functions(path: Path) -> dict[str, tuple[Any, str]]:
    content = path.read_text()
    lines = content.splitlines()
    found = {}
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "__mutmut_" in node.name:
            found[node.name] = node, "\n".join(lines[node.lineno : node.end_lineno])
    return found


def _changed(mutant: str) -> tuple[str, range] | None:
    """The text of the function without the mutant, and the lines of the statement that it changes;
    None: any."""
    module, _, name = mutant.rpartition(".")
    functions = _functions(Path(*module.split(".")).with_suffix(".py"))
    original = functions.get(name.rpartition("__mutmut_")[0] + "__mutmut_orig")
    if original is None or name not in functions:
        return None
    function, text = original
    before = text.splitlines()
    after = functions[name][1].splitlines()
    same = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    if same is None:  # its first line, or its last ones
        return None
    at = function.lineno + 1 + same
    lines = None
    for node in ast.walk(function):  # inner statements come later
        if (
            isinstance(node, ast.stmt)
            and node is not function
            and node.lineno <= at <= (node.end_lineno or 0)
        ):
            inner = [
                part.lineno for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)
            ]
            end = min(inner) - 1 if inner and at < min(inner) else (node.end_lineno or 0)
            lines = range(node.lineno - function.lineno, end - function.lineno + 1)
    return None if lines is None else (text, lines)

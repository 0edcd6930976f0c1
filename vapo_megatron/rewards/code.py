"""The verifier of code: a response's last block of Python, run against the tests of its row in the
agents' sandbox.

Expected results never enter the sandbox: the code can neither print a result that it has not
computed, nor change the comparison.
"""

import ast
import asyncio
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vapo_megatron.agents.sandbox import check_boundary
from vapo_megatron.agents.tools import run_python
from vapo_megatron.errors import BadInput
from vapo_megatron.files import parse_json
from vapo_megatron.rewards.extract import final_part
from vapo_megatron.rewards.grade import Case, Grade
from vapo_megatron.rewards.verifier import Message, Verifier

if TYPE_CHECKING:  # a worker has no use for torch
    from vapo_megatron.data.sample import Prompt

# Of any language, so that the end of one is not the beginning of another; inline code is none.
_BLOCK = re.compile(r"^[^\n`]*```([\w+#-]*)[ \t]*\r?\n(.*?)```", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3")
_LONGEST = 8_000  # characters of what a test expects; a sandbox may print 16 KiB
# Before the code of a test: its input, and errors kept apart from its output.
_INPUT = """import io, sys
sys.stdin, sys.stderr = io.TextIOWrapper(io.BytesIO({!r}.encode())), io.StringIO()
del io, sys
"""


class CodeVerifier(Verifier):
    """Runs a response's code against the tests of its row; code_share rewards the share of them
    that pass."""

    grace_s = 30.0

    def grade(self, message: Message) -> dict[str, Any]:
        """The grade on a response."""
        return grade_code(
            message["ground_truth"],
            message["response"],
            self.config.response_timeout_s,
            self.config.memory_mib,
            self.config.verifier == "code_share",
        )

    def check(self, rows: "Sequence[Prompt]", grade: Callable[[Case], Grade]) -> None:
        """Raise BadInput for a row without tests, or a kernel that cannot confine the code."""
        check_boundary()
        check_tests(rows)


def check_tests(prompts: "Iterable[Prompt]") -> None:
    """Raises BadInput naming the first row whose answer holds no tests that can be run."""
    for prompt in prompts:
        try:
            _tests(prompt.answer)
        except (ValueError, SyntaxError) as error:
            raise BadInput(
                f"{prompt.source}: row {prompt.id}: the answer holds no tests ({error}); expected "
                'lines such as `assert f(1) == 2`, or JSON [{"input": "1 2", "output": "3"}]; '
                "data.fields.answer names the field"
            ) from None


def grade_code(
    answer: str, response: str, seconds: float, memory_mib: int, share: bool
) -> dict[str, Any]:
    """The grade on a response; answer: the tests, which have `seconds` together. share: tests that
    pass score too. Code that is written while thinking, before </think>, is no answer.

    A test is an assert of a call, alone or compared with a literal by == or is, after statements
    that prepare it; or an input with the output that a program prints.
    """
    tests = _tests(answer)
    code = _last_block(final_part(response))
    if code is None:
        return {"correct": False, "reason": "no_answer"}
    deadline = time.monotonic() + seconds
    passed = 0
    for test in tests:
        left = deadline - time.monotonic()
        if left > 0 and _passes(code, test, left, memory_mib):
            passed += 1
        elif not share:
            break
    correct = passed == len(tests)
    grade = {"correct": correct, "reason": "equal" if correct else "different"}
    return grade | ({"reason": "scored", "score": passed / len(tests)} if share else {})


def _last_block(response: str) -> str | None:
    """The last block that is marked as Python, else the last one without a language."""
    blocks = [(language.casefold(), code) for language, code in _BLOCK.findall(response)]
    for languages in (_PYTHON, ("",)):
        codes = [code for language, code in blocks if language in languages]
        if codes:
            return textwrap.dedent(codes[-1]) if codes[-1][:1].isspace() else codes[-1]
    return None


def _tests(answer: str) -> list[tuple[str, str, Any]]:
    """(code to append, standard input, expected result) of each test; a program's expected output
    is a text."""
    try:
        pairs = parse_json(answer)
    except ValueError:
        return _asserts(answer)
    if not isinstance(pairs, list) or not pairs:
        raise ValueError("not a list of tests")
    for pair in pairs:
        if not isinstance(pair, dict) or not all(
            isinstance(pair.get(name), str) for name in ("input", "output")
        ):
            raise ValueError("a test without the texts input and output")
        if len(pair["output"]) > _LONGEST:
            raise ValueError(f"an output longer than {_LONGEST} characters")
    return [("", pair["input"], pair["output"]) for pair in pairs]


def _asserts(source: str) -> list[tuple[str, str, Any]]:
    tests: list[tuple[str, str, Any]] = []
    before = ""
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Assert):
            before += ast.unparse(statement) + "\n"
            continue
        asserted = statement.test
        expected = True
        call = asserted
        if (
            isinstance(asserted, ast.Compare)
            and len(asserted.ops) == 1
            and isinstance(asserted.ops[0], ast.Eq | ast.Is)
        ):
            call = asserted.left
            expected = ast.literal_eval(asserted.comparators[0])
            shown = ast.unparse(call)
        else:
            if isinstance(call, ast.UnaryOp) and isinstance(call.op, ast.Not):
                call = call.operand
                expected = False
            shown = f"bool({ast.unparse(call)})"
        if not isinstance(call, ast.Call):
            raise ValueError(
                f"`{ast.unparse(statement)[:80]}` is not a call compared with a literal"
            )
        tests.append((f"{before}print('\\n' + repr({shown}))\n", "", (expected,)))
    if not tests:
        raise ValueError("no assert")
    return tests


def _passes(code: str, test: tuple[str, str, Any], seconds: float, memory_mib: int) -> bool:
    after, fed, expected = test
    # As a separate text: `from __future__ import` has to come first.
    program = f"{_INPUT.format(fed)}exec({code!r})\n{after}"
    printed, ended_well = asyncio.run(run_python(program, seconds, memory_mib))
    if not ended_well:
        return False
    if isinstance(expected, str):
        return _lines(printed) == _lines(expected)
    try:
        return bool((ast.literal_eval(printed.rstrip("\n").rpartition("\n")[2]),) == expected)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

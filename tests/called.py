"""A command called as a shell would, in this process or in a fork of it."""

import multiprocessing
import sys
import traceback
from typing import Any
from unittest import mock

import pytest
from typer import Typer
from typer.testing import CliRunner

from vapo_megatron import cli


def exit_code_of(*arguments: object) -> int:
    """The exit code of `vapo-megatron ARGUMENTS`, called in this process."""
    line = ["vapo-megatron", *map(str, arguments)]
    with mock.patch.object(sys, "argv", line), pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def called(app: Typer, *arguments: object) -> tuple[int, str]:
    """Exit code and output; after it the traceback of an exception that the command did not expect.

    typer ends without a word where a pipe broke.
    """
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    ended = result.exception
    expected = isinstance(ended, SystemExit) and not isinstance(ended.__context__, BrokenPipeError)
    if ended is None or expected:
        return result.exit_code, result.output
    return result.exit_code, result.output + "".join(traceback.format_exception(ended))


def called_apart(app: Typer, *arguments: object) -> tuple[int, str]:
    """The same in another process, for code that starts a process group: after that no test may
    fork."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_answer, args=(app, arguments, answers), daemon=True)
    process.start()
    answer: tuple[int, str] = answers.get(timeout=120)
    process.join()
    return answer


def _answer(app: Typer, arguments: tuple[object, ...], answers: Any) -> None:
    answers.put(called(app, *arguments))

"""A command called as a shell would, in this process."""

import traceback

from typer import Typer
from typer.testing import CliRunner


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

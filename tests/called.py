"""A command called as a shell would, in this process."""

import traceback

from typer import Typer
from typer.testing import CliRunner


def called(app: Typer, *arguments: object) -> tuple[int, str]:
    """Exit code and output; after it the traceback of an exception that the command did not expect."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is None or isinstance(result.exception, SystemExit):
        return result.exit_code, result.output
    return result.exit_code, result.output + "".join(traceback.format_exception(result.exception))

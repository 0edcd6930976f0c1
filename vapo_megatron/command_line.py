"""Runs a command-line program to its end, with one line on standard error for each refusal."""

import os
import sys
import warnings
from pathlib import Path

import typer

from vapo_megatron.errors import BadInput, told_in_one_line


def refuse_another_copy(running: Path, folder: Path) -> None:
    """Raises BadInput if engines and verifiers, which Python starts in `folder`, would run another
    copy of the code."""
    installed_copy = folder / running.name
    if (installed_copy / "__init__.py").is_file() and not installed_copy.samefile(running):
        raise BadInput(
            f"{installed_copy} is another copy of {running.name} than {running}, which runs here: "
            f"engines would use "
            "that copy; go to another directory, or use the environment of that copy"
        )


def _refuse_no_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise BadInput(
            "the working directory was deleted: go to one that exists, `cd` is enough"
        ) from None


def run_app(app: typer.Typer, name: str) -> None:
    """Run an app to the end of the process; name begins the line of a failure.

    A wrong option ends with one line and code 2, a VapoError with its own code, Ctrl-C with 130.
    Warnings of libraries are not shown.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ["PYTHONWARNINGS"] = (
            "ignore"  # of spawned ranks: imports warn before any code of ours runs there
        )
    try:
        with told_in_one_line(name):
            _refuse_no_folder()
            code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        # typer brings click along, or a copy of it, depending on its version: known by what its
        # errors can do.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            print(
                f"{name}: {' '.join(error.format_message().split())} (see --help)", file=sys.stderr
            )
        sys.exit(2)

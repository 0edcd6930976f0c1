"""The ways in which a command can fail; each carries its exit code.

Every message is one line: the file or field, the value found, the expected value, what to do.
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class VapoError(Exception):
    """A failure that is reported to the user in one line, without a stack trace."""

    exit_code = 1

    def __init__(self, message: str = "", *, shared: bool = False) -> None:
        """shared: every rank raises the same, so one of them tells it."""
        super().__init__(message)
        self.shared = shared


class BadInput(VapoError):
    """Something that the user gave (a key, a file, a row, a checkpoint) cannot be used. Exit code
    2."""

    exit_code = 2


class RunFailed(VapoError):
    """The run failed for a reason that trying again would not fix. Exit code 1."""

    exit_code = 1


class TryAgain(VapoError):
    """The run was interrupted by something passing (a lost node, a dead engine, a full disk). Exit
    code 75 (EX_TEMPFAIL).

    What host memory holds of its state is kept for the next start.
    """

    exit_code = 75


class Interrupted(VapoError):
    """Ctrl-C. Exit code 130."""

    exit_code = 130


def reason_of(error: BaseException) -> str:
    """Another library's error as part of such a line: its type and message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextmanager
def told_in_one_line(prefix: str) -> Iterator[None]:
    """End the program where a VapoError comes up in here: its line on standard error, and its exit
    code."""
    try:
        yield
    except VapoError as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(
            f"{prefix}: {str(error.filename)[:80]}...: name too long: give a shorter one",
            file=sys.stderr,
        )
        sys.exit(BadInput.exit_code)

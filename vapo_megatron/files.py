"""Files that are written completely or not at all."""

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vapo_megatron.errors import BadInput, TryAgain

# Of Linux: AT_FDCWD, and the flag RENAME_EXCHANGE.
_HERE = -100
_EXCHANGE = 2


class CannotWrite(BadInput):
    """The file system refuses: bad input before a run begins, an interruption (75) while it goes
    on."""


def cannot_write(path: Path, error: Exception) -> CannotWrite:
    """The error that says why nothing can be written at a path."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[
        0
    ]
    return CannotWrite(f"{path}: cannot be written ({reason}): make room there")


@contextmanager
def refusals_interrupt() -> Iterator[None]:
    """What the file system refuses in here interrupts the run. Raises TryAgain for it."""
    try:
        yield
    except CannotWrite as error:
        raise TryAgain(
            f"{error}, then start again with run.resume=auto", shared=error.shared
        ) from error


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO]:
    """Open a file beside `path` for writing ("w": UTF-8 text, "wb": bytes) that takes the place of
    `path` at the end.

    Missing parent directories are made. Where the body raises, `path` is left as it was and nothing
    stays beside it. Raises CannotWrite where the file system refuses the write (full disk, no
    permission).
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def follow_umask(path: Path) -> None:
    """Give a file the permissions that a plain open() would have: some libraries make theirs for
    the owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def exchanged(first: Path, second: Path) -> bool:
    """Have two paths swap their names at once; whether the system and its file system can."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    return (
        swap is not None
        and swap(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0
    )


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a folder, whose files are on the disk, to `target`; a folder of that name is removed.
    Raises OSError; both are then as they were.

    Where the file system cannot swap two names at once, a kill between two renames leaves the
    earlier folder beside target, under the new one's temporary name with ".old" at its end.
    """
    for parent, _, _ in os.walk(folder):
        sync(Path(parent))
    old = folder
    if not target.exists():
        folder.rename(target)
    elif not exchanged(folder, target):
        old = target.rename(folder.with_name(f"{folder.name}.old"))
        try:
            folder.rename(target)
        except OSError:
            old.rename(target)
            raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file or folder on the disk when this returns. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """json.loads(), for a text from outside.

    Raises:
        ValueError: it is not JSON, or nested so deeply that Python gives up.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

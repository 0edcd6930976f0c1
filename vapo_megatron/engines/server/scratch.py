"""The folder of a server's temporary files, locked for as long as its owner lives."""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

_logger = logging.getLogger(__name__)

PREFIX = "vapo-engine-"
_LOCK = "lock"  # in the folder of temporary files; held while its owner lives
_LONGEST_SOCKET = 107  # bytes in a path that is the name of a socket


def short_temporary() -> str | None:
    """A directory for a server's sockets, whose names the system bounds; None: the default one is
    short enough."""
    temporary = tempfile.gettempdir()
    if len(os.fsencode(temporary)) + len(f"/{PREFIX}12345678/tmp12345678") <= _LONGEST_SOCKET:
        return None
    _logger.warning("TMPDIR=%s is too long for the sockets of engines, which go to /tmp", temporary)
    return "/tmp"


def locked(scratch: Path) -> IO[bytes]:
    """The lock of a server's folder, which gets its name only once it is held."""
    unnamed = scratch / f".{_LOCK}"
    file = unnamed.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    unnamed.rename(scratch / _LOCK)
    return file


def remove_left_folders(temporary: Path) -> None:
    """Remove this user's folders of servers whose owner and guard were both killed: nobody holds
    their locks."""
    for path in temporary.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open("rb") as lock:
            if path.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)

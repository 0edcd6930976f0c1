"""A directory that is written over a long time: resumable while it grows, and whole once it has its name."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from vapo_megatron.config.atomic import atomic_write, sync
from vapo_megatron.errors import BadInput, VapoError

PROGRESS_FILE = ".progress.json"
LOCK_FILE = ".lock"


def check_absent(out: Path) -> None:
    """Raises BadInput where there is something that would be written over."""
    if out.exists() or out.is_symlink():
        raise BadInput(f"{out}: exists already; name another place, or remove it")


class WorkFolder:
    """OUT.partial, which becomes OUT on leaving without an exception; a context manager.

    After a reported error it is removed: what it was made from has to change, or the disk is full. Where the program is
    stopped (signal, lost machine) it stays, and the next start that asks for the same goes on from the files that were
    finished; one that asks for something else starts anew.

    Raises:
        BadInput: OUT is there already, another process is writing it, or the file system refuses.
    """

    def __init__(self, out: Path, request: dict[str, Any]) -> None:
        """request: everything that decides what is written, as plain data."""
        self._out = out
        self.path = out.with_name(f"{out.name}.partial")
        # As it comes back from the file.
        self._request = json.loads(json.dumps(request))
        self._finished: dict[str, Any] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        check_absent(self._out)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._finished = self._finished_before()
            if not self._finished:
                for entry in self.path.iterdir():
                    if entry.name != LOCK_FILE:
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except OSError as error:
            raise self.refused(error) from None
        return self

    @property
    def resumed(self) -> int:
        """How many files were finished when this start found them."""
        return len(self._finished)

    def check_space(self, nbytes: int) -> None:
        """Raises BadInput where the disk has no room for so many bytes, less those of the finished files."""
        missing = nbytes - sum(file["size"] for file in self._finished.values())
        free = shutil.disk_usage(self.path).free
        if missing > free:
            raise BadInput(
                f"{self._out}: {missing / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free on its disk: "
                "free or name another place"
            )

    def note_of(self, name: str) -> Any | None:
        """What finish() was given with a file that is there in full, or None."""
        finished = self._finished.get(name)
        path = self.path / name
        if finished is None or not path.is_file() or path.stat().st_size != finished["size"]:
            return None
        return finished["note"]

    def finish(self, name: str, note: Any) -> None:
        """Remember that a file is complete. note: plain data, not None."""
        sync(self.path / name)
        self._finished[name] = {"size": (self.path / name).stat().st_size, "note": note}
        with atomic_write(self.path / PROGRESS_FILE) as file:
            json.dump({"request": self._request, "finished": self._finished}, file)

    def refused(self, error: Exception) -> BadInput:
        """The error that says why nothing can be written."""
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
        return BadInput(f"{self._out}: cannot be written ({reason}): free or name another place")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._put_in_place()
            elif issubclass(kind, VapoError):
                shutil.rmtree(self.path, ignore_errors=True)
        except OSError as refusal:
            shutil.rmtree(self.path, ignore_errors=True)
            raise self.refused(refusal) from None
        finally:
            if self._lock is not None:
                self._lock.close()

    def _take_lock(self) -> None:
        self._lock = (self.path / LOCK_FILE).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise BadInput(f"{self.path}: another process is writing it; wait for it, or name another place") from None

    def _finished_before(self) -> dict[str, Any]:
        try:
            progress = json.loads((self.path / PROGRESS_FILE).read_text(encoding="utf-8"))
            return dict(progress["finished"]) if progress["request"] == self._request else {}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}

    def _put_in_place(self) -> None:
        for name in (PROGRESS_FILE, LOCK_FILE):
            (self.path / name).unlink(missing_ok=True)
        for parent, _, _ in os.walk(self.path):
            sync(Path(parent))
        self.path.rename(self._out)
        sync(self._out.parent)

"""One live run per run directory: a file next to it names its process, which keeps touching the
file.

File locks do not work on all shared file systems. A file that is created with O_EXCL and touched
regularly does.
"""

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from vapo_megatron.errors import BadInput
from vapo_megatron.files import parse_json

_logger = logging.getLogger(__name__)

_BEAT_SECONDS = 15.0
# A process that shows no sign of life for so long is gone. Network file systems show a touch up to
# 60 s late.
_STALE_SECONDS = 180.0
# Clocks of two nodes are not that far apart: a touch that is older by this node's clock needs no
# watching.
_CLOCKS_SECONDS = 3600.0


@dataclass(frozen=True)
class Holder:
    """A process that works in a run directory.

    Attributes:
        host: its host name, for messages.
        machine: the boot and the process namespace in which `pid` means something.
        pid: its process id.
        born: when it started, in clock ticks since boot, since process ids are used again.
        job: the id of its Slurm job; empty outside Slurm.
        restart: how often Slurm had requeued that job, and the attempt within that try
            (slurm/lib.sh).
    """

    host: str
    machine: str
    pid: int
    born: int
    job: str
    restart: str

    @classmethod
    def from_json(cls, text: str) -> "Holder":
        """Inverse of asdict(); fields written by another version are ignored."""
        row = parse_json(text)
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> "Holder":
        """This process."""
        slurm_restart = environment.get("SLURM_RESTART_COUNT", "0")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            host=socket.gethostname(),
            machine=f"{boot} {os.readlink('/proc/self/ns/pid')}",
            pid=os.getpid(),
            born=_born(os.getpid()) or 0,
            job=environment.get("SLURM_JOB_ID", ""),
            restart=f"{slurm_restart}.{environment.get('VAPO_ATTEMPT', '0')}",
        )

    def lives(self, seen_from: "Holder") -> bool | None:
        """Whether the process still runs; None if that cannot be known from here."""
        if self.job and self.job == seen_from.job and self.restart != seen_from.restart:
            return False  # an earlier try of the same job
        if self.machine == seen_from.machine:
            return _born(self.pid) == self.born
        return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")


def _interrupt() -> None:
    """End this process as Ctrl-C does: saving would write where another run does. A shell without
    job control starts its background jobs to ignore that: then as kill -9 does."""
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGKILL if is_ignored else signal.SIGINT)


class Lease:
    """The right to work in a run directory, from take() to the end of the `with` block, however
    that comes."""

    def __init__(
        self,
        run_dir: Path,
        environment: Mapping[str, str] = os.environ,
        beat: float = _BEAT_SECONDS,
        stale: float = _STALE_SECONDS,
        end_run: Callable[[], None] = _interrupt,
    ) -> None:
        """Takes nothing yet. beat: seconds between signs of life; stale: seconds without one that
        make it void; end_run: called from another thread where another process has taken it."""
        self._end_run = end_run
        self._run_dir = run_dir
        self._environment = environment
        self._beat = beat
        self._stale = stale
        # Two names of one directory, through a symbolic link, are one lease.
        place = run_dir.resolve()
        self._path = place.with_name(f".{place.name}.lease")
        self._holder: Holder | None = None
        self._over = threading.Event()

    def take(self) -> None:
        """Take it, once. A holder on another machine is watched for signs of life first.

        Raises:
            BadInput: another live process works in the run directory, or the file system refuses.
        """
        if self._holder is not None:
            return
        holder = Holder.here(self._environment)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while not self._create(holder):
                self._free(holder)
        except OSError as error:
            raise BadInput(
                f"run.root: {self._run_dir} cannot be made ({error.strerror or error}): make room, "
                "or set run.root to another disk"
            ) from error
        self._holder = holder
        threading.Thread(target=self._touch, name="lease", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(OSError):
            if self._holder is not None and _look(self._path)[0] == self._holder:
                self._path.unlink()
        self._holder = None

    def _create(self, holder: Holder) -> bool:
        """Make the file; False where there is one."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(holder), file)
        except OSError:
            self._path.unlink()
            raise
        return True

    def _free(self, here: Holder) -> None:
        """Remove the file once its holder is known to be gone; do nothing where it has changed
        meanwhile."""
        holder, touched = _look(self._path)
        if holder is not None:
            lives = holder.lives(here)
        else:
            lives = None
        if touched is None:
            return
        if lives is False:
            self._remove(holder)
            return
        name = holder or "another process"
        age = max(0.0, time.time() - touched)
        if lives is None and age < _CLOCKS_SECONDS:
            _logger.warning(
                "%s: %s held it; watching %.0f s for a sign of life",
                self._run_dir,
                name,
                self._stale,
            )
            end = time.monotonic() + self._stale
            while not lives and time.monotonic() < end:
                time.sleep(min(1.0, self._beat / 4))
                if (now := _look(self._path)) != (holder, touched):
                    if now[0] != holder or now[1] is None:
                        return
                    lives = True
        if lives:
            raise BadInput(
                f"{self._run_dir}: {name} works in it, last sign of life {age:.0f} s ago: "
                "wait for its end, end it, or choose another run.name"
            )
        self._remove(holder)

    def _remove(self, holder: Holder | None) -> None:
        """Remove the file of a holder that is gone, unless another process has taken over
        meanwhile."""
        aside = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if _look(aside)[0] != holder:
            aside.rename(self._path)
            return
        _logger.warning(
            "%s: taken over from %s, which is gone", self._run_dir, holder or "a process"
        )
        aside.unlink()

    def _touch(self) -> None:
        missed = 0
        # A rival may hold it aside for a moment
        while missed < 2 and not self._over.wait(self._beat):
            with suppress(OSError):  # the file system may be away for a moment
                if _look(self._path)[0] == self._holder:
                    missed = 0
                else:
                    missed = missed + 1
                if not missed:
                    os.utime(self._path)
                elif missed == 2 and self._taken_again():
                    missed = 0
        if missed == 2:
            _logger.error(
                "%s: another run has taken it over; this one ends, before both write there",
                self._run_dir,
            )
            self._end_run()

    def _taken_again(self) -> bool:
        """Make the file again where it was removed and nobody else has made one."""
        assert self._holder is not None
        if not self._run_dir.parent.is_dir() or not self._create(self._holder):
            return False
        _logger.warning("%s: its lease was removed, and is made again", self._run_dir)
        return True


def _look(path: Path) -> tuple[Holder | None, float | None]:
    """The holder (None: not written to the end) and when the file was last touched (None: there is
    no such file)."""
    try:
        # Opened, since network file systems answer stat() from a cache.
        with path.open(encoding="utf-8") as file:
            touched = os.fstat(file.fileno()).st_mtime
            text = file.read()
    except FileNotFoundError:
        return None, None
    try:
        return Holder.from_json(text), touched
    except (ValueError, TypeError, KeyError):
        return None, touched


def _born(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if stat[0] in "ZX":
        return None
    return int(stat[19])

"""One live run per run directory: a file beside it names its process, which keeps touching it.

File locks do not work on all shared file systems; a file that is made with O_EXCL and touched again and again does.
Ages are taken from the file system's own clock, so that clocks of nodes may differ.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from vapo_megatron.errors import BadInput

_logger = logging.getLogger(__name__)

_BEAT_SECONDS = 15.0
# Without a sign of life for so long, whoever held it is gone. Network file systems show a touch up to 60 s late.
_STALE_SECONDS = 180.0


@dataclass(frozen=True)
class Holder:
    """A process that works in a run directory.

    Attributes:
        host: for people.
        machine: boot and process namespace in which `pid` means something.
        born: when it started, in clock ticks since boot: process ids come again.
        job: Slurm's id of its job; empty outside Slurm.
        restart: how often Slurm had requeued that job, and which attempt of that try it is (slurm/lib.sh).
    """

    host: str
    machine: str
    pid: int
    born: int
    job: str
    restart: str
    token: str

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> "Holder":
        """This process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(
            host=socket.gethostname(),
            machine=f"{boot} {os.readlink('/proc/self/ns/pid')}",
            pid=os.getpid(),
            born=_born(os.getpid()) or 0,
            job=environment.get("SLURM_JOB_ID", ""),
            restart=f"{environment.get('SLURM_RESTART_COUNT', '0')}.{environment.get('VAPO_ATTEMPT', '0')}",
            token=secrets.token_hex(8),
        )

    def lives(self, seen_from: "Holder") -> bool | None:
        """Whether it is still there; None where that cannot be known from here."""
        if self.job and self.job == seen_from.job and self.restart != seen_from.restart:
            return False  # Slurm has requeued the job, or its script has begun again: what was before is over
        return _born(self.pid) == self.born if self.machine == seen_from.machine else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")


class Lease:
    """The right to work in a run directory, from take() to the end of the `with` block, however that comes."""

    def __init__(
        self,
        run_dir: Path,
        environment: Mapping[str, str] = os.environ,
        beat: float = _BEAT_SECONDS,
        stale: float = _STALE_SECONDS,
    ) -> None:
        """Nothing is taken yet. beat, stale: seconds between signs of life, and without one until it is void."""
        self._run_dir, self._environment, self._beat, self._stale = run_dir, environment, beat, stale
        self._path = run_dir.with_name(f".{run_dir.name}.lease")
        self._holder: Holder | None = None
        self._over = threading.Event()

    def take(self) -> None:
        """Take it, once. A holder of whom nothing is known is watched for signs of life first.

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
                f"run.root: {self._run_dir} cannot be made ({error.strerror or error}): make room, or set "
                "run.root to another disk"
            ) from error
        self._holder = holder
        threading.Thread(target=self._touch, name="lease", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._holder is not None and _look(self._path)[0] == self._holder:
            with suppress(OSError):
                self._path.unlink()
        self._holder = None

    def _create(self, holder: Holder) -> bool:
        """Make the file, unless there is one."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(holder), file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self._path.unlink()
            raise
        return True

    def _free(self, own: Holder) -> None:
        """Return once no process holds it. Raises BadInput as soon as it is known that one does."""
        holder, touched = _look(self._path)
        lives = holder.lives(own) if holder is not None else None
        first, warned = touched, False
        while touched is not None and lives is not False:
            age = max(0.0, self._now() - touched)
            if lives or touched != first:
                raise BadInput(
                    f"{self._run_dir}: {holder or 'another process'} works in it, last sign of life {age:.0f} s ago: "
                    "wait for its end, end it, or choose another run.name"
                )
            if age > self._stale:
                break
            if not warned:
                self._warn(f"{holder or 'another process'} held it; waiting up to {self._stale - age:.0f} s for a sign")
                warned = True
            time.sleep(min(1.0, self._beat / 4))
            now_held_by, touched = _look(self._path)
            if now_held_by != holder:
                return
        if touched is not None:
            self._remove(holder)

    def _remove(self, holder: Holder | None) -> None:
        """Remove the file of a holder that is gone, and no other one's that has come meanwhile."""
        aside = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if _look(aside)[0] != holder:
            aside.rename(self._path)
            return
        self._warn(f"taken over from {holder or 'a process'}, which is gone")
        aside.unlink()

    def _now(self) -> float:
        """The time of the file system."""
        probe = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def _touch(self) -> None:
        missed = 0
        while not self._over.wait(self._beat) and missed < 2:  # it may be aside while another one looks whose it is
            with suppress(OSError):  # a file system that is away for a moment
                missed = 0 if _look(self._path)[0] == self._holder else missed + 1
                if not missed:
                    os.utime(self._path)
        if missed == 2:
            self._warn("its lease is gone: another run took it over, or it was removed; two runs may write here")

    def _warn(self, text: str) -> None:
        _logger.warning("%s: %s", self._run_dir, text)


def _look(path: Path) -> tuple[Holder | None, float | None]:
    """Who holds it (None: not written to the end) and when it was touched last (None: there is no such file)."""
    try:
        # Opened, not asked for by name: network file systems answer that from what they remember.
        with path.open(encoding="utf-8") as file:
            touched = os.fstat(file.fileno()).st_mtime
            text = file.read()
    except FileNotFoundError:
        return None, None
    try:
        return Holder(**json.loads(text)), touched
    except (ValueError, TypeError):
        return None, touched


def _born(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

"""A run under faults of each kind in each of its phases, started again for as long as it ends with
a code that says so.

What a person would do is done: a checkpoint that is named as damaged is removed, then the same
command is given again.
"""

import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import attempts
import psutil
from engine_faults import reset_connections, set_the_clock, slow_down_the_disk

from vapo_megatron import logs
from vapo_megatron.checkpoint.host_memory import host_memory_of
from vapo_megatron.config.train import TrainConfig
from vapo_megatron.run import rank

_DISK_LIMIT = 64 << 10
_STOPPED_SECONDS = 2.0
# Longer than rollout.health.answer_s of the soak, shorter than a stopped rank may be.
_OWNER_STOPPED_SECONDS = 8.0
# Longer than a start waits for its port.
_SQUATTED_SECONDS = 6.0
_CLOCK_SECONDS = 7200
_EARLY = 0.5
_HELD_SECONDS = 20.0
# How likely an attempt is to begin with a fault of its surroundings.
_SURROUNDED = 0.25


@dataclass
class Soak:
    """What became of a run.

    Attributes:
        faults: how many of each kind were done.
        seconds: from each fault to the end of the step that was next, by kind.
        codes: of the attempts, the last one's included.
        left: processes and files that should not be there any more.
        cells: how many were done of each family in each phase.
    """

    faults: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    codes: Counter[int] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)

    def table(self) -> str:
        """A line for each kind of fault: how many, and the median and largest of their seconds."""
        lines = []
        for kind, number in sorted(self.faults.items()):
            found = sorted(self.seconds.get(kind, []))
            told = f"{found[len(found) // 2]:6.1f} {found[-1]:6.1f}" if found else "     -      -"
            lines.append(f"{kind:28} {number:4d} {told}")
        return "\n".join(lines)


class Attempt:
    """One start of the run, in a process that leads its own group."""

    def __init__(self, config: TrainConfig, prepare: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._reader, writer = context.Pipe(duplex=False)
        body = partial(rank.train_rank, config)
        self.process = context.Process(
            target=attempts._start, args=(config, body, prepare, writer, True)
        )
        self.process.start()
        writer.close()

    def family(self) -> dict[str, list[psutil.Process]]:
        """Its living processes, by role."""
        found: dict[str, list[psutil.Process]] = {}
        with suppress(psutil.NoSuchProcess):
            starter = psutil.Process(self.process.pid)
            for process in starter.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    found.setdefault(_role(process, starter.pid), []).append(process)
            parents = {engine.ppid() for engine in found.get("engine", ())}
            if owners := [one for one in found.get("rank", ()) if one.pid in parents]:
                found["owner"] = owners
        return found

    def end(self, seconds: float) -> tuple[int, str]:
        """Exit code and one line."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "an attempt does not end"
        said = ""
        with suppress(EOFError):
            said = self._reader.recv() if self._reader.poll() else ""
        return self.process.exitcode, said


def _role(process: psutil.Process, starter: int) -> str:
    command = process.cmdline()
    if "vapo_megatron.engines.inside.server_main" in command:
        return "engine"
    if "sglang::scheduler" in " ".join(command):
        return "scheduler"
    if "sglang::detokenizer" in " ".join(command):
        return "detokenizer"
    if "vapo_megatron.rewards.worker" in command:
        return "verifier"
    name = (
        Path(f"/proc/{process.pid}/comm").read_text().strip() if process.ppid() == starter else ""
    )
    return "rank" if re.fullmatch(r"rank\d+", name) else "other"


def rows_of(run_dir: Path) -> int:
    """Steps that are done."""
    try:
        return (run_dir / "metrics.jsonl").read_text().count("\n")
    except OSError:
        return 0


# Faults of a process by its role: the signals that it gets, the seconds between them.
SIGNALS: dict[str, tuple[str, list[int]]] = {
    "rank: kill -9": ("rank", [signal.SIGKILL]),
    "rank: stopped": ("rank", [signal.SIGSTOP]),
    "rank: stopped for a while": ("rank", [signal.SIGSTOP, signal.SIGCONT]),
    "engine: kill -9": ("engine", [signal.SIGKILL]),
    "engine: stopped": ("engine", [signal.SIGSTOP]),
    "engine: stopped for a while": ("engine", [signal.SIGSTOP, signal.SIGCONT]),
    "scheduler: kill -9": ("scheduler", [signal.SIGKILL]),
    "scheduler: stopped": ("scheduler", [signal.SIGSTOP]),
    "detokenizer: kill -9": ("detokenizer", [signal.SIGKILL]),
    "detokenizer: stopped": ("detokenizer", [signal.SIGSTOP]),
    "owner: kill -9": ("owner", [signal.SIGKILL]),
    "owner: stopped for a while": ("owner", [signal.SIGSTOP, signal.SIGCONT]),
    "verifier: kill -9": ("verifier", [signal.SIGKILL]),
    "verifier: stopped for a while": ("verifier", [signal.SIGSTOP, signal.SIGCONT]),
}
ASKED = {
    "run: SIGTERM": signal.SIGTERM,
    "run: SIGUSR1": signal.SIGUSR1,
    "run: SIGHUP": signal.SIGHUP,
    "run: kill -9": signal.SIGKILL,
}
# All but the process that started the run stop when that is killed.
STANDING = "run: all stopped, kill -9"
# Its engine is killed, and another program listens where it is to start again.
SQUATTED = "engine: port taken"
FILES = ("checkpoint: cut file", "checkpoint: flipped bit")
# Damaged just before a rank is killed.
COPIES = ("copy in memory: cut file", "copy in memory: flipped bit")
SURROUNDINGS = (
    "disk: full",
    "disk: slow",
    "network: reset",
    "clock: set forward",
    "clock: set back",
)
KINDS = (*SIGNALS, *ASKED, STANDING, SQUATTED, *FILES, *COPIES, *SURROUNDINGS)

# The phases of a run as the table of faults has them, of phases of rank 0's timer.
PHASES = {
    "start": ("load_models", "start_engines"),
    "rollout": ("rollout", "rollout_greedy"),
    "scores": ("broadcast", "score_policy", "score_reference", "score_values", "advantages"),
    "critic": ("update_critic",),
    "policy": ("update_policy",),
    "wait for engines": ("wait_for_engines",),
    "weight sync": ("weight_sync", "sync_check"),
    "evaluation": ("evaluation",),
    "save": ("save_checkpoint", "copy_state"),
}
_PHASE_OF = {phase: group for group, phases in PHASES.items() for phase in phases}
# Kinds that are one column of the table: which of them is done is left to chance.
_ENGINE = ("engine", "scheduler", "detokenizer")
FAMILIES: dict[str, tuple[str, ...]] = {
    "rank killed": ("rank: kill -9", "owner: kill -9"),
    "rank stopped": ("rank: stopped", "rank: stopped for a while"),
    "engine killed": tuple(f"{role}: kill -9" for role in _ENGINE),
    "engine stopped": (*(f"{role}: stopped" for role in _ENGINE), "engine: stopped for a while"),
    "port taken": (SQUATTED,),
    "owner stopped": ("owner: stopped for a while",),
    "verifier killed": ("verifier: kill -9",),
    "verifier stopped": ("verifier: stopped for a while",),
    "asked to stop": ("run: SIGTERM", "run: SIGUSR1", "run: SIGHUP"),
    "run killed": ("run: kill -9", STANDING),
    "copy damaged": COPIES,
}


def cells(waits: bool) -> set[tuple[str, str]]:
    """Phase and family of every fault that a run can meet. waits: it waits for engines before a
    weight sync. A stopped engine that has not served yet is waited for, as for a slow start, and a
    copy comes after a step."""
    missing = {"wait for engines"} if not waits else set()
    phases = PHASES.keys() - missing
    started = {
        "engine killed",
        "engine stopped",
        "port taken",
        "owner stopped",
        "verifier killed",
        "verifier stopped",
        "copy damaged",
    }
    return {
        (phase, family)
        for phase in phases
        for family in FAMILIES
        if phase != "start" or family not in started
    }


def hold_phases(folder: Path) -> None:
    """Before ranks are forked: rank 0 stands at the begin of a phase that `wanted` holds until
    `reached` is removed."""
    set_phase = logs.set_phase

    def held(phase: str | None) -> None:
        set_phase(phase)
        reached = folder / "reached"
        group = _PHASE_OF.get(phase or "")
        if logs._place["rank"] != "0" or group is None:
            return
        with suppress(OSError):
            if group == (folder / "wanted").read_text():
                (folder / "wanted").unlink()
                reached.write_text(group)
        end = time.monotonic() + _HELD_SECONDS
        while reached.exists() and time.monotonic() < end:
            time.sleep(0.005)
        # No fault is wanted any more: later phases need not wait for one
        reached.unlink(missing_ok=True)

    logs.set_phase = held


class Fuzzer:
    """Disturbs one run until it is finished.

    Args:
        config: of the run, with run.resume=auto.
        chance: chooses the kinds of a family, and faults of the surroundings.
        most: faults in this run.
        soak: collects the results.
        wanted: phases and families; those that were done least come first.
        plan: steps after which a fault is done, and its kind, instead of these.
    """

    def __init__(
        self,
        config: TrainConfig,
        chance: random.Random,
        most: int,
        soak: Soak,
        wanted: Collection[tuple[str, str]] = (),
        plan: Sequence[tuple[int, str]] = (),
    ) -> None:
        self._plan = list(plan)
        self._config = config
        self._chance = chance
        self._wanted = sorted(wanted)
        self._soak = soak
        self._gate = Path(tempfile.mkdtemp(prefix="gate-", dir="/tmp"))
        self._left = len(self._plan) or most
        self._waits_since = -1
        self._run_dir = Path(config.run.directory)
        self._groups: set[int] = set()
        self._seen: set[psutil.Process] = set()
        self._open: list[tuple[str, float, int]] = []  # kind, time, steps that were done then

    def run(self, seconds: float) -> None:
        """Start attempts until one ends with 0."""
        end = time.monotonic() + seconds
        while True:
            code, said = self._attempt(end)
            self._soak.codes[code] += 1
            if code == 0:
                break
            # An engine that dies before it ever served may have been given what it cannot serve:
            # the run fails.
            assert code in (2, 75, -signal.SIGKILL) or "ended while starting" in said, (
                f"an attempt ended with {code}: {said}"
            )
            if code == 2 or "cannot be saved" in said:
                self._mend(said)
        shutil.rmtree(self._gate)
        self._soak.left += self._left_behind()

    def _attempt(self, end: float) -> tuple[int, str]:
        for file in self._gate.iterdir():
            file.unlink()
        attempt = Attempt(self._config, self._prepare())
        self._waits_since = -1
        # Disturb it before it has done a step
        known = rows_of(self._run_dir)
        may = self._chance.random() < _EARLY
        while attempt.process.is_alive():
            assert time.monotonic() < end, "the run does not end"
            time.sleep(0.02)
            if (rows := rows_of(self._run_dir)) > known:
                known = rows
                may = True
                self._progress(rows)
            if self._plan:
                if rows >= self._plan[0][0] and self._signal(attempt, self._plan[0][1]):
                    del self._plan[0]
                continue
            if may and self._left > 0:
                may = not self._disturb(attempt)
        found = attempt.end(10)
        self._progress(rows_of(self._run_dir))
        if self._left > 0 and found[0] != 0 and self._chance.random() < 0.4:
            self._damage()
        return found

    def _prepare(self) -> Callable[[], None]:
        hold = partial(hold_phases, self._gate) if self._wanted else (lambda: None)
        if not (self._wanted and self._left > 0 and self._chance.random() < _SURROUNDED):
            return hold
        kind = min(SURROUNDINGS, key=lambda kind: (self._soak.faults[kind], self._chance.random()))
        self._did(kind)
        surround = self._surroundings(kind)

        def prepare() -> None:
            hold()
            surround()

        return prepare

    def _surroundings(self, kind: str) -> Callable[[], None]:
        if kind == "disk: full":
            return partial(attempts.fill_the_disk, _DISK_LIMIT)
        if kind == "disk: slow":
            return slow_down_the_disk
        if kind == "network: reset":
            return partial(reset_connections, self._chance.randrange(3, 9))
        by = _CLOCK_SECONDS if kind == "clock: set forward" else -_CLOCK_SECONDS
        return partial(set_the_clock, self._chance.uniform(2, 10), by)

    def _disturb(self, attempt: Attempt) -> bool:
        """Do a fault where rank 0 stands at the begin of a phase that has one left; whether one was
        done."""
        reached = self._gate / "reached"
        wanted = self._gate / "wanted"
        if not reached.exists():
            rows = rows_of(self._run_dir)
            # That phase may not come in this step
            if not wanted.exists() or rows > self._waits_since:
                phases = {phase for phase, _ in self._least()}
                if self._waits_since >= 0:
                    phases.discard("start")
                wanted.with_suffix(".part").write_text(
                    self._chance.choice(sorted(phases) or sorted(PHASES))
                )
                wanted.with_suffix(".part").rename(wanted)
                self._waits_since = rows
            return False
        phase = reached.read_text()
        families = [family for place, family in self._least() if place == phase]
        family = self._chance.choice(families) if families else ""
        try:
            if not family or not self._signal(attempt, self._chance.choice(FAMILIES[family])):
                return False
            self._soak.cells[phase, family] += 1
            wanted.unlink(missing_ok=True)  # written again when this one had just been reached
            return True
        finally:
            reached.unlink(missing_ok=True)

    def _least(self) -> list[tuple[str, str]]:
        """The least exercised combination."""
        least = min(self._soak.cells[cell] for cell in self._wanted)
        return [cell for cell in self._wanted if self._soak.cells[cell] == least]

    def _signal(self, attempt: Attempt, kind: str) -> bool:
        """Whether a fault was done."""
        family = attempt.family()
        self._groups |= {process.pid for process in family.get("engine", [])}
        self._seen |= {process for processes in family.values() for process in processes}
        try:
            if kind == STANDING:
                for process in (
                    process
                    for role, found in family.items()
                    if role != "other"
                    for process in found
                ):
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGSTOP)
                os.kill(attempt.process.pid or 0, signal.SIGKILL)
                self._did(kind)
                return True
            if kind in ASKED:
                os.kill(attempt.process.pid or 0, ASKED[kind])
                self._did(kind)
                return True
            if kind == SQUATTED:
                if "owner" not in family:
                    return False
                owner = self._chance.choice(family["owner"])
                engine = next((e for e in family["engine"] if e.ppid() == owner.pid), None)
                if engine is None:
                    return False
                self._take_port(engine, owner)
                self._did(kind)
                return True
            if kind in COPIES and not self._harm_copy(family.get("rank", []), kind):
                return False
            role, numbers = SIGNALS.get(kind, ("rank", [signal.SIGKILL]))
            if role not in family:
                return False
            victim = self._chance.choice(sorted(family[role], key=lambda process: process.pid))
            for number in numbers:
                if number == signal.SIGCONT:
                    time.sleep(_OWNER_STOPPED_SECONDS if role == "owner" else _STOPPED_SECONDS)
                victim.send_signal(number)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return False
        self._did(kind)
        return True

    def _take_port(self, engine: psutil.Process, owner: psutil.Process) -> None:
        """The owner is stopped until another listener has the port, which accepts connections and
        answers nothing."""
        command = engine.cmdline()
        port = int(command[command.index("--port") + 1])
        owner.send_signal(signal.SIGSTOP)
        try:
            os.killpg(engine.pid, signal.SIGKILL)
            listener = _listen(port)
        finally:
            owner.send_signal(signal.SIGCONT)
        with listener:
            time.sleep(_SQUATTED_SECONDS)

    def _harm_copy(self, ranks: Sequence[psutil.Process], kind: str) -> bool:
        """Ranks are stopped meanwhile: a newer copy would take its place."""
        for process in ranks:
            process.send_signal(signal.SIGSTOP)
        copies = sorted(host_memory_of(self._run_dir).glob("checkpoints/step_*"))
        harmed = bool(copies) and self._harm(copies[-1], kind)
        if not harmed:
            for process in ranks:
                process.send_signal(signal.SIGCONT)
        return harmed

    def _damage(self) -> None:
        checkpoints = sorted((self._run_dir / "checkpoints").glob("step_*"))
        if not self._wanted or len(checkpoints) < 2:
            return
        kind = self._chance.choice(FILES)
        if self._harm(checkpoints[-1], kind):
            self._did(kind)

    def _harm(self, checkpoint: Path, kind: str) -> bool:
        """Whether a file of it could be harmed: a copy in memory may be gone by now."""
        try:
            files = [
                path
                for path in sorted(checkpoint.rglob("*"))
                if path.is_file() and path.stat().st_size > 64
            ]
            path = self._chance.choice(files)
            content = bytearray(path.read_bytes())
            if kind.endswith("cut file"):
                del content[self._chance.randrange(len(content)) :]
            else:
                content[self._chance.randrange(len(content))] ^= 1 << self._chance.randrange(8)
            with path.open("r+b") as file:
                file.write(content)
                file.truncate()
            print(f"harmed: {path}", file=sys.stderr)
        except (OSError, IndexError):
            return False
        return True

    def _mend(self, said: str) -> None:
        """What the one line asks for: remove a damaged checkpoint; the disk has room again by
        itself."""
        named = re.search(r"(\S+?/checkpoints/step_\w+)", said)
        if named and "damaged" in said:
            shutil.rmtree(named[1])
        else:
            assert "cannot be saved" in said, said

    def _did(self, kind: str) -> None:
        self._left -= 1
        self._soak.faults[kind] += 1
        self._open.append((kind, time.monotonic(), rows_of(self._run_dir)))
        print(f"fault {self._soak.faults.total()}: {kind}", flush=True)

    def _progress(self, rows: int) -> None:
        now = time.monotonic()
        for kind, began, before in self._open:
            if rows > before:
                self._soak.seconds.setdefault(kind, []).append(now - began)
                print(f"fault over: {kind}: {now - began:.1f} s", flush=True)
        self._open = [entry for entry in self._open if rows <= entry[2]]

    def _left_behind(self) -> list[str]:
        end = time.monotonic() + 20
        while (alive := self._alive()) and time.monotonic() < end:
            time.sleep(0.2)
        shared = [path.name for pid in self._groups for path in Path("/dev/shm").glob(f"*_{pid}_*")]
        # Ranks that are killed have no chance to remove a folder; the remains are empty.
        temporary = [path.name for path in Path(tempfile.gettempdir()).iterdir()]
        if host_memory_of(self._run_dir).exists():
            shared.append(host_memory_of(self._run_dir).name)
        hidden = [path.name for path in (self._run_dir / "checkpoints").glob(".*")]
        return [*alive, *shared, *temporary, *hidden]

    def _alive(self) -> list[str]:
        """Processes that were seen at a fault, and groups of engines."""
        groups = [f"process group {pid}" for pid in self._groups if _group_lives(pid)]
        return [*groups, *(str(process) for process in self._seen if _lives(process))]


def _listen(port: int) -> socket.socket:
    """A listener at a port that dying processes may hold for a moment."""
    end = time.monotonic() + 10
    while True:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
            assert time.monotonic() < end, f"port {port} is not free"
            time.sleep(0.01)
        else:
            listener.listen()
            return listener


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _group_lives(group: int) -> bool:
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


@contextmanager
def temporary_files_of_its_own() -> Iterator[None]:
    """All temporary files of this process and of those that it starts go to a directory of their
    own."""
    before = tempfile.tempdir
    variable = os.environ.get("TMPDIR")
    # Not below pytest's, which is too long for sockets
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable

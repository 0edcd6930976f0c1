"""Names the rank that does not arrive, by limits for each phase from its own history and heartbeats
of all ranks."""

import faulthandler
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from vapo_megatron import logs
from vapo_megatron.config.run import HangsConfig
from vapo_megatron.errors import TryAgain, VapoError
from vapo_megatron.files import parse_json

# Dumps for NCCL's groups, and for all others.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_LINES = 20
# A phase hangs when it takes this many times as long as its slowest run.
_SLOWER = 5.0


def last_collectives() -> list[str]:
    """The collectives that this rank began last, oldest first: those that hang are not over."""
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            entries += json.loads(dump()).get("entries", [])  # without: none was begun
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    # Operations that NCCL begins together (sends and receives of a pipeline) share a number; only
    # the last has a state.
    over = {
        _name_of(entry) for entry in entries if entry["retired"] or entry["state"] == "completed"
    }
    return [
        f"{entry['profiling_name']} {name}, sizes {entry['input_sizes']}: "
        f"{'over' if name in over else 'NOT OVER'}"
        for entry in entries[-_LINES:]
        if (name := _name_of(entry))
    ]


def _name_of(entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    kind = "p2p " if entry["is_p2p"] else ""
    return f"{kind}number {number} of group {' '.join(entry['process_group'])}"


_KNOWN = 3  # times that a phase was ended before its own history counts
_PATIENCE_SECONDS = 5.0
_OVER = "over"  # the phase of a rank that is done
# Generation, also for an evaluation, may take hours, as may reading records and the rest of a save;
# only `longest` bounds that at first.
_GENERATION = {"rollout", "rollout_greedy", "evaluation", "wait_for_engines", logs.ATTENDING}
_LONG = _GENERATION | {"import_records", "wait_for_save"}
# Most saves are over before they are waited for
_NEVER_KNOWN = {
    logs.NO_PHASE,
    logs.ATTENDING,
    "wait_for_save",
}
# Without a history, a part of any other phase, or the way to the next one, is done within so many
# times floor_s (kernels are compiled meanwhile); more where disks, or the start of an engine, are
# waited for.
_FIRST_OF = dict.fromkeys(
    ("load_models", "start_engines", "weight_sync", "sync_check", "export", "save_checkpoint"), 2.0
)


class Hang(TryAgain):
    """A rank did not arrive."""


@dataclass(frozen=True)
class Heartbeat:
    """A rank's last report: its phase, how many it has begun, when this one began, when it reported
    (Unix time)."""

    rank: int
    phase: str
    begun: int
    since: float
    beat: float


class Watchdog:
    """A thread beside a rank. It needs no collective: ranks see each other's heartbeats in a folder
    that they share.

    Each looks at its own phase, and whether the rank after it still says something.
    """

    def __init__(
        self,
        config: HangsConfig,
        folder: Path,
        rank: int,
        world_size: int,
        longest: float,
        end: Callable[[VapoError], object],
    ) -> None:
        """folder: of all ranks; gets heartbeat_<rank>.json, and hang_<rank>.txt with Python's
        stacks and torch's collectives. longest: seconds for a phase without a history. end: called
        in the thread; ends the process."""
        self._config = config
        self._folder = folder
        self._rank = rank
        self._world = world_size
        self._longest = longest
        self._end = end
        self._slowest: dict[str, float] = {}
        self._ended: dict[str, int] = {}
        self._last = logs.phase_now()
        self._began = time.monotonic()  # no phase is counted from before it
        # Of the rank after this one: its last beat, and when that came
        self._heard = 0.0
        self._heard_at = self._began
        self._stop = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and being watched."""
        self._stop.set()
        self._thread.join()
        now = time.time()
        self._beat(Heartbeat(self._rank, _OVER, self._last.begun, now, now))

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self._config.heartbeat_s):
            # A job that was suspended (scontrol suspend, a paused machine) did not hang meanwhile.
            stood = time.monotonic() - looked - self._config.heartbeat_s
            if stood > self._config.heartbeat_s:
                self._began = max(self._began, logs.phase_now().since) + stood
                self._heard_at += stood
            place = logs.phase_now()
            if place.begun != self._last.begun:
                self._learn(self._last.phase, place.since - self._last.since)
                self._last = place
            # Clocks may be set during a phase. What a rank was in before it was forked is
            # not its own.
            now = time.time()
            seconds = time.monotonic() - max(place.since, self._began)
            idle = time.monotonic() - max(logs.last_progress(), self._began)
            limit = self.limit(place.phase)
            standstill = self.standstill(place.phase)
            self._beat(Heartbeat(self._rank, place.phase, place.begun, now - seconds, now))
            if seconds > limit:
                self._tell(
                    f"rank {self._rank} has been in the phase {place.phase} for {seconds:.0f} s",
                    limit,
                )
            elif idle > standstill and not self._knows(place.phase):
                self._tell(
                    f"rank {self._rank} has got no further in the phase {place.phase} for "
                    f"{idle:.0f} s",
                    standstill,
                )
            if (silent := self._silence()) > self._config.floor_s:
                neighbour = (self._rank + 1) % self._world
                self._tell(
                    f"rank {neighbour} has said nothing for {silent:.0f} s", self._config.floor_s
                )
            # A disk that is slow to take heartbeats did not suspend anybody
            looked = time.monotonic()

    def limit(self, phase: str) -> float:
        """Seconds after which a phase hangs."""
        if not self._knows(phase):
            return self._longest
        return max(self._config.floor_s, _SLOWER * self._slowest[phase])

    def standstill(self, phase: str) -> float:
        """Seconds without progress after which a phase without a history hangs."""
        if phase in _LONG:
            return self._longest
        return self._config.floor_s * _FIRST_OF.get(phase, 1.0)

    def _knows(self, phase: str) -> bool:
        """Whether the phase has a history to be measured by."""
        return phase not in _NEVER_KNOWN and self._ended.get(phase, 0) >= _KNOWN

    def _silence(self) -> float:
        """Seconds for which the rank after this one has said nothing: it is stopped, or its node is
        gone."""
        path = self._path((self._rank + 1) % self._world)
        now = time.monotonic()
        try:
            heartbeat = Heartbeat(**parse_json(path.read_text()))
        except (OSError, ValueError, TypeError):
            return now - self._heard_at
        if heartbeat.beat != self._heard or heartbeat.phase == _OVER:
            self._heard = heartbeat.beat
            self._heard_at = now
        return now - self._heard_at

    def _learn(self, phase: str, seconds: float) -> None:
        self._ended[phase] = self._ended.get(phase, 0) + 1
        self._slowest[phase] = max(seconds, self._slowest.get(phase, 0.0))

    def _beat(self, heartbeat: Heartbeat) -> None:
        path = self._path(self._rank)
        part = path.with_suffix(".part")
        try:
            part.write_text(json.dumps(asdict(heartbeat)))
            part.replace(path)
        except OSError:  # a full disk: others may not be able to write either
            self._heard_at = time.monotonic()

    def _path(self, rank: int) -> Path:
        return self._folder / f"heartbeat_{rank:05d}.json"

    def _tell(self, what: str, limit: float) -> None:
        place = f"stacks and collectives of the ranks are in {self._folder}/hang_*.txt"
        try:
            self._write_stacks(self._folder / f"hang_{self._rank:05d}.txt")
        except OSError as error:  # a full disk must not keep the hang alive
            place = f"stacks cannot be written to {self._folder} ({error.strerror})"
        beats = read_heartbeats(self._folder, self._world)
        self._end(
            Hang(
                f"{describe(beats, self._world, 4 * self._config.heartbeat_s)}; {what} "
                f"(limit {limit:.0f} s): {place}, start the same command again with run.resume=auto"
            )
        )

    @staticmethod
    def _write_stacks(path: Path) -> None:
        with path.open("w") as file:
            faulthandler.dump_traceback(file)
            lines: list[str] = []
            asked = threading.Thread(target=lambda: lines.extend(last_collectives()), daemon=True)
            asked.start()
            asked.join(_PATIENCE_SECONDS)  # a driver that hangs may not let it end
            print("\nCollectives that this rank began last:", *lines, sep="\n", file=file)


def read_heartbeats(folder: Path, world_size: int) -> list[Heartbeat]:
    """The last report of each rank; ranks that have never reported are missing."""
    paths = [folder / f"heartbeat_{rank:05d}.json" for rank in range(world_size)]
    beats = []
    for path in paths:
        with suppress(OSError, ValueError, TypeError):
            beats.append(Heartbeat(**parse_json(path.read_text())))
    return beats


def describe(heartbeats: list[Heartbeat], world_size: int, patience: float) -> str:
    """Which ranks did not arrive, and where the others wait.

    patience: seconds without a heartbeat after which a process counts as stopped (or its node as
        lost). If all processes are alive, the missing ranks are those in another phase than most.
    """
    newest = max((h.beat for h in heartbeats), default=0.0)
    alive = [h for h in heartbeats if newest - h.beat <= patience]
    silent = sorted(set(range(world_size)) - {h.rank for h in alive})
    phases = [h.phase for h in alive if h.phase != _OVER]
    usual = max(phases, key=phases.count, default="-")
    if silent:
        last = {h.rank: h for h in heartbeats}
        late = [
            f"rank {r} ({f'silent since its phase {last[r].phase}' if r in last else 'silent'})"
            for r in silent
        ]
    else:
        late = [
            f"rank {h.rank} ({'done' if h.phase == _OVER else f'in the phase {h.phase}'})"
            for h in alive
            if h.phase != usual
        ]
    waiting = ", ".join(str(h.rank) for h in alive if h.phase == usual)
    if not late:
        return f"all ranks hang in the phase {usual}"
    return f"{', '.join(late)} did not arrive; ranks {waiting} wait in the phase {usual}"

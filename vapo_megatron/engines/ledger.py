"""Which prompt groups are drawn, in flight, graded, trained and dropped, and from that what to draw next.

Groups have numbers in the order in which they are drawn, and a step trains the first ones of them that are useful:
what is trained does not depend on which response came first. Only where unfinished responses are kept for the next
step (`StepRule.any_order`) it trains those that are finished. No input and no output here: whoever holds the ledger
asks it for room, draws, and tells it what has come back.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

FILLED = "filled"  # trained on for want of others, without signal
# Why a group is not trained on.
NO_SIGNAL = "no_signal"  # dynamic sampling: all of its responses are right, or all wrong
SURPLUS = "surplus"  # the step had enough; its prompt is drawn again
STALE = "stale"  # drawn more steps ago than is allowed
DROPPED = (NO_SIGNAL, SURPLUS, STALE)


@dataclass(frozen=True)
class StepRule:
    """What makes a step.

    Attributes:
        groups: that a step trains on.
        steps: the last one.
        oversampling: groups in flight, in units of those still wanted.
        most_draws: groups of a step; where so many are graded, those without signal fill it up. None: no bound.
        staleness: steps that may be collected beyond the one that is trained next: a group may be drawn only for the
            steps up to trained + 1 + staleness. 0: synchronous.
        any_order: a step trains the oldest of the groups that are graded, and the others stay; not with staleness.
        max_age: with any_order, steps after which a group that is not graded yet is dropped.
        windows: steps in which a group may be trained, a window of its responses in each, until they are finished.
    """

    groups: int
    steps: int
    oversampling: float = 1.0
    most_draws: int | None = None
    staleness: int = 0
    any_order: bool = False
    max_age: int = 4
    windows: int = 1

    @property
    def oldest(self) -> int:
        """Steps that may have been trained between drawing a group and training it."""
        return self.max_age if self.any_order else max(self.staleness, self.windows - 1)


@dataclass
class GroupRecord:
    """A group that was drawn and is neither trained nor dropped. drawn_at: steps trained then. useful: once graded."""

    number: int
    drawn_at: int
    graded: bool = False
    useful: bool = False


@dataclass
class _Part:
    """The records that one step looks through, in order. full: they are all that it needs."""

    step: int
    records: list[GroupRecord] = field(default_factory=list)
    useful: int = 0
    stale: int = 0
    full: bool = False


class Ledger:
    """The groups of a run.

    Attributes:
        next: number of the group that is drawn next.
        trained, taken: the last step whose weights the engines have, and the last that was given to the trainer.
        counts: drawn, trained (filled among them) and, by reason, dropped so far; with those on the way they add up.
    """

    def __init__(self, rule: StepRule, first: int = 0, step: int = 0) -> None:
        """first, step: where a run goes on."""
        self.rule, self.next, self.trained, self.taken = rule, first, step, step
        self.counts: Counter[str] = Counter()
        self._records: dict[int, GroupRecord] = {}  # in the order of their numbers
        self._cached_parts: list[_Part] | None = None  # of _parts(); None after a change

    def __contains__(self, number: int) -> bool:
        """Whether a group is drawn and neither trained nor dropped."""
        return number in self._records

    @property
    def first(self) -> int:
        """Number of the oldest group that is neither trained nor dropped."""
        return next(iter(self._records), self.next)

    @property
    def in_flight(self) -> int:
        """Groups that are drawn and not graded."""
        return sum(not record.graded for record in self._records.values())

    @property
    def graded(self) -> int:
        """Groups that wait for the trainer."""
        return len(self._records) - self.in_flight

    def room(self) -> int:
        """How many groups may be drawn now."""
        parts, rule = self._parts(), self.rule
        left = self._open - sum(part.full for part in parts)
        if left == 0:
            return 0
        begun = parts[-1] if parts and not parts[-1].full else _Part(0)
        missing = left * rule.groups - begun.useful
        room = max(1, round(missing * rule.oversampling)) - self.in_flight
        if rule.most_draws is not None:
            room = min(room, left * rule.most_draws - len(begun.records) + begun.stale)
        return max(0, room)

    def draw(self) -> int:
        """Count one more group in; its number."""
        number = self.next
        self._records[number] = GroupRecord(number, self.trained)
        self._cached_parts = None
        self.counts["drawn"] += 1
        self.next += 1
        return number

    def grade(self, number: int, useful: bool) -> None:
        """A group has come back."""
        record, self._cached_parts = self._records[number], None
        record.graded, record.useful = True, useful

    def surplus(self) -> list[int]:
        """Take out the groups that no step can need any more, whatever is still to come; their numbers.

        Their prompts are drawn again, under the same numbers.
        """
        parts = self._parts()
        if self.rule.any_order or self.rule.windows > 1 or sum(part.full for part in parts) < self._open:
            return []
        unneeded = len(self._records) - sum(len(part.records) for part in parts)
        gone = list(islice(reversed(self._records), unneeded))[::-1]
        self._drop(gone, SURPLUS)
        if gone:
            self.next = gone[0]
        return gone

    def expired(self) -> list[int]:
        """With any_order, take out the groups that are not graded and too old for the next step; their numbers."""
        if not self.rule.any_order:
            return []
        gone = [r.number for r in self._records.values() if not r.graded and self.taken - r.drawn_at > self.rule.oldest]
        self._drop(gone, STALE)
        return gone

    def is_ready(self) -> bool:
        """Whether the next step's groups are known: all those before its last one are graded, unless any will do."""
        parts = self._parts()
        if not parts or not parts[0].full:
            return False
        enough = parts[0].useful == self.rule.groups
        return all(record.graded for record in parts[0].records) or (self.rule.any_order and enough)

    def take(self, go_on: Collection[int] = ()) -> list[int]:
        """The numbers of the next step's groups, useful ones first; what else it looked through is dropped.

        Call it when is_ready(). go_on: groups that are not finished; those that are taken are in flight again.
        """
        part, self._cached_parts = self._parts()[0], None
        graded = [record for record in part.records if record.graded]
        fresh = [record for record in graded if not self._is_stale(record, part)]
        useful, spare = ([record for record in fresh if record.useful is kind] for kind in (True, False))
        fill = spare[: self.rule.groups - len(useful)]
        taken = [record.number for record in (*useful, *fill)]
        finished = [number for number in taken if number not in go_on]
        for number in finished:
            del self._records[number]
        for number in set(taken).difference(finished):
            self._records[number].graded = False
        self._drop([record.number for record in spare[len(fill) :]], NO_SIGNAL)
        self._drop([record.number for record in graded if record not in fresh], STALE)
        self.taken += 1
        self.counts["trained"] += len(finished)
        self.counts[FILLED] += len(fill)
        return taken

    def advance(self) -> None:
        """A step is trained, and the engines have its weights."""
        self.trained += 1
        self._cached_parts = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        drawn_at = {str(number): record.drawn_at for number, record in self._records.items()}
        return {"counts": dict(self.counts), "next": self.next, "drawn_at": drawn_at}

    def restore(self, state: dict[str, Any], useful: Mapping[int, bool]) -> list[int]:
        """Go on from a state, with the groups from `first` on alone. useful: those that are graded, by number.

        Returns the numbers of those that are not, which are to be generated (again).
        """
        first, self._cached_parts = self.next, None
        kept = {int(number): drawn_at for number, drawn_at in state["drawn_at"].items() if int(number) >= first}
        self._records = {
            number: GroupRecord(number, drawn_at, number in useful, useful.get(number, False))
            for number, drawn_at in sorted(kept.items())
        }
        self.counts, self.next = Counter(state["counts"]), max(state["next"], first)
        self.counts[STALE] += len(state["drawn_at"]) - len(kept)
        return [number for number in kept if number not in useful]

    def _drop(self, numbers: list[int], reason: str) -> None:
        self._cached_parts = None
        for number in numbers:
            del self._records[number]
        self.counts[reason] += len(numbers)

    @property
    def _open(self) -> int:
        """Steps for which groups may be drawn now."""
        return min(self.trained + 1 + self.rule.staleness, self.rule.steps) - self.taken

    def _is_stale(self, record: GroupRecord, part: _Part) -> bool:
        return part.step - 1 - record.drawn_at > self.rule.oldest

    def _parts(self) -> list[_Part]:
        """What the open steps look through as far as it is known; what is not graded counts as not useful."""
        if self._cached_parts is not None:
            return self._cached_parts
        parts, records = list[_Part](), list(self._records.values())
        groups, most_draws = self.rule.groups, self.rule.most_draws
        while records and len(parts) < self._open:
            part = _Part(self.taken + len(parts) + 1)
            oldest = part.step - 1 - self.rule.oldest
            for count, record in enumerate(records, 1):  # once a graded group: kept short
                if record.graded:
                    if record.drawn_at < oldest:
                        part.stale += 1
                    elif record.useful:
                        part.useful += 1
                if part.useful >= groups or (most_draws is not None and count - part.stale >= most_draws):
                    part.full = True
                    break
            part.records, records = records[:count], records[count:]
            parts.append(part)
        self._cached_parts = parts
        return parts

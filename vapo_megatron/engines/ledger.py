"""Which prompt groups are drawn, in flight, graded, trained and dropped, and from that what to draw next.

Groups have numbers in the order in which they are drawn, and a step trains the first ones of them that are useful:
what is trained does not depend on which response came first. Only where unfinished responses are kept for the next
step (`StepRule.any_order`) it trains those that are finished. No input and no output here: whoever holds the ledger
asks it for room, draws, and tells it what has come back.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

FILLED = "filled"  # trained on for want of others, without signal
# Why a group is not trained on.
NO_SIGNAL = "no_signal"  # dynamic sampling: all of its responses are right, or all wrong
SURPLUS = "surplus"  # the step had enough; its prompt is drawn again
STALE = "stale"  # drawn more steps ago than is allowed
DROPPED = (NO_SIGNAL, SURPLUS, STALE)
_USEFUL, _IN_FLIGHT = "useful", "in_flight"


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
    """The records that one step looks through, in order, counted by kind. full: they are all that it needs."""

    rule: StepRule
    step: int
    records: deque[GroupRecord] = field(default_factory=deque)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def full(self) -> bool:
        is_drawn = self.rule.most_draws is not None and len(self.records) - self.counts[STALE] >= self.rule.most_draws
        return is_drawn or self.counts[_USEFUL] >= self.rule.groups

    def kind(self, record: GroupRecord) -> str:
        """What is not graded counts as not useful."""
        if not record.graded:
            return _IN_FLIGHT
        if self.step - 1 - record.drawn_at > self.rule.oldest:
            return STALE
        return _USEFUL if record.useful else NO_SIGNAL

    def of_kind(self, kind: str) -> list[GroupRecord]:
        return [record for record in self.records if self.kind(record) == kind]

    def append(self, record: GroupRecord) -> None:
        self.records.append(record)
        self.counts[self.kind(record)] += 1

    def cut(self) -> list[GroupRecord]:
        """Takes off, from the end, the records behind the one that makes the part full; the last one first."""
        cut = []
        while self.full:
            cut.append(self.records.pop())
            self.counts[self.kind(cut[-1])] -= 1
        if cut:
            self.append(cut.pop())  # the one that makes it full
        return cut

    def prepend(self, records: Iterable[GroupRecord]) -> None:
        for record in records:
            self.records.appendleft(record)
            self.counts[self.kind(record)] += 1


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
        self._in_flight = 0
        # _parts(), which goes through all records: kept up to date by draw() and grade(), made anew after the rest.
        self._known: list[_Part] | None = None

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
        return self._in_flight

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
        begun = parts[-1] if parts and not parts[-1].full else _Part(rule, 0)
        missing = left * rule.groups - begun.counts[_USEFUL]
        room = max(1, round(missing * rule.oversampling)) - self.in_flight
        if rule.most_draws is not None:
            room = min(room, left * rule.most_draws - len(begun.records) + begun.counts[STALE])
        return max(0, room)

    def draw(self) -> int:
        """Count one more group in; its number."""
        number = self.next
        record = self._records[number] = GroupRecord(number, self.trained)
        self._in_flight += 1
        if self._known is not None:
            self._add(self._known, record)
        self.counts["drawn"] += 1
        self.next += 1
        return number

    def grade(self, number: int, useful: bool) -> None:
        """A group has come back."""
        record, parts = self._records[number], self._known or ()
        position = next((i for i, part in enumerate(parts) if part.records[-1].number >= number), None)
        self._in_flight -= not record.graded
        if position is None or record.graded:
            self._known = None if record.graded else self._known
            record.graded, record.useful = True, useful
            return
        part = parts[position]
        record.graded, record.useful = True, useful
        part.counts.update({_IN_FLIGHT: -1, part.kind(record): 1})
        if part.counts[_USEFUL] >= self.rule.groups or part.kind(record) == STALE:
            self._settle(position)

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
        enough = parts[0].counts[_USEFUL] == self.rule.groups
        return not parts[0].counts[_IN_FLIGHT] or (self.rule.any_order and enough)

    def take(self, go_on: Collection[int] = ()) -> list[int]:
        """The numbers of the next step's groups, useful ones first; what else it looked through is dropped.

        Call it when is_ready(). go_on: groups that are not finished; those that are taken are in flight again.
        """
        part, self._known = self._parts()[0], None
        useful, spare, stale = (part.of_kind(kind) for kind in (_USEFUL, NO_SIGNAL, STALE))
        fill = spare[: self.rule.groups - len(useful)]
        taken = [record.number for record in (*useful, *fill)]
        finished = [number for number in taken if number not in go_on]
        for number in finished:
            del self._records[number]
        for number in set(taken).difference(finished):
            self._records[number].graded = False
            self._in_flight += 1
        self._drop([record.number for record in spare[len(fill) :]], NO_SIGNAL)
        self._drop([record.number for record in stale], STALE)
        self.taken += 1
        self.counts["trained"] += len(finished)
        self.counts[FILLED] += len(fill)
        return taken

    def advance(self) -> None:
        """A step is trained, and the engines have its weights."""
        self.trained += 1
        self._known = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        drawn_at = {str(number): record.drawn_at for number, record in self._records.items()}
        return {"counts": dict(self.counts), "next": self.next, "drawn_at": drawn_at}

    def restore(self, state: dict[str, Any], useful: Mapping[int, bool]) -> list[int]:
        """Go on from a state, with the groups from `first` on alone. useful: those that are graded, by number.

        Returns the numbers of those that are not, which are to be generated (again).
        """
        first, self._known = self.next, None
        kept = {int(number): drawn_at for number, drawn_at in state["drawn_at"].items() if int(number) >= first}
        self._records = {
            number: GroupRecord(number, drawn_at, number in useful, useful.get(number, False))
            for number, drawn_at in sorted(kept.items())
        }
        self._in_flight = sum(not record.graded for record in self._records.values())
        self.counts, self.next = Counter(state["counts"]), max(state["next"], first)
        self.counts[STALE] += len(state["drawn_at"]) - len(kept)
        return [number for number in kept if number not in useful]

    def _drop(self, numbers: list[int], reason: str) -> None:
        self._known = None
        for number in numbers:
            self._in_flight -= not self._records.pop(number).graded
        self.counts[reason] += len(numbers)

    @property
    def _open(self) -> int:
        """Steps for which groups may be drawn now."""
        return min(self.trained + 1 + self.rule.staleness, self.rule.steps) - self.taken

    def _parts(self) -> list[_Part]:
        """What the open steps look through as far as it is known."""
        if self._known is None:
            self._known = []
            for record in self._records.values():
                if not self._add(self._known, record):
                    break
        return self._known

    def _add(self, parts: list[_Part], record: GroupRecord) -> bool:
        """Give the record that was drawn last to the step that is not full yet; False where every open step is."""
        if not parts or parts[-1].full:
            if len(parts) >= self._open:
                return False
            parts.append(_Part(self.rule, self.taken + len(parts) + 1))
        parts[-1].append(record)
        return True

    def _settle(self, position: int) -> None:
        """A graded group may complete a part before its last record: the rest belongs to the steps that follow.

        A record moves towards later steps alone, so that all moves of a run are at most its groups times open steps.
        """
        parts = self._known
        assert parts is not None
        if parts[position].counts[STALE] and self.rule.most_draws is not None:
            self._known = None  # it makes room for a record of a later step: rare
            return
        while cut := parts[position].cut():
            position += 1
            if position == len(parts):
                if position >= self._open:
                    return
                parts.append(_Part(self.rule, self.taken + position + 1))
            parts[position].prepend(cut)

"""Which prompt groups are drawn, in flight, graded, trained and dropped, and hence what to draw next.

Groups are numbered in the order drawn, and a step trains the first useful ones: what is trained does not depend on
which response came first. Only if unfinished responses are kept for the next step (`StepRule.any_order`) does a step
train those that are finished. The ledger does no input or output: its holder asks it for room, draws, and reports what
has come back.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

FILLED = "filled"  # without signal, trained on because there were no others
# Why a group is not trained on.
NO_SIGNAL = "no_signal"  # dynamic sampling: all of its responses are right, or all wrong
SURPLUS = "surplus"  # the step had enough; its prompt is drawn again
STALE = "stale"  # drawn more steps ago than is allowed
DROPPED = (NO_SIGNAL, SURPLUS, STALE)


@dataclass(frozen=True)
class StepRule:
    """How a step is made of groups.

    Attributes:
        groups: number of groups that a step trains on.
        steps: number of the last step.
        oversampling: groups in flight, as a multiple of those still wanted.
        most_draws: largest number of groups drawn for a step; once they are graded, groups without signal fill it up.
            None: no bound.
        staleness: how many steps may be collected beyond the one that is trained next: groups are drawn only for the
            steps up to trained + 1 + staleness. 0: synchronous.
        any_order: a step trains the oldest graded groups and the others stay; not with staleness.
        max_age: with any_order, steps after which an ungraded group is dropped.
        windows: largest number of steps that train a group, one window of its responses each.
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
        """Largest number of steps trained between drawing a group and training it."""
        return self.max_age if self.any_order else max(self.staleness, self.windows - 1)


@dataclass
class GroupRecord:
    """A group that is neither trained nor dropped. drawn_at: steps trained when it was drawn. useful: once graded."""

    number: int
    drawn_at: int
    graded: bool = False
    useful: bool = False


@dataclass
class _Part:
    """The records that one step looks through, in order. full: it needs no more."""

    step: int
    records: list[GroupRecord] = field(default_factory=list)
    useful: int = 0
    stale: int = 0
    full: bool = False


class Ledger:
    """The groups of a run.

    Attributes:
        next: number of the next group to draw.
        trained, taken: the last step whose weights the engines have, and the last that the trainer has taken.
        counts: groups drawn, trained (filled ones among them) and, by reason, dropped so far; drawn = trained + dropped
            + on the way.
    """

    def __init__(self, rule: StepRule, first: int = 0, step: int = 0) -> None:
        """first, step: the next group and the last step of a run that goes on."""
        self.rule, self.next, self.trained, self.taken = rule, first, step, step
        self.counts: Counter[str] = Counter()
        self._records: dict[int, GroupRecord] = {}  # in the order of their numbers
        self._cached_parts: list[_Part] | None = None  # of _parts(); None after a change

    def __contains__(self, number: int) -> bool:
        """Whether a group is drawn, and neither trained nor dropped."""
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
        """Draw one more group; returns its number."""
        number = self.next
        self._records[number] = GroupRecord(number, self.trained)
        self._cached_parts = None
        self.counts["drawn"] += 1
        self.next += 1
        return number

    def grade(self, number: int, useful: bool) -> None:
        """A group was graded."""
        record, self._cached_parts = self._records[number], None
        record.graded, record.useful = True, useful

    def surplus(self) -> list[int]:
        """Drop the groups that no step can need, whatever is still to come; returns their numbers.

        Their prompts are drawn again under the same numbers.
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
        """With any_order, drop ungraded groups that are too old for the next step; returns their numbers."""
        if not self.rule.any_order:
            return []
        gone = [r.number for r in self._records.values() if not r.graded and self.taken - r.drawn_at > self.rule.oldest]
        self._drop(gone, STALE)
        return gone

    def is_ready(self) -> bool:
        """Whether the next step's groups are known: all before its last one are graded, unless any order will do."""
        parts = self._parts()
        if not parts or not parts[0].full:
            return False
        enough = parts[0].useful == self.rule.groups
        return all(record.graded for record in parts[0].records) or (self.rule.any_order and enough)

    def take(self, go_on: Collection[int] = ()) -> list[int]:
        """The numbers of the next step's groups, useful ones first; the others that it looked through are dropped.

        Call it when is_ready(). go_on: unfinished groups; if taken, they are in flight again.
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
        self._drop([record.number for record in graded if self._is_stale(record, part)], STALE)
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
        """Go on from a state, with only the groups from number `next` on. useful: of the graded groups, by number.

        Returns the numbers of the ungraded groups, which are to be generated (again).
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
        """Number of steps for which groups may be drawn now."""
        return min(self.trained + 1 + self.rule.staleness, self.rule.steps) - self.taken

    def _is_stale(self, record: GroupRecord, part: _Part) -> bool:
        return part.step - 1 - record.drawn_at > self.rule.oldest

    def _parts(self) -> list[_Part]:
        """The records that the open steps look through; ungraded groups count as not useful."""
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

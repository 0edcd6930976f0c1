"""Which prompt groups are drawn, in flight, graded, trained and dropped, and from that what to draw next.

Groups have numbers in the order in which they are drawn, and a step trains the first ones of them that are useful:
what is trained does not depend on which response came first. No input and no output here: whoever holds the ledger
asks it for room, draws, and tells it what has come back.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FILLED = "filled"  # trained on for want of others, without signal
# Why a group is not trained on.
NO_SIGNAL = "no_signal"  # dynamic sampling: all of its responses are right, or all wrong
SURPLUS = "surplus"  # the step had enough; its prompt is drawn again
STALE = "stale"  # drawn more steps ago than is allowed


@dataclass(frozen=True)
class StepRule:
    """What makes a step.

    Attributes:
        groups: that a step trains on.
        oversampling: groups in flight, in units of those still wanted.
        most_draws: groups of a step; where so many are graded, those without signal fill it up. None: no bound.
        staleness: steps that may be collected beyond the one that is trained next: a group may be drawn only for the
            steps up to trained + 1 + staleness. 0: synchronous.
        steps: the last one.
    """

    groups: int
    steps: int
    oversampling: float = 1.0
    most_draws: int | None = None
    staleness: int = 0


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

    useful: list[GroupRecord] = field(default_factory=list)
    spare: list[GroupRecord] = field(default_factory=list)
    stale: list[GroupRecord] = field(default_factory=list)
    in_flight: int = 0
    full: bool = False

    @property
    def length(self) -> int:
        return len(self.useful) + len(self.spare) + len(self.stale) + self.in_flight


class Ledger:
    """The groups of a run.

    Attributes:
        first: number of the oldest group that is neither trained nor dropped.
        trained, taken: the last step whose weights the engines have, and the last that was given to the trainer.
        counts: drawn, trained (filled among them) and, by reason, dropped so far; with those on the way they add up.
    """

    def __init__(self, rule: StepRule, first: int = 0, step: int = 0) -> None:
        """first, step: where a run goes on."""
        self.rule, self.first, self.trained, self.taken = rule, first, step, step
        self.counts: Counter[str] = Counter()
        self._records: list[GroupRecord] = []

    @property
    def next(self) -> int:
        """Number of the group that is drawn next."""
        return self.first + len(self._records)

    @property
    def in_flight(self) -> int:
        """Groups that are drawn and not graded."""
        return sum(not record.graded for record in self._records)

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
        begun = parts[-1] if parts and not parts[-1].full else _Part()
        wanted = left * rule.groups - len(begun.useful)
        room = max(1, round(wanted * rule.oversampling)) - self.in_flight
        if rule.most_draws is not None:
            room = min(room, left * rule.most_draws - begun.length + len(begun.stale))
        return max(0, room)

    def draw(self) -> int:
        """Count one more group in; its number."""
        self._records.append(GroupRecord(self.next, self.trained))
        self.counts["drawn"] += 1
        return self._records[-1].number

    def grade(self, number: int, useful: bool) -> None:
        """A group has come back."""
        record = self._records[number - self.first]
        record.graded, record.useful = True, useful

    def surplus(self) -> list[int]:
        """Take out the groups that no step can need any more, whatever is still to come; their numbers.

        Their prompts are drawn again, under the same numbers.
        """
        parts = self._parts()
        if sum(part.full for part in parts) < self._open:
            return []
        kept = sum(part.length for part in parts)
        gone, self._records = self._records[kept:], self._records[:kept]
        self.counts[SURPLUS] += len(gone)
        return [record.number for record in gone]

    def is_ready(self) -> bool:
        """Whether the next step's groups are known, all those before its last one being graded."""
        parts = self._parts()
        return bool(parts) and parts[0].full and not parts[0].in_flight

    def take(self) -> list[int]:
        """The numbers of the next step's groups, useful ones first; what else it looked through is dropped.

        Call it when is_ready().
        """
        part = self._parts()[0]
        fill = part.spare[: self.rule.groups - len(part.useful)]
        self.first += part.length
        self._records = self._records[part.length :]
        self.taken += 1
        self.counts["trained"] += self.rule.groups
        self.counts[FILLED] += len(fill)
        self.counts[NO_SIGNAL] += len(part.spare) - len(fill)
        self.counts[STALE] += len(part.stale)
        return [record.number for record in (*part.useful, *fill)]

    def advance(self) -> None:
        """A step is trained, and the engines have its weights."""
        self.trained += 1

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is not graded will be drawn again."""
        graded = {str(record.number): record.drawn_at for record in self._records if record.graded}
        return {"counts": dict(self.counts), "graded": graded}

    def restore(self, state: dict[str, Any], useful: Mapping[int, bool]) -> list[int]:
        """Go on from a state, at the same `first`. useful: the graded groups that are there again, by number.

        Returns the numbers of the groups before the last of them that are to be generated again.
        """
        self.counts = Counter(state["counts"])
        last = max(useful, default=self.first - 1)
        # Groups that are not here any more were drawn and neither trained nor dropped: they are drawn anew.
        self.counts["drawn"] = sum(self.counts[name] for name in ("trained", NO_SIGNAL, SURPLUS, STALE)) + len(useful)
        again = []
        for number in range(self.first, last + 1):
            known = number in useful
            drawn_at = state["graded"][str(number)] if known else self.trained
            self._records.append(GroupRecord(number, drawn_at, known, useful.get(number, False)))
            if not known:
                self.counts["drawn"] += 1
                again.append(number)
        return again

    @property
    def _open(self) -> int:
        """Steps for which groups may be drawn now."""
        return min(self.trained + 1 + self.rule.staleness, self.rule.steps) - self.taken

    def _parts(self) -> list[_Part]:
        """What the open steps look through as far as it is known: what is not graded counts as not useful."""
        parts: list[_Part] = []
        for record in self._records:
            if not parts or parts[-1].full:
                if len(parts) == self._open:
                    break
                parts.append(_Part())
            part, step = parts[-1], self.taken + len(parts)
            if not record.graded:
                part.in_flight += 1
            elif step - 1 - record.drawn_at > self.rule.staleness:
                part.stale.append(record)
            else:
                (part.useful if record.useful else part.spare).append(record)
            enough = len(part.useful) == self.rule.groups
            part.full = enough or part.length - len(part.stale) == self.rule.most_draws
        return parts

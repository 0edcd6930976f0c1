"""Which prompt groups are drawn, in flight, graded, trained and dropped, and hence what to draw next.

Groups are numbered in the order drawn, and a step trains the first useful ones: what is trained does not depend on
which response came first. Only if unfinished responses are kept for the next step (`StepRule.any_order`) does a step
train those that are finished. The ledger does no I/O: its owner asks it for room, draws, and reports what has come
back.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import BatchConfig

FILLED = "filled"  # without signal, trained on because there were no others
# Why a group is not trained on.
NO_SIGNAL = "no_signal"  # dynamic sampling: all of its responses are right, or all wrong
SURPLUS = "surplus"  # the step had enough; its prompt is drawn again
STALE = "stale"  # drawn more steps ago than is allowed
BROKEN = "broken"  # an episode of it broke: nothing could be trained on
DROPPED = (NO_SIGNAL, SURPLUS, STALE, BROKEN)


@dataclass(frozen=True)
class StepRule:
    """How groups make up a step.

    Attributes:
        groups: number of groups that a step trains on.
        steps: number of the last step.
        oversampling: groups in flight, as a multiple of those still wanted.
        most_draws: largest number of groups drawn for a step; once they are graded, groups without signal fill it up.
            Broken and stale groups do not count. None: no bound.
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


def step_rule(size: BatchConfig, sampling: DynamicSamplingConfig, steps: int, rollout: RolloutConfig) -> StepRule:
    """The groups that a step of training needs: with dynamic sampling, those with correct and incorrect responses."""
    rule = StepRule(size.prompts_per_step, steps, staleness=rollout.asynchronous.max_staleness, windows=rollout.windows)
    if (in_flight := rollout.partial_responses.oversampling) is not None:
        rule = replace(rule, any_order=True, oversampling=in_flight)
    if sampling.max_rounds is not None:
        most = round(sampling.max_rounds * sampling.oversampling * size.prompts_per_step)
        rule = replace(rule, oversampling=sampling.oversampling, most_draws=most)
    return rule


@dataclass
class GroupRecord:
    """A group that is neither trained nor dropped. drawn_at: steps trained when it was drawn. useful: once graded; None
    if it broke. place: in the order drawn, among those that are left."""

    number: int
    drawn_at: int
    graded: bool = False
    useful: bool | None = False
    place: int = 0


@dataclass
class _Part:
    """The groups that one step looks through, from place `start` to before `end`, and how many are useful, lost (too
    old, or broken) or not graded; full: it needs no more."""

    step: int
    start: int = 0
    end: int = 0
    useful: int = 0
    lost: int = 0
    ungraded: int = 0
    full: bool = False

    @property
    def fresh(self) -> int:
        """Groups that are not lost, as far as is known."""
        return self.end - self.start - self.lost

    def count(self, record: GroupRecord, is_lost: bool, by: int) -> None:
        """by: 1 for a group that comes in, -1 for one that leaves."""
        self.ungraded += by * (not record.graded)
        self.lost += by * (record.graded and is_lost)
        self.useful += by * (record.graded and record.useful is True and not is_lost)


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
        self._order: list[GroupRecord] = []  # the same, by place
        self._settled: list[_Part] | None = None  # of _parts(); None: to be found anew
        self._in_flight = 0

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
        return self._in_flight

    @property
    def graded(self) -> int:
        """Groups that wait for the trainer."""
        return len(self._records) - self._in_flight

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
            room = min(room, left * rule.most_draws - begun.fresh)
        return max(0, room)

    def draw(self) -> int:
        """Draw one more group; returns its number."""
        number, place = self.next, len(self._order)
        self._records[number] = record = GroupRecord(number, self.trained, place=place)
        if self._settled is not None:
            self._order.append(record)
            self._settle(max(0, len(self._settled) - 1))
        self._in_flight += 1
        self.counts["drawn"] += 1
        self.next += 1
        return number

    def grade(self, number: int, useful: bool | None) -> None:
        """A group was graded. useful: whether a step wants it; None: it broke, and no step may have it."""
        record, parts = self._records[number], self._parts()
        index = next((n for n, part in enumerate(parts) if part.start <= record.place < part.end), None)
        if index is not None:
            parts[index].count(record, False, -1)
        record.graded, record.useful = True, useful
        self._in_flight -= 1
        if index is not None:
            parts[index].count(record, self._is_lost(record, parts[index]), 1)
            self._settle(index)

    def surplus(self) -> list[int]:
        """Drop the groups that no step can need, whatever else comes back; returns their numbers.

        Their prompts are drawn again under the same numbers.
        """
        parts = self._parts()
        if self.rule.any_order or self.rule.windows > 1 or sum(part.full for part in parts) < self._open:
            return []
        end = parts[-1].end if parts else 0
        gone = [record.number for record in self._order[end:]]
        del self._order[end:]
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
        self._settled = None
        return gone

    def is_ready(self) -> bool:
        """Whether the next step's groups are known: all before its last one are graded, unless any order will do."""
        parts = self._parts()
        if not parts or not parts[0].full:
            return False
        enough = parts[0].useful == self.rule.groups
        return not parts[0].ungraded or (self.rule.any_order and enough)

    def take(self, go_on: Collection[int] = ()) -> list[int]:
        """The numbers of the next step's groups, useful ones first; the others that it looked through are dropped.

        Call it when is_ready(). go_on: unfinished groups; if taken, they are in flight again.
        """
        part, self._settled = self._parts()[0], None
        graded = [record for record in self._order[part.start : part.end] if record.graded]
        fresh = [record for record in graded if not self._is_lost(record, part)]
        useful, spare = ([record for record in fresh if record.useful is kind] for kind in (True, False))
        fill = spare[: self.rule.groups - len(useful)]
        taken = [record.number for record in (*useful, *fill)]
        finished = [number for number in taken if number not in go_on]
        for number in finished:
            del self._records[number]
        for number in set(taken).difference(finished):
            self._records[number].graded = False
            self._in_flight += 1
        self._drop([record.number for record in spare[len(fill) :]], NO_SIGNAL)
        for record in (record for record in graded if record.useful is None):
            self._drop([record.number], BROKEN)
        self._drop([r.number for r in graded if r.useful is not None and self._is_lost(r, part)], STALE)
        self.taken += 1
        self.counts["trained"] += len(finished)
        self.counts[FILLED] += len(fill)
        return taken

    def advance(self) -> None:
        """A step is trained, and the engines have its weights."""
        self.trained += 1
        self._settled = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        drawn_at = {str(number): record.drawn_at for number, record in self._records.items()}
        return {"counts": dict(self.counts), "next": self.next, "drawn_at": drawn_at}

    def restore(self, state: dict[str, Any], useful: Mapping[int, bool | None]) -> list[int]:
        """Go on from a state, with only the groups from number `next` on. useful: of the graded groups, by number, as
        for grade().

        Returns the numbers of the ungraded groups, which are to be generated (again).
        """
        first, self._settled = self.next, None
        kept = {int(number): drawn_at for number, drawn_at in state["drawn_at"].items() if int(number) >= first}
        self._records = {
            number: GroupRecord(number, drawn_at, number in useful, useful.get(number, False))
            for number, drawn_at in sorted(kept.items())
        }
        self.counts, self.next = Counter(state["counts"]), max(state["next"], first)
        self.counts[STALE] += len(state["drawn_at"]) - len(kept)
        ungraded = [number for number in kept if number not in useful]
        self._in_flight = len(ungraded)
        return ungraded

    def _drop(self, numbers: list[int], reason: str) -> None:
        for number in numbers:
            self._in_flight -= not self._records.pop(number).graded
        self.counts[reason] += len(numbers)

    @property
    def _open(self) -> int:
        """Number of steps for which groups may be drawn now."""
        return min(self.trained + 1 + self.rule.staleness, self.rule.steps) - self.taken

    def _is_lost(self, record: GroupRecord, part: _Part) -> bool:
        return record.useful is None or part.step - 1 - record.drawn_at > self.rule.oldest

    def _is_full(self, part: _Part) -> bool:
        most_draws = self.rule.most_draws
        return part.useful >= self.rule.groups or (most_draws is not None and part.fresh >= most_draws)

    def _parts(self) -> list[_Part]:
        """What the open steps look through, each part as short as can be. Ungraded groups count as not useful."""
        if self._settled is None:
            self._order, self._settled = list(self._records.values()), []
            for place, record in enumerate(self._order):
                record.place = place
            self._settle(0)
        return self._settled

    def _settle(self, index: int) -> None:
        """Move the ends of parts, from this one on, after a group came in or was graded: a place or two as a rule."""
        assert self._settled is not None
        parts, order = self._settled, self._order
        while True:
            start = parts[index - 1].end if index else 0
            if start == len(order) or (index == len(parts) == self._open):
                del parts[index:]
                return
            if index == len(parts):
                parts.append(_Part(self.taken + index + 1, start, start))
            part, end = parts[index], parts[index].end
            is_moved = part.start != start
            while part.end < start:
                self._extend(part)
            for place in range(part.start, start):
                part.count(order[place], self._is_lost(order[place], part), -1)
            for place in range(start, part.start):
                part.count(order[place], self._is_lost(order[place], part), 1)
            part.start = start
            while self._is_full(part) and part.end > start:
                last = order[part.end - 1]
                part.count(last, self._is_lost(last, part), -1)
                part.end -= 1
            while not self._is_full(part) and part.end < len(order):
                self._extend(part)
            part.full = self._is_full(part)
            index += 1
            if part.end == end and not is_moved and index < len(parts):
                return

    def _extend(self, part: _Part) -> None:
        record = self._order[part.end]
        part.count(record, self._is_lost(record, part), 1)
        part.end += 1

"""Which prompt groups are drawn, in flight, graded, trained and dropped, and hence how many to
draw.

Groups are numbered in the order drawn, and a step trains the first useful ones, so the training
data does not depend on which response arrives first. Only if unfinished responses are kept for the
next step (`StepRule.any_order`) does a step train whichever groups are finished. The ledger does no
I/O: its owner asks it for room, draws, and reports what has arrived.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vapo_megatron.config.algorithm import DynamicSamplingConfig
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.config.run import BatchConfig

FILLED = "filled"  # has no signal, and is trained on because there were no others
# Why a group is not trained on.
NO_SIGNAL = "no_signal"  # dynamic sampling: all of its responses are correct, or all incorrect
SURPLUS = "surplus"  # the step had enough groups; the prompt is drawn again
STALE = "stale"  # drawn more steps ago than is allowed
BROKEN = "broken"  # one of its episodes failed and cannot be trained on
DROPPED = (NO_SIGNAL, SURPLUS, STALE, BROKEN)


@dataclass(frozen=True)
class StepRule:
    """How groups make up a step.

    Attributes:
        groups: number of groups that a step trains on.
        steps: number of the last step.
        oversampling: groups in flight, as a multiple of those still wanted.
        most_draws: largest number of groups drawn for a step; once they are graded, groups without
            signal fill it up. Broken and stale groups do not count. None: no bound.
        staleness: how many steps may be collected beyond the one that is trained next: groups are
            drawn only for steps up to trained + 1 + staleness. 0: synchronous.
        any_order: a step trains the oldest graded groups and the others stay; not with staleness.
        max_age: with any_order, number of steps after which an ungraded group is dropped.
        windows: largest number of steps that train a group, each on one window of its responses.
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
        if self.any_order:
            return self.max_age
        return max(self.staleness, self.windows - 1)


def step_rule(
    size: BatchConfig, sampling: DynamicSamplingConfig, steps: int, rollout: RolloutConfig
) -> StepRule:
    """The groups that a training step needs: with dynamic sampling, those with both correct and
    incorrect responses."""
    rule = StepRule(
        size.prompts_per_step,
        steps,
        staleness=rollout.asynchronous.max_staleness,
        windows=rollout.windows,
    )
    partial_oversampling = rollout.partial_responses.oversampling
    if partial_oversampling is not None:
        rule = replace(rule, any_order=True, oversampling=partial_oversampling)
    if sampling.max_rounds is not None:
        most_draws = round(sampling.max_rounds * sampling.oversampling * size.prompts_per_step)
        rule = replace(rule, oversampling=sampling.oversampling, most_draws=most_draws)
    return rule


@dataclass
class GroupRecord:
    """A group that is neither trained nor dropped.

    Attributes:
        number: number of the group.
        drawn_at: number of steps trained when it was drawn.
        graded: whether its responses are graded.
        useful: whether a step wants it, once graded; None if it is broken.
        place: position in the order drawn, among the groups that are left.
    """

    number: int
    drawn_at: int
    graded: bool = False
    useful: bool | None = False
    place: int = 0


@dataclass
class _Part:
    """The groups that one step looks through.

    Attributes:
        step: number of the step.
        start, end: places of its first group and after its last one.
        useful: how many of them are useful.
        lost: how many are too old or broken.
        ungraded: how many are not graded.
        full: whether the step needs no more.
    """

    step: int
    start: int = 0
    end: int = 0
    useful: int = 0
    lost: int = 0
    ungraded: int = 0
    full: bool = False

    @property
    def fresh(self) -> int:
        """Number of groups that are not known to be lost."""
        return self.end - self.start - self.lost

    def count(self, record: GroupRecord, is_lost: bool, by: int) -> None:
        """Add a group (by = 1) to the numbers, or subtract it (by = -1)."""
        self.ungraded += by * (not record.graded)
        self.lost += by * (record.graded and is_lost)
        self.useful += by * (record.graded and record.useful is True and not is_lost)


class Ledger:
    """The groups of a run.

    Attributes:
        rule: how groups make up a step.
        next: number of the next group to draw.
        trained: number of the last step whose weights the engines have.
        taken: number of the last step that the trainer has taken.
        counts: number of groups drawn, trained (filled ones included) and, by reason, dropped;
            drawn = trained + dropped + in flight + graded.
    """

    def __init__(self, rule: StepRule, first: int = 0, step: int = 0) -> None:
        """rule: see StepRule. first, step: next group number and last completed step of a resumed
        run."""
        self.rule = rule
        self.next = first
        self.trained = step
        self.taken = step
        self.counts: Counter[str] = Counter()
        self._records: dict[int, GroupRecord] = {}  # in the order of their numbers
        self._order: list[GroupRecord] = []  # the same, by place
        self._settled: list[_Part] | None = None  # see _parts(); None: has to be recomputed
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
        """Number of groups that are drawn and not graded."""
        return self._in_flight

    @property
    def graded(self) -> int:
        """Number of groups that wait for the trainer."""
        return len(self._records) - self._in_flight

    def room(self) -> int:
        """How many groups may be drawn now."""
        parts = self._parts()
        rule = self.rule
        left = self._open - sum(part.full for part in parts)
        if left == 0:
            return 0
        begun = _Part(0)
        if parts and not parts[-1].full:
            begun = parts[-1]
        missing = left * rule.groups - begun.useful
        room = max(1, round(missing * rule.oversampling)) - self.in_flight
        if rule.most_draws is not None:
            room = min(room, left * rule.most_draws - begun.fresh)
        return max(0, room)

    def draw(self) -> int:
        """Draw one more group and return its number."""
        number = self.next
        record = GroupRecord(number, self.trained, place=len(self._order))
        self._records[number] = record
        if self._settled is not None:
            self._order.append(record)
            self._settle(max(0, len(self._settled) - 1))
        self._in_flight += 1
        self.counts["drawn"] += 1
        self.next += 1
        return number

    def grade(self, number: int, useful: bool | None) -> None:
        """A group was graded.

        Args:
            number: number of the group.
            useful: whether a step wants it; None: it is broken, and no step may have it.
        """
        record = self._records[number]
        parts = self._parts()
        index = None
        for i, part in enumerate(parts):
            if part.start <= record.place < part.end:
                index = i
                break
        if index is not None:
            parts[index].count(record, False, -1)
        record.graded = True
        record.useful = useful
        self._in_flight -= 1
        if index is not None:
            parts[index].count(record, self._is_lost(record, parts[index]), 1)
            self._settle(index)

    def surplus(self) -> list[int]:
        """Drop the groups that no step can need, whatever else arrives, and return their numbers.

        Their prompts are drawn again under the same numbers.
        """
        if self.rule.any_order or self.rule.windows > 1:
            return []
        parts = self._parts()
        if sum(part.full for part in parts) < self._open:
            return []
        end = parts[-1].end if parts else 0
        dropped = [record.number for record in self._order[end:]]
        del self._order[end:]
        self._drop(dropped, SURPLUS)
        if dropped:
            self.next = dropped[0]
        return dropped

    def expired(self) -> list[int]:
        """With any_order, drop ungraded groups that are too old for the next step, and return their
        numbers."""
        if not self.rule.any_order:
            return []
        dropped = [
            record.number
            for record in self._records.values()
            if not record.graded and self.taken - record.drawn_at > self.rule.oldest
        ]
        self._drop(dropped, STALE)
        self._settled = None
        return dropped

    def is_ready(self) -> bool:
        """Whether the next step's groups are known: all before its last one are graded, unless a
        step may train any graded groups."""
        parts = self._parts()
        if not parts or not parts[0].full:
            return False
        if self.rule.any_order and parts[0].useful == self.rule.groups:
            return True
        return not parts[0].ungraded

    def take(self, go_on: Collection[int] = ()) -> list[int]:
        """The numbers of the next step's groups, useful ones first. The others that it looked
        through are dropped.

        Call it when is_ready().

        Args:
            go_on: unfinished groups; if taken, they are in flight again.
        """
        part = self._parts()[0]
        self._settled = None
        graded = [record for record in self._order[part.start : part.end] if record.graded]
        fresh = [record for record in graded if not self._is_lost(record, part)]
        useful = [record for record in fresh if record.useful is True]
        spare = [record for record in fresh if record.useful is False]
        fill = spare[: self.rule.groups - len(useful)]
        taken = [record.number for record in (*useful, *fill)]
        finished = [number for number in taken if number not in go_on]
        for number in finished:
            del self._records[number]
        for number in set(taken).difference(finished):
            self._records[number].graded = False
            self._in_flight += 1
        broken = [record for record in graded if record.useful is None]
        stale = [
            record for record in graded if record.useful is not None and self._is_lost(record, part)
        ]
        self._drop([record.number for record in spare[len(fill) :]], NO_SIGNAL)
        self._drop([record.number for record in broken], BROKEN)
        self._drop([record.number for record in stale], STALE)
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
        """Resume from a state, with only the groups from number `next` on.

        Args:
            state: see state().
            useful: the graded groups by number, with the value for grade().

        Returns:
            The numbers of the ungraded groups, which have to be generated (again).
        """
        first = self.next
        self._settled = None
        kept = {
            int(number): drawn_at
            for number, drawn_at in state["drawn_at"].items()
            if int(number) >= first
        }
        self._records = {
            number: GroupRecord(number, drawn_at, number in useful, useful.get(number, False))
            for number, drawn_at in sorted(kept.items())
        }
        self.next = max(state["next"], first)
        self.counts = Counter(state["counts"])
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
        if part.useful >= self.rule.groups:
            return True
        most_draws = self.rule.most_draws
        return most_draws is not None and part.fresh >= most_draws

    def _parts(self) -> list[_Part]:
        """What the open steps look through, each part as short as possible. Ungraded groups count
        as not useful."""
        if self._settled is None:
            self._order = list(self._records.values())
            self._settled = []
            for place, record in enumerate(self._order):
                record.place = place
            self._settle(0)
        return self._settled

    def _settle(self, index: int) -> None:
        """Move the ends of parts, from this one on, after a group was drawn or graded. Usually they
        move by one or two places."""
        assert self._settled is not None
        parts = self._settled
        order = self._order
        while True:
            start = parts[index - 1].end if index else 0
            if start == len(order) or (index == len(parts) == self._open):
                del parts[index:]
                return
            if index == len(parts):
                parts.append(_Part(self.taken + index + 1, start, start))
            part = parts[index]
            end = part.end
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
            if part.end == end and index < len(parts):
                return  # the next part begins where it did

    def _extend(self, part: _Part) -> None:
        record = self._order[part.end]
        part.count(record, self._is_lost(record, part), 1)
        part.end += 1

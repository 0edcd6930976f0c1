"""Simulates the steps of a run in small ticks of time.

What is drawn, kept and dropped is decided by the run's own ledger (rollout/ledger.py). Engines,
tools, graders and the trainer only take time; nothing is written.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from vapo_megatron.rollout.ledger import Ledger, StepRule

_WAITING, _RUNNING, _AT_TOOL, _DONE = range(4)
_NUMBERS = ("number", "draw", "engine", "state", "turns")
_AMOUNTS = ("left", "turn_tokens", "written", "unread", "ready_at", "versions")
_RESPONSE = np.dtype(
    [(name, np.int64) for name in _NUMBERS] + [(name, np.float64) for name in _AMOUNTS]
)


@dataclass(frozen=True)
class Scenario:
    """A run to simulate; times in seconds.

    Attributes:
        rule: what makes a step. Windows are not simulated.
        sync_mode: what becomes of responses under way at a weight sync.
        engines, at_once: how many, and the responses that each generates together; others wait.
        decode_seconds: of a decoding step, by running responses and the mean tokens of their
            sequences.
        prefill_seconds: of reading so many tokens; nothing else is generated meanwhile.
        lengths_of: tokens of the responses of a group, by its number, float64 [responses].
        is_informative: whether a group has both correct and incorrect responses, by its number.
        trainer_seconds: of everything that the trainer does with samples of so many tokens.
        grade_seconds, grade_workers: of a response; how many share the grading.
        turns, tool_seconds: responses of an episode, and its wait for a tool between two, outside
            the batch.
        tick: time moves by at most so much.
        steps: that are counted, after those in which the run settles.
    """

    rule: StepRule
    sync_mode: Literal["wait", "retract", "in_place"]
    engines: int
    at_once: int
    decode_seconds: Callable[[float, float], float]
    prefill_seconds: Callable[[float], float]
    prompt_tokens: int
    lengths_of: Callable[[int], np.ndarray]
    trainer_seconds: Callable[[float], float]
    sync_seconds: float
    grade_seconds: float
    grade_workers: int
    tick: float
    is_informative: Callable[[int], bool] = lambda number: True
    turns: int = 1
    tool_seconds: float = 0.0
    steps: int = 4


@dataclass
class Outcome:
    """A run that has settled, step by step.

    Attributes:
        seconds, tokens: from one step's groups to the next one's; of its responses.
        waited: seconds in which the trainer waits, for groups or for engines that are to get its
            weights.
        ages: mean weight syncs between drawing and training a token.
        counts: of the ledger.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Mean seconds of a step."""
        return sum(self.seconds) / len(self.seconds)


class _Rollouts:
    """Groups on their way through engines and graders. `responses` has a row for each, oldest
    first."""

    def __init__(self, scenario: Scenario, steps: int) -> None:
        self.scenario = scenario
        self.ledger = Ledger(replace(scenario.rule, steps=steps, windows=1))
        self.now = 0.0
        self.version = 0
        # The first rows of those that have room
        self.responses = self._rows = np.zeros(0, _RESPONSE)
        self._draws = 0
        self._missing: dict[int, int] = {}  # responses of a draw that are not done; 0: it is graded
        self._graded_at: deque[tuple[float, int, int]] = deque()  # when, draw, number
        self._graders_free = 0.0
        self._unread_seconds = np.zeros(scenario.engines)
        self._is_paused = False
        self._may_begin = True  # whether there may be a free place and somebody waiting for it

    def take(self) -> np.ndarray:
        """The responses of the next step."""
        self._remove(self.ledger.expired())
        self._is_paused = False
        self._fill()
        self.run(self.ledger.is_ready)
        taken = self._remove(self.ledger.take())
        self._remove(self.ledger.surplus())
        if not self.ledger.rule.staleness:  # engines wait; unfinished responses are prefilled again
            self._stop()
            self._is_paused = True
        return taken

    def sync_weights(self) -> None:
        if self.scenario.sync_mode == "retract":
            self._stop()
        self._is_paused = True
        self.run(lambda: False, self.now + self.scenario.sync_seconds)
        self.version += 1
        self.ledger.advance()
        if self.ledger.rule.staleness:  # other engines wait until the next step asks
            self._is_paused = False
            self._fill()

    def run(self, is_over: Callable[[], bool], end: float = math.inf) -> None:
        """Let time pass until a condition holds, or until a moment."""
        while not is_over() and self.now < end:
            if self._may_begin and not self._is_paused:
                self._begin_waiting()
            event = min(end, self._graded_at[0][0] if self._graded_at else math.inf)
            if self.scenario.turns > 1:
                at_tools = self.responses["ready_at"][self.responses["state"] == _AT_TOOL]
                event = min(event, at_tools.min(initial=math.inf))
            running = np.flatnonzero(self.responses["state"] == _RUNNING)
            if not len(running) or self._is_paused:
                assert event < math.inf, "the simulation waits for what will never happen"
                self.now = max(self.now, event)
            else:
                self._decode(running, min(self.scenario.tick, max(0.0, event - self.now)))
            if self.scenario.turns > 1:
                answered = (self.responses["state"] == _AT_TOOL) & (
                    self.responses["ready_at"] <= self.now
                )
                self.responses["state"][answered], self._may_begin = _WAITING, True
            self._grade()

    def _fill(self) -> None:
        scenario = self.scenario
        drawn = []
        room = self.ledger.room()
        if not room:
            return
        load = np.bincount(
            self.responses["engine"], self.responses["state"] != _DONE, scenario.engines
        )
        for _ in range(room):
            number = self.ledger.draw()
            lengths = scenario.lengths_of(number)
            rows = np.zeros(len(lengths), _RESPONSE)
            self._draws += 1
            rows["number"], rows["draw"], rows["engine"] = number, self._draws, load.argmin()
            rows["turns"] = np.minimum(scenario.turns, lengths) - 1
            rows["turn_tokens"] = rows["left"] = lengths / (rows["turns"] + 1)
            rows["unread"][0] = scenario.prompt_tokens  # it is read once for the whole group
            load[load.argmin()] += len(rows)
            self._missing[self._draws] = len(rows)
            drawn.append(rows)
        self._may_begin = True
        count = len(self.responses)
        new = np.concatenate(drawn)
        if count + len(new) > len(self._rows):
            self._rows = np.concatenate((self.responses, np.zeros(count + 2 * len(new), _RESPONSE)))
        self._rows[count : count + len(new)] = new
        self.responses = self._rows[: count + len(new)]

    def _begin_waiting(self) -> None:
        """Give the places that are free in an engine's batch to those that wait longest."""
        rows = self.responses
        running = np.bincount(rows["engine"], rows["state"] == _RUNNING, self.scenario.engines)
        free = self.scenario.at_once - running
        waiting = np.flatnonzero((rows["state"] == _WAITING) & (free[rows["engine"]] > 0))
        self._may_begin = False
        waiting = waiting[np.argsort(rows["engine"][waiting].astype(np.int16), kind="stable")]
        engine = rows["engine"][waiting]
        place = (
            np.arange(len(waiting))
            - np.searchsorted(engine, np.arange(self.scenario.engines))[engine]
        )
        begun = waiting[place < free[engine]]
        for row in begun[rows["unread"][begun] > 0]:
            self._unread_seconds[rows["engine"][row]] += self.scenario.prefill_seconds(
                rows["unread"][row]
            )
        rows["unread"][begun], rows["state"][begun] = 0, _RUNNING

    def _decode(self, running: np.ndarray, seconds: float) -> None:
        rows = self.responses
        engines = self.scenario.engines
        engine = rows["engine"][running]
        count = np.bincount(engine, minlength=engines)
        tokens = np.bincount(
            engine, self.scenario.prompt_tokens + rows["written"][running], engines
        )
        free = np.where(count, np.maximum(0.0, seconds - self._unread_seconds), 0.0)
        self._unread_seconds = np.maximum(0.0, self._unread_seconds - seconds)
        pairs = zip(count.tolist(), tokens.tolist(), strict=True)
        steps = free / [
            self.scenario.decode_seconds(n, total / n) if n else 1.0 for n, total in pairs
        ]
        gained = np.minimum(steps[engine], rows["left"][running])
        rows["written"][running] += gained
        rows["left"][running] -= gained
        rows["versions"][running] += gained * self.version
        self.now += seconds
        ended = running[rows["left"][running] < 1e-6]
        self._may_begin = self._may_begin or len(ended) > 0
        goes_on = ended[rows["turns"][ended] > 0]
        rows["state"][ended], rows["state"][goes_on] = _DONE, _AT_TOOL
        rows["ready_at"][goes_on] = self.now + self.scenario.tool_seconds
        rows["left"][goes_on], rows["turns"][goes_on] = (
            rows["turn_tokens"][goes_on],
            rows["turns"][goes_on] - 1,
        )
        for row in ended[rows["state"][ended] == _DONE]:
            draw = int(rows["draw"][row])
            number = int(rows["number"][row])
            self._missing[draw] -= 1
            if not self._missing[draw]:
                seconds = (
                    (rows["draw"] == draw).sum()
                    * self.scenario.grade_seconds
                    / self.scenario.grade_workers
                )
                self._graders_free = max(self.now, self._graders_free) + seconds
                self._graded_at.append((self._graders_free, draw, number))

    def _grade(self) -> None:
        while self._graded_at and self._graded_at[0][0] <= self.now:
            _, draw, number = self._graded_at.popleft()
            if draw in self._missing:  # it was not dropped meanwhile
                self.ledger.grade(
                    number,
                    self.ledger.rule.most_draws is None or self.scenario.is_informative(number),
                )
                self._remove(self.ledger.surplus())
                self._fill()

    def _stop(self) -> None:
        """Whatever runs waits; its cache is gone."""
        rows = self.responses
        begun = (rows["state"] == _RUNNING) | ((rows["state"] == _WAITING) & (rows["written"] > 0))
        rows["unread"][begun] = self.scenario.prompt_tokens + rows["written"][begun]
        rows["state"][begun], self._may_begin = _WAITING, True
        self._unread_seconds[:] = 0.0

    def _remove(self, numbers: Iterable[int]) -> np.ndarray:
        numbers = list(numbers)
        if not numbers:
            return self.responses[:0]
        is_gone = np.isin(self.responses["number"], numbers)
        self._may_begin = True
        gone = self.responses[is_gone]
        self.responses = self._rows = self.responses[~is_gone]
        for draw in set(gone["draw"].tolist()):
            del self._missing[draw]
        return gone


def simulate(scenario: Scenario) -> Outcome:
    """Run its steps, as training/loop.py goes through them."""
    rule = scenario.rule
    settled = 2 + scenario.rule.oldest
    last = settled + scenario.steps
    # Engines work ahead of the last step that counts as they do of any other.
    rollouts = _Rollouts(scenario, 2 * last)
    outcome = Outcome()
    taken = 0.0
    waited = 0.0
    for step in range(last):
        asked = rollouts.now
        samples = rollouts.take()
        written = float(samples["written"].sum())
        seconds = rollouts.now - taken
        waited = waited + rollouts.now - asked
        taken = rollouts.now
        if step >= settled:
            outcome.seconds.append(seconds)
            outcome.tokens.append(written)
            outcome.waited.append(waited)
            outcome.ages.append(
                max(0.0, rollouts.version - float(samples["versions"].sum()) / written)
            )
        trainer_seconds = scenario.trainer_seconds(written + len(samples) * scenario.prompt_tokens)
        rollouts.run(lambda: False, rollouts.now + trainer_seconds)
        trained = rollouts.now
        if rule.staleness and scenario.sync_mode == "wait":
            rollouts.run(lambda: not rollouts.ledger.in_flight and not rollouts.ledger.room())
        waited = rollouts.now - trained
        rollouts.sync_weights()
    outcome.counts = dict(rollouts.ledger.counts)
    return outcome

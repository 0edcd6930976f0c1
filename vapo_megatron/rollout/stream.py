"""Turns prompts into a stream of graded groups: groups are graded while others are generated."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.rollout.dispatcher import Dispatcher
from vapo_megatron.rollout.ledger import Ledger
from vapo_megatron.rollout.request import GroupRequest

# Groups that are decoded and graded at once; they share the verifier's processes.
GRADED_AT_ONCE = 16

# Seconds between checks whether the run should stop while a step's groups are collected.
_LOOK_SECONDS = 0.5

Group = list[Sample]


class StopAsked(TryAgain):
    """The run was asked to stop before the trainer changed anything in this step, so that the
    step's groups can be saved."""


@dataclass(frozen=True)
class Work:
    """How a stream turns prompts into graded groups.

    Attributes:
        request: makes the request for a prompt, with the current weight version.
        grade: fills in the rewards of samples. Called in threads.
        is_useful: whether a step wants a graded group; None: it is broken, and no step may have it.
        responses: number of responses of a step.
        timeout_s: seconds without a response or grade after which a collection fails.
        generate: answers a request; None: the dispatcher.
    """

    request: Callable[[Prompt], GroupRequest]
    grade: Callable[[Group], None]
    is_useful: Callable[[Group], bool | None]
    responses: int
    timeout_s: float
    generate: Callable[[GroupRequest], Awaitable[Group]] | None = None


class GroupStream:
    """Draws, generates and grades groups while a ledger has room, and returns them in the order
    drawn.

    It runs in the dispatcher's thread. Its public methods block their callers.

    Attributes:
        ledger: decides which groups are drawn, trained and dropped.
        dropped: graded groups that the last take() looked through and dropped, in the order drawn,
            without broken ones.
    """

    def __init__(
        self, dispatcher: Dispatcher, prompts: PromptSource, ledger: Ledger, work: Work
    ) -> None:
        """ledger: a new one. restore() may follow."""
        self._dispatcher = dispatcher
        self._prompts = prompts
        self.ledger = ledger
        self._work = work
        self._graders = ThreadPoolExecutor(GRADED_AT_ONCE, thread_name_prefix="grade")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._graded: dict[int, Group] = {}
        self._begun: dict[int, Group] = {}  # stopped before they were finished
        # state() before a take(), until advance().
        self._state_before: tuple[dict[str, Any], dict[int, Group]] | None = None
        self.dropped: list[Group] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._closed = False
        self._on_generated: Callable[[int], None] = _ignore

    @property
    def responses(self) -> int:
        """Number of responses of a step."""
        return self._work.responses

    def take(
        self,
        on_generated: Callable[[int], None],
        interruption: Callable[[], str | None] | None = None,
    ) -> list[Group]:
        """The groups of the next step.

        Samples are numbered by their group's place in the step; the groups in `dropped` are
        numbered after them. If groups are trained window by window, only responses that have grown
        since the previous step are returned.

        Args:
            on_generated: called with the number of responses that have just arrived, of any step.
            interruption: returns why to stop waiting, or None.

        Raises:
            StopAsked: `interruption` gave a reason; state() has the graded groups.
            TryAgain: nothing arrived for Work.timeout_s. Errors of generating and grading are
                raised unchanged.
        """
        self._on_generated = on_generated
        try:
            groups = self._dispatcher.wait(self._dispatcher.loop.start(self._take(interruption)))
        finally:
            self._on_generated = _ignore
        for place, group in enumerate((*groups, *self.dropped)):
            for sample in group:
                sample.group = place
        return groups

    def wait_until_graded(self) -> None:
        """Return once every group that may be drawn now is drawn and graded.

        Raises:
            TryAgain: see take().
        """
        graded = self._wait_for(lambda: not self._tasks and not self.ledger.room())
        self._dispatcher.wait(self._dispatcher.loop.start(graded))

    def advance(self) -> None:
        """A step is trained and the engines have its weights. If steps overlap, groups are drawn
        for the next one."""
        self._dispatcher.loop.run(self._advance())

    def state(self) -> tuple[dict[str, Any], dict[int, Group]]:
        """For a checkpoint: the ledger's state, and the graded and begun groups by number.

        Groups that were taken belong to it until advance(): a run that resumes from it takes them
        again.
        """
        return self._dispatcher.loop.run(self._state())

    def restore(self, state: dict[str, Any], groups: dict[int, Group]) -> None:
        """Resume from a state.

        Groups that are missing are generated again. So are all groups if experts are wanted, which
        no state has, and groups that were begun in windows if there are none now, or the other way
        round: parts of them may have been trained.
        """
        self._dispatcher.loop.run(self._restore(state, groups))

    def close(self) -> None:
        """Abort running requests."""
        self._dispatcher.loop.run(self._close())
        self._graders.shutdown(wait=False)  # the aborted tasks took back what waited for a thread

    async def _close(self) -> None:
        self._closed = True
        await self._abort(list(self._tasks))

    async def _take(self, interruption: Callable[[], str | None] | None) -> list[Group]:
        expired = self.ledger.expired()
        await self._abort([number for number in expired if number in self._tasks])
        self._begun = self._still_drawn(self._begun)
        for number in self._begun:
            if number not in self._tasks:
                self._start(number)
        self._fill()
        await self._wait_for(self.ledger.is_ready, interruption)
        self._state_before = (self.ledger.state(), self._graded.copy())
        unfinished = [number for number, group in self._graded.items() if _is_unfinished(group)]
        taken = {number: self._graded.pop(number) for number in self.ledger.take(unfinished)}
        for number in unfinished:
            if number in taken:
                self._begun[number] = _next_window(taken[number])
        self.dropped = self._dropped_groups()
        self._graded = self._still_drawn(self._graded)
        await self._drop_surplus()
        if self.ledger.rule.any_order:
            await self._stop()
        return [[sample for sample in group if not sample.is_trained] for group in taken.values()]

    def _still_drawn(self, groups: dict[int, Group]) -> dict[int, Group]:
        """Those of some groups that the ledger has neither trained nor dropped."""
        return {number: group for number, group in groups.items() if number in self.ledger}

    def _dropped_groups(self) -> list[Group]:
        """Graded groups that the ledger has dropped, in the order drawn, without broken ones."""
        if self.ledger.rule.any_order:
            # Long groups are still being generated: only short ones would be listed.
            return []
        dropped = [
            group for number, group in sorted(self._graded.items()) if number not in self.ledger
        ]
        return [group for group in dropped if self._work.is_useful(group) is not None]

    async def _wait_for(
        self, condition: Callable[[], bool], interruption: Callable[[], str | None] | None = None
    ) -> None:
        if interruption is None:
            look_seconds = None
        else:
            look_seconds = _LOOK_SECONDS
        try:
            async with self._dispatcher.progress.limit(self._work.timeout_s):
                while not condition():
                    if self._failure is not None:
                        raise self._failure
                    if interruption is not None and (reason := interruption()):
                        raise StopAsked(reason)
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(look_seconds):
                            await self._changed.wait()
        except TimeoutError:
            arrived = sum(len(group) for group in self._graded.values())
            raise self._dispatcher.overdue(arrived, self._work.responses) from None

    async def _advance(self) -> None:
        self._state_before = None
        self.ledger.advance()
        if self.ledger.rule.staleness:  # otherwise engines wait for the next take()
            self._fill()

    def _fill(self) -> None:
        if self._closed or self._failure is not None:
            return
        for _ in range(self.ledger.room()):
            self._start(self.ledger.draw())

    def _start(self, number: int) -> None:
        self._tasks[number] = asyncio.create_task(self._run(number))

    async def _run(self, number: int) -> None:
        """Generate and grade a group, then draw more if the ledger has room."""
        generate = self._work.generate or self._dispatcher.generate
        try:
            request = self._work.request(self._prompts.at(number))
            group = await generate(replace(request, begun=self._begun.get(number, ())))
            if request.window is None and _is_unfinished(group):
                self._begun[number] = group
                del self._tasks[number]
                if not self._stopping:  # for example, its engine was restarted
                    self._start(number)
                return
            new = [sample for sample in group if not sample.is_trained]
            self._on_generated(len(new))
            await asyncio.get_running_loop().run_in_executor(self._graders, self._work.grade, new)
            self._dispatcher.progress.note()
            self._graded[number] = group
            # Not earlier: a state saved meanwhile must hold the unfinished responses.
            self._begun.pop(number, None)
            self.ledger.grade(number, self._work.is_useful(group))
            del self._tasks[number]
            await self._drop_surplus()
            self._fill()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled this task: a group that vanishes would be waited for until the end.
            error = RunFailed(
                f"group {number} ended without a grade: what generates or grades it cancelled "
                "itself"
            )
            self._failure = self._failure or error
        except BaseException as error:
            self._failure = self._failure or error
        self._changed.set()

    async def _state(self) -> tuple[dict[str, Any], dict[int, Group]]:
        state, taken = self._state_before or (self.ledger.state(), {})
        groups = self._begun | self._graded | taken
        drawn = state["drawn_at"]
        return state, {number: group for number, group in groups.items() if str(number) in drawn}

    async def _restore(self, state: dict[str, Any], groups: dict[int, Group]) -> None:
        self._begun = {}
        self._graded = {}
        for number, group in groups.items():
            if not self._is_usable(group):
                continue
            if _waits_for_engine(group):
                self._begun[number] = group
            else:
                self._graded[number] = group
        useful = {number: self._work.is_useful(group) for number, group in self._graded.items()}
        for number in self.ledger.restore(state, useful):
            self._start(number)

    def _is_usable(self, group: Group) -> bool:
        """Whether a saved group has windows exactly if groups have them now, and needs no
        experts."""
        request = self._work.request(group[0].prompt)
        if request.routed_experts is not None:
            return False
        return all((sample.window_start is None) == (request.window is None) for sample in group)

    async def _drop_surplus(self) -> None:
        surplus = self.ledger.surplus()
        for number in surplus:
            self._graded.pop(number, None)
        await self._abort([number for number in surplus if number in self._tasks])

    async def _stop(self) -> None:
        """End running requests and keep their tokens."""
        tasks = list(self._tasks.values())
        self._stopping = True
        await self._dispatcher.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stopping = False

    async def _abort(self, numbers: list[int]) -> None:
        tasks = [self._tasks.pop(number) for number in numbers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_unfinished(group: Group) -> bool:
    return any(sample.goes_on for sample in group)


def _waits_for_engine(group: Group) -> bool:
    """Whether a saved group is to be continued. Otherwise it, or a window of it, waits for the
    trainer."""
    if not _is_unfinished(group):
        return False
    return group[0].window_start is None or all(sample.is_trained for sample in group)


def _next_window(group: Group) -> Group:
    """A group after the trainer has taken everything that was written of its responses."""
    return [replace(sample, window_start=len(sample.response_ids)) for sample in group]


def _ignore(responses: int) -> None: ...

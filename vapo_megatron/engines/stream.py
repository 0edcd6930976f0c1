"""Prompts in, a stream of graded groups out: groups are graded while others are still generated."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vapo_megatron.data.prompts import PromptSource
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.engines.dispatcher import Dispatcher
from vapo_megatron.engines.ledger import Ledger
from vapo_megatron.engines.request import GroupRequest
from vapo_megatron.errors import TryAgain

# Groups that are decoded and graded at once; they share the verifier's processes.
GRADED_AT_ONCE = 16

# While a step is waited for, seconds between checks whether the run should stop.
_LOOK_SECONDS = 0.5

Group = list[Sample]


class StopAsked(TryAgain):
    """The run was asked to stop before the trainer changed anything in this step: its groups can be saved."""


@dataclass(frozen=True)
class Work:
    """How a stream turns prompts into graded groups.

    Attributes:
        request: makes the request for a prompt, with the current weight version.
        grade: fills in the rewards of samples. Called in threads.
        is_useful: whether a step wants a graded group; None: it is broken, and no step may have it.
        responses: number of responses of a step.
        timeout_s: seconds that the responses of a step may take.
        generate: answers a request; None: the dispatcher.
    """

    request: Callable[[Prompt], GroupRequest]
    grade: Callable[[Group], None]
    is_useful: Callable[[Group], bool | None]
    responses: int
    timeout_s: float
    generate: Callable[[GroupRequest], Awaitable[Group]] | None = None


class GroupStream:
    """Draws, generates and grades groups as far as a ledger has room, and returns them in the order drawn.

    It runs in the dispatcher's thread; its public methods block their callers.

    Attributes:
        dropped: graded groups that the last take() looked through and dropped, in the order drawn; no broken ones.
    """

    def __init__(self, dispatcher: Dispatcher, prompts: PromptSource, ledger: Ledger, work: Work) -> None:
        """ledger: a new one; restore() may follow."""
        self._dispatcher, self._prompts, self.ledger, self._work = dispatcher, prompts, ledger, work
        self._graders = ThreadPoolExecutor(GRADED_AT_ONCE, thread_name_prefix="grade")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._graded: dict[int, Group] = {}
        self._begun: dict[int, Group] = {}  # not finished, and stopped
        self._before: tuple[dict[str, Any], dict[int, Group]] | None = None  # state() before a take, until advance()
        self.dropped: list[Group] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._stopping = self._closed = False
        self._on_generated: Callable[[int], None] = _ignore

    @property
    def responses(self) -> int:
        """Number of responses of a step."""
        return self._work.responses

    def take(
        self, on_generated: Callable[[int], None], interruption: Callable[[], str | None] | None = None
    ) -> list[Group]:
        """The groups of the next step, their samples numbered by their place in it, and those of dropped groups after
        them; of a group that is trained window by window, the responses that have grown since the step before.

        Args:
            on_generated: called with the number of responses that have just arrived, of whichever step.
            interruption: returns why to stop waiting, or None.

        Raises:
            StopAsked: `interruption` gave a reason; state() has the graded groups.
            TryAgain: Work.timeout_s passed. Errors of generating and grading are raised as they are.
        """
        self._on_generated = on_generated
        try:
            groups = self._dispatcher.wait(self._dispatcher.loop.start(self._take(interruption)))
        finally:
            self._on_generated = _ignore
        for number, group in enumerate((*groups, *self.dropped)):
            for sample in group:
                sample.group = number
        return groups

    def wait_until_graded(self) -> None:
        """Return once every group that may be drawn now is drawn and graded.

        Raises:
            As take().
        """
        graded = self._wait_for(lambda: not self._tasks and not self.ledger.room())
        self._dispatcher.wait(self._dispatcher.loop.start(graded))

    def advance(self) -> None:
        """A step is trained and the engines have its weights: draw groups for the next one, if steps overlap."""
        self._dispatcher.loop.run(self._advance())

    def state(self) -> tuple[dict[str, Any], dict[int, Group]]:
        """For a checkpoint: the ledger's state, and by number the groups that wait for the trainer, graded or begun.

        Groups that were taken wait for it until advance(): a run that goes on from the state takes them again."""
        return self._dispatcher.loop.run(self._state())

    def restore(self, state: dict[str, Any], groups: dict[int, Group]) -> None:
        """Go on from a state. Groups that are missing are generated again, and all where experts are wanted, which no
        state has, and those begun whole if windows are wanted now, or in windows if not: parts may have been trained.
        """
        self._dispatcher.loop.run(self._restore(state, groups))

    def close(self) -> None:
        """Abort running requests."""
        self._dispatcher.loop.run(self._close())
        self._graders.shutdown(wait=False, cancel_futures=True)

    async def _close(self) -> None:
        self._closed = True
        await self._abort(list(self._tasks))

    async def _take(self, interruption: Callable[[], str | None] | None) -> list[Group]:
        expired = self.ledger.expired()
        await self._abort([number for number in expired if number in self._tasks])
        self._begun = {number: group for number, group in self._begun.items() if number in self.ledger}
        for number in [number for number in self._begun if number not in self._tasks]:
            self._start(number)
        self._fill()
        await self._wait_for(self.ledger.is_ready, interruption)
        self._before = self.ledger.state(), self._graded.copy()
        unfinished = [number for number, group in self._graded.items() if _goes_on(group)]
        taken = {number: self._graded.pop(number) for number in self.ledger.take(unfinished)}
        self._begun |= {number: _next_window(taken[number]) for number in unfinished if number in taken}
        # In any order, long groups are still on their way: what was dropped would be short ones.
        done = {} if self.ledger.rule.any_order else self._graded
        dropped = [group for number, group in sorted(done.items()) if number not in self.ledger]
        self.dropped = [group for group in dropped if self._work.is_useful(group) is not None]
        self._graded = {number: group for number, group in self._graded.items() if number in self.ledger}
        await self._drop_surplus()
        if self.ledger.rule.any_order:
            await self._stop()
        return [[sample for sample in group if not sample.is_trained] for group in taken.values()]

    async def _wait_for(
        self, condition: Callable[[], bool], interruption: Callable[[], str | None] | None = None
    ) -> None:
        try:
            async with asyncio.timeout(self._work.timeout_s):
                while not condition():
                    if self._failure is not None:
                        raise self._failure
                    if interruption is not None and (reason := interruption()):
                        raise StopAsked(reason)
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(None if interruption is None else _LOOK_SECONDS):
                            await self._changed.wait()
        except TimeoutError:
            came = sum(len(group) for group in self._graded.values())
            raise self._dispatcher.overdue(came, self._work.responses) from None

    async def _advance(self) -> None:
        self._before = None
        self.ledger.advance()
        if self.ledger.rule.staleness:  # else engines wait until they are asked
            self._fill()

    def _fill(self) -> None:
        for _ in range(0 if self._closed or self._failure is not None else self.ledger.room()):
            self._start(self.ledger.draw())

    def _start(self, number: int) -> None:
        self._tasks[number] = asyncio.create_task(self._run(number))

    async def _run(self, number: int) -> None:
        """Generate and grade a group, then start what there is room for."""
        try:
            request = replace(self._work.request(self._prompts.at(number)), begun=self._begun.get(number, ()))
            group = await (self._work.generate or self._dispatcher.generate)(request)
            self._begun.pop(number, None)  # not before: a state that is saved meanwhile goes on from it
            if request.window is None and _goes_on(group):
                self._begun[number] = group
                del self._tasks[number]
                if not self._stopping:  # for example, its server was restarted
                    self._start(number)
                return
            new = [sample for sample in group if not sample.is_trained]
            self._on_generated(len(new))
            await asyncio.get_running_loop().run_in_executor(self._graders, self._work.grade, new)
            self._graded[number] = group
            self.ledger.grade(number, self._work.is_useful(group))
            del self._tasks[number]
            await self._drop_surplus()
            self._fill()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = self._failure or error
        self._changed.set()

    async def _state(self) -> tuple[dict[str, Any], dict[int, Group]]:
        state, graded = self._before or (self.ledger.state(), {})
        groups = self._begun | self._graded | graded
        return state, {number: group for number, group in groups.items() if str(number) in state["drawn_at"]}

    async def _restore(self, state: dict[str, Any], groups: dict[int, Group]) -> None:
        groups = {n: group for n, group in groups.items() if self._is_as_wanted(group)}
        self._begun = {n: group for n, group in groups.items() if _waits_for_engine(group)}
        self._graded = {n: group for n, group in groups.items() if n not in self._begun}
        useful = {n: self._work.is_useful(group) for n, group in self._graded.items()}
        for number in self.ledger.restore(state, useful):
            self._start(number)

    def _is_as_wanted(self, group: Group) -> bool:
        """Whether a saved group was written in windows just as groups are now, and needs no experts."""
        request = self._work.request(group[0].prompt)
        alike = all((sample.window_start is None) is (request.window is None) for sample in group)
        return alike and request.routed_experts is None

    async def _drop_surplus(self) -> None:
        surplus = self.ledger.surplus()
        for number in surplus:
            self._graded.pop(number, None)
        await self._abort([number for number in surplus if number in self._tasks])

    async def _stop(self) -> None:
        """End running requests and keep what they have written."""
        tasks, self._stopping = list(self._tasks.values()), True
        await self._dispatcher.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stopping = False

    async def _abort(self, numbers: list[int]) -> None:
        tasks = [self._tasks.pop(number) for number in numbers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _goes_on(group: Group) -> bool:
    return any(sample.goes_on for sample in group)


def _waits_for_engine(group: Group) -> bool:
    """Whether a group that was saved is to be gone on with; else it waits for the trainer, if for a window of it."""
    return _goes_on(group) and (group[0].window_start is None or all(sample.is_trained for sample in group))


def _next_window(group: Group) -> Group:
    """A group whose responses, as far as they go, the trainer has."""
    return [replace(sample, window_start=len(sample.response_ids)) for sample in group]


def _ignore(responses: int) -> None: ...


# The fields of a sample that go into JSON. Its prompt is known by its number, its text follows from its tokens.
_FACTS = (
    *("index", "seed", "finish_reason", "weight_version", "weight_version_oldest", "versions"),
    *("reward", "correct", "grade_reason", "extracted", "extra", "window_start", "segment_starts", "episode", "turns"),
)


def pack_groups(groups: Mapping[int, Sequence[Sample]]) -> bytes:
    """Groups by number, as bytes. Experts that engines chose (routed_experts) are not kept."""
    tensors: dict[str, Any] = {}
    facts: dict[str, list[dict[str, Any]]] = {}
    for number, group in groups.items():
        facts[str(number)] = [{name: getattr(sample, name) for name in _FACTS} for sample in group]
        for place, sample in enumerate(group):
            parts: dict[str, Any] = {"tokens": sample.response_ids, "logprobs": sample.rollout_logprobs}
            parts |= {"loss_mask": sample.loss_mask, "turn_rewards": sample.turn_rewards}
            tensors |= {f"{number}/{place}/{name}": part for name, part in parts.items() if part is not None}
            if sample.episode is not None:
                tensors[f"{number}/{place}/prompt"] = np.array(sample.prompt.token_ids, dtype=np.int32)
    tensors["facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    packed: bytes = save(tensors)
    return packed


def unpack_groups(
    packed: bytes, prompt: Callable[[int], Prompt], decode: Callable[[Sequence[int]], str]
) -> dict[int, list[Sample]]:
    """The inverse of pack_groups(). prompt: returns a prompt by its number; decode: from token ids to text.

    Raises:
        ValueError: the bytes are not those of pack_groups().
    """
    try:
        tensors = load(packed)
        facts = json.loads(tensors["facts"].tobytes())
    except (SafetensorError, KeyError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return {
        int(number): [
            _sample(prompt(int(number)), tensors, f"{number}/{place}", fact, decode) for place, fact in enumerate(group)
        ]
        for number, group in facts.items()
    }


def _sample(
    prompt: Prompt, tensors: dict[str, Any], place: str, fact: dict[str, Any], decode: Callable[[Sequence[int]], str]
) -> Sample:
    ids, logprobs, mask = tensors[f"{place}/tokens"], tensors[f"{place}/logprobs"], tensors.get(f"{place}/loss_mask")
    fact["versions"] = tuple((version, count) for version, count in fact["versions"])
    fact["segment_starts"], fact["turns"] = tuple(fact["segment_starts"]), tuple(map(tuple, fact.get("turns", ())))
    text = decode(ids.tolist())
    if f"{place}/prompt" in tensors:
        prompt = replace(prompt, token_ids=tuple(tensors[f"{place}/prompt"].tolist()))
    rewards = tensors.get(f"{place}/turn_rewards")
    return Sample(
        prompt, 0, response_ids=ids, rollout_logprobs=logprobs, loss_mask=mask, turn_rewards=rewards, text=text, **fact
    )

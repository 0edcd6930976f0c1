"""Episodes in place of responses: runs the user's agent and turns its recordings into samples."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx

from vapo_megatron.agents.agent import KEY, checked_answer, load_agent
from vapo_megatron.agents.direct_transport import DirectTransport
from vapo_megatron.agents.endpoint import NOT_REPEATED, Endpoint, Episode, TurnWriter
from vapo_megatron.agents.recording import Recording, recorded_turns
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.data.sample import BROKEN, Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import RunFailed, reason_of
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rollout.request import GroupRequest, empty_response, response_seed

_logger = logging.getLogger(__name__)
# Why an episode is not trained on: it or a call was too slow, the agent raised (SystemExit and its
# own cancellation among it), the chat template failed or ignores tools, engines were stopped, no
# turn, another way than in the step before (rollout.windows).
CAUSES = ("timeout", "call_timeout", "error", "template", "stopped", "no_turn", NOT_REPEATED)
_MOST_TURNS = 8  # turns of an episode with their own metrics
# Groups that break one after another, with none that is whole between them: the agent itself is
# wrong then.
MOST_BROKEN_GROUPS = 16

# Functions of agents that run in threads at once, over all episodes.
_MOST_THREADS = 64
# For agents to end when the run does, and for their loop to run anything after an episode timed
# out.
CLOSE_SECONDS = 20.0
_ANSWER_SECONDS = 5.0


class AgentRaised(Exception):
    """What an agent raised that is no Exception: SystemExit, or cancelling itself."""


class _SharedClient(httpx.AsyncClient):
    """The agents' HTTP client: an episode that closes it does not end the others'."""

    async def aclose(self) -> None:
        """Nothing; end() closes it."""

    async def __aenter__(self) -> "_SharedClient":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def end(self) -> None:
        """Close it."""
        await super().aclose()


class Agents:
    """Runs episodes. The user's code has its own thread and event loop, so it cannot hold up the
    engines.

    Attributes:
        broken: number of episodes that must not be trained on, by cause.
    """

    def __init__(
        self, dispatcher: TurnWriter, tokenizer: TextTokenizer, config: RolloutConfig
    ) -> None:
        assert config.agent is not None, "rollout.agent names the function"
        self._run = load_agent(config.agent)
        self._limits = config.episode
        self._endpoint = Endpoint(dispatcher, tokenizer, config.episode)
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._thread = self._new_thread()
        self._client: _SharedClient | None = None
        self._broken_in_a_row = 0
        self.broken: Counter[str] = Counter()

    async def generate(self, group: GroupRequest) -> list[Sample]:
        """One episode for each requested response. Broken ones have no tokens (is_whole). With a
        window, an episode is played for so many turns and is unfinished then (goes_on); as one of
        `begun` it is replayed, then continued.

        Raises:
            RunFailed: one group after another broke, or an episode could not be repeated
                (GroupRequest.begun).
            VapoError: the engines failed.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._begin_or_go_on(group, index))
                    for index in range(group.samples)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        samples = [task.result() for task in running]
        self._broken_in_a_row = 0 if is_whole(samples) else self._broken_in_a_row + 1
        if self._broken_in_a_row == MOST_BROKEN_GROUPS:
            raise broken_groups(self.broken)
        return samples

    def broken_metrics(self, whole: int) -> dict[str, float]:
        """Episodes broken since the last call, by cause, and as a share of all. whole: episodes
        that did not break."""
        counts = self.broken
        self.broken = Counter()
        return broken_metrics(counts, whole)

    def close(self) -> None:
        """End the endpoint and the agents' thread; what does not end within a deadline is left
        behind, so that it cannot keep the run."""
        self._dispatcher.loop.run(self._endpoint.stop())
        if not self._thread.close(CLOSE_SECONDS):
            _logger.warning(
                "%s: an agent was still running %g s after its cancellation; it is left behind",
                KEY,
                CLOSE_SECONDS,
            )

    @staticmethod
    def _new_thread() -> LoopThread:
        return LoopThread("agents", threads=_MOST_THREADS)

    async def _begin_or_go_on(self, group: GroupRequest, index: int) -> Sample:
        seed = response_seed(group.seed, group.prompt.cursor, index)
        begun = group.begun
        if group.window is None:  # the last of the turns to repeat is sampled again
            repeats = [*begun[:-1], *(replace(turn, finish_reason="abort") for turn in begun[-1:])]
            return await self._play(
                group, index, Episode(group, seed, repeats=repeats), max(1, len(begun))
            )
        if begun and not begun[index].goes_on:
            return begun[index]
        repeats = recorded_turns(begun[index]) if begun else []
        episode = Episode(
            group, seed, Recording(only_newest=True), repeats, len(repeats) + group.window
        )
        return await self._play(group, index, episode, len(repeats) + 1)

    async def _play(
        self, group: GroupRequest, index: int, episode: Episode, fewest_turns: int
    ) -> Sample:
        """fewest_turns: an episode of fewer is broken."""
        start = time.monotonic()
        base_url = await self._endpoint.open(episode)
        work = asyncio.wrap_future(
            self._thread.start(self._call(task_of(group.prompt, self._tokenizer), base_url))
        )
        episode.work = work
        answer = None
        cause = ""
        episode.ends_at = asyncio.get_running_loop().time() + self._limits.timeout_s
        try:
            async with asyncio.timeout_at(episode.ends_at) as episode.deadline:
                episode.begin_call(self._limits.call_timeout_s)
                answer = checked_answer(await work, episode.recording.turns)
        except asyncio.CancelledError:
            work.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not episode.is_paused:
                cause = "error"
                _logger.warning("%s: an episode of row %s was cancelled", KEY, group.prompt.id)
        except Exception as error:  # the user's code may raise anything
            if episode.deadline.expired():  # a TimeoutError may also be the agent's own
                cause = "timeout" if episode.deadline.when() == episode.ends_at else "call_timeout"
                await self._replace_blocked_thread(group.prompt.id)
            elif not episode.limit:
                cause = "error"
                _logger.warning(
                    "%s: an episode of row %s broke: %s", KEY, group.prompt.id, reason_of(error)
                )
        finally:
            self._endpoint.close(base_url)
        if episode.failure is not None:
            raise episode.failure
        too_few = NOT_REPEATED if episode.repeats else "no_turn"
        cause = (
            episode.fault or cause or (too_few if episode.recording.turns < fewest_turns else "")
        )
        if cause == NOT_REPEATED and group.window is None:
            raise RunFailed(
                f"{KEY}: an episode of row {group.prompt.id}, repeated with the same responses, "
                "took another way: probes need agents, tools and environments whose answers follow "
                "from the conversation"
            )
        if cause:
            self.broken[cause] += 1
            return replace(
                empty_response(group, index), finish_reason="stop", grade_reason=BROKEN + cause
            )
        episode.end_tool(time.monotonic())
        sample = self._sample(group, index, episode, answer or {}, time.monotonic() - start)
        if group.window is not None:
            sample.window_start = group.begun[index].window_start if group.begun else 0
        return sample

    async def _replace_blocked_thread(self, row: str) -> None:
        """Start another thread for agents where the code of one holds up the event loop of all."""
        thread = self._thread
        if await thread.answers(_ANSWER_SECONDS) or thread is not self._thread:
            return
        _logger.warning(
            "%s: an agent blocks the event loop (its episodes time out, one of row %s among them): "
            "call what blocks through asyncio.to_thread; other episodes get another thread",
            KEY,
            row,
        )
        self._thread = self._new_thread()
        self._client = None

    async def _call(self, task: dict[str, Any], base_url: str) -> Any:
        """The agent's answer, in its own thread.

        Raises:
            AgentRaised: it raised what would end the thread or look like our own cancellation.
        """
        if self._client is None:
            direct = {
                self._endpoint.address: DirectTransport(self._endpoint, self._dispatcher.loop)
            }
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = _SharedClient(
                timeout=None, limits=limits, trust_env=False, mounts=direct
            )
        try:
            return await self._run(task, base_url, self._client)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
            raise AgentRaised("it cancelled itself") from None
        except Exception:
            raise
        except BaseException as error:
            raise AgentRaised(repr(error)) from None

    def _sample(
        self,
        group: GroupRequest,
        index: int,
        episode: Episode,
        answer: dict[str, Any],
        seconds: float,
    ) -> Sample:
        recording = episode.recording
        rewards = answer.get("turn_rewards", ())
        errors = answer.get("tool_errors", 0.0)
        engine_seconds = sum(turn["engine_seconds"] for turn in episode.turns)
        figures = recording.figures() | {
            "engine_seconds": engine_seconds,
            "tool_seconds": max(seconds - engine_seconds, 0.0),
            "tool_errors": float(sum(errors) if isinstance(errors, Sequence) else errors),
            "cut_by_turns": float(episode.limit == "turns"),
            "cut_by_tokens": float(episode.limit == "tokens"),
        }
        lists = {"reward": rewards, "tool_errors": errors if isinstance(errors, Sequence) else ()}
        for number, turn in enumerate(episode.turns[:_MOST_TURNS]):
            turn |= {name: float(values[number]) for name, values in lists.items() if values}
            figures |= {f"{name}/turn_{number + 1}": value for name, value in turn.items()}
        prompt = replace(group.prompt, token_ids=tuple(recording.ordered[0].prompt_ids))
        sample = Sample(
            prompt, group.group, index, episode.seed, **recording.fields(rewards), episode=figures
        )
        if episode.is_paused:
            sample.finish_reason = "abort"
        elif episode.limit:
            sample.finish_reason = "length"
        elif "reward" in answer:
            before = 0.0 if sample.turn_rewards is None else float(sample.turn_rewards.sum())
            sample.reward = float(answer["reward"]) + before
            sample.correct = answer.get("correct")
        return sample


def broken_metrics(counts: Counter[str], whole: int) -> dict[str, float]:
    """Episodes that broke, by cause, and as a share of all. whole: episodes that did not."""
    share = counts.total() / max(counts.total() + whole, 1)
    return {"agent/broken": share} | {
        f"agent/broken_{cause}": float(counts[cause]) for cause in CAUSES
    }


def broken_groups(counts: Counter[str]) -> RunFailed:
    """The error of a run in which MOST_BROKEN_GROUPS groups broke in a row. counts: broken
    episodes, by cause."""
    causes = ", ".join(f"{cause} {count}" for cause, count in counts.most_common())
    return RunFailed(
        f"{KEY}: an episode broke in each of {MOST_BROKEN_GROUPS} groups one after another "
        f"({causes}): look at the warnings above, and try the agent on one row"
    )


def task_of(prompt: Prompt, tokenizer: TextTokenizer) -> dict[str, Any]:
    """The task of a row; its messages are those that a run without an agent would send."""
    messages = tokenizer.messages(prompt.problem, prompt.before)
    return {
        **prompt.extra,
        "id": prompt.id,
        "problem": prompt.problem,
        "answer": prompt.answer,
        "messages": messages,
    }


def is_whole(group: Sequence[Sample]) -> bool:
    """Whether no episode of a group broke. A broken one has no tokens, and its group is not trained
    on."""
    return not any(sample.grade_reason.startswith(BROKEN) for sample in group)


def episode_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the episodes that a step ends; metrics of a turn cover the episodes that have it,
    whose share is `episodes`."""
    rows = [
        sample.episode for sample in samples if sample.episode is not None and not sample.goes_on
    ]
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    reached = {
        n: len(columns.get(f"tokens_written/turn_{n}", ())) for n in range(1, _MOST_TURNS + 1)
    }
    shares = {
        f"agent/episodes/turn_{n}": count / len(rows) for n, count in reached.items() if count
    }
    return {f"agent/{name}": sum(values) / len(values) for name, values in columns.items()} | shares

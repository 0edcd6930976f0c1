"""Episodes in separate processes: thousands at once take more than the one core that a process
of Python uses."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace

from vapo_megatron import logs
from vapo_megatron.agents.agent import KEY
from vapo_megatron.agents.endpoint import TurnWriter
from vapo_megatron.agents.episodes import (
    CLOSE_SECONDS,
    MOST_BROKEN_GROUPS,
    Agents,
    broken_groups,
    broken_metrics,
    is_whole,
)
from vapo_megatron.agents.peer import Peer
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import RunFailed, TryAgain, reason_of
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.signals import end_tree, how_it_ended, stop_signals_blocked

# For a process whose connection has closed to end.
_END_SECONDS = 5.0
_NO_PROMPT = Prompt("", "", "", ())


class _Process:
    """One process, and the groups that it plays."""

    def __init__(self, dispatcher: TurnWriter) -> None:
        self._dispatcher = dispatcher
        self.groups = 0
        self.peer = Peer(
            {"generate": self._generate, "parse_tool_calls": dispatcher.parse_tool_calls}
        )
        self._connection, its_end = socket.socketpair()
        # It must find what we find (the user's agent, an uninstalled checkout), in our order: the
        # working directory comes last
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        program = [sys.executable, "-P", "-m", "vapo_megatron.agents.process"]
        own_path = os.environ.get("PYTHONPATH", "")
        with its_end, stop_signals_blocked():  # until it has handlers
            self._process = subprocess.Popen(
                [*program, str(its_end.fileno()), str(os.getpid()), own_path],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[its_end.fileno()],
                start_new_session=True,
            )
        self._served: Future[None] = dispatcher.loop.start(self.peer.serve(self._connection))
        threading.Thread(target=self._watch, name="agents-process", daemon=True).start()

    async def play(self, group: GroupRequest) -> tuple[list[Sample], Counter[str]]:
        """A group of episodes, and how many broke since the last one."""
        self.groups += 1
        try:
            samples, broken = await self.peer.call("play", group)
        except ConnectionError:
            raise TryAgain(
                f"{KEY}: a process that plays episodes was lost ({await self._end()}): an agent "
                "ended it, or the machine had no memory left"
            ) from None
        finally:
            self.groups -= 1
        rows = [replace(group.prompt, token_ids=sample.prompt.token_ids) for sample in samples]
        samples = [replace(s, prompt=row) for s, row in zip(samples, rows, strict=True)]
        return samples, broken

    async def begin(self, config: RolloutConfig, tokenizer: TextTokenizer) -> None:
        """Have it load the agent.

        Raises:
            BadInput: the agent cannot be run.
            RunFailed: the process ended, or did not begin within rollout.start_timeout_s.
        """
        limit = config.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self.peer.call("begin", config, tokenizer, logs.configured_level())
        except ConnectionError:
            raise RunFailed(
                f"{KEY}={config.agent}: a process that plays episodes ended while it started "
                f"({await self._end()}): its output is above"
            ) from None
        except TimeoutError:
            raise RunFailed(
                f"{KEY}={config.agent}: a process that plays episodes did not start within "
                f"rollout.start_timeout_s={limit:g} s: see where the import of its module waits"
            ) from None

    def hang_up(self) -> None:
        """Have it close its agents and end."""
        self._served.cancel()

    def close(self, ends_at: float) -> None:
        """Wait for its end after hang_up(), and kill it where it has not come at `ends_at` (time
        of time.monotonic())."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, ends_at - time.monotonic()))
            return
        end_tree(self._process.pid)
        self._process.wait()

    async def _end(self) -> str:
        """How the process ended, in words."""
        try:
            code = await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if self._served.done() and not self._served.cancelled():
            error = self._served.exception()
            if error is not None:
                return f"its message cannot be read: {reason_of(error)}"
        return how_it_ended(code)

    def _watch(self) -> None:
        """Hang up when the process ends: what an agent has forked may keep its end of the
        connection open."""
        with suppress(ChildProcessError):  # somebody else has waited for it
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.hang_up()

    async def _generate(self, number: int, group: GroupRequest) -> list[Sample]:
        """A turn, for the process's endpoint, whose clocks stop while it waits."""

        @contextmanager
        def waits() -> Iterator[None]:
            self.peer.tell("waiting", number, True)
            try:
                yield
            finally:
                self.peer.tell("waiting", number, False)

        samples = await self._dispatcher.generate(group, waits)
        return [replace(sample, prompt=_NO_PROMPT) for sample in samples]


class AgentProcesses:
    """As Agents, in rollout.episode.processes processes. Each group of episodes is played by the
    one that has the fewest.

    Attributes:
        broken: number of episodes that must not be trained on, by cause.
    """

    def __init__(
        self, dispatcher: TurnWriter, tokenizer: TextTokenizer, config: RolloutConfig
    ) -> None:
        """Called by the main thread: a process ends with the thread that starts it.

        Raises:
            BadInput, RunFailed: a process does not start.
        """
        self.broken: Counter[str] = Counter()
        self._broken_in_a_row = 0
        self._processes: list[_Process] = []
        try:
            for _ in range(config.episode.processes):
                self._processes.append(_Process(dispatcher))
            dispatcher.loop.run(self._begin(config, tokenizer))
        except BaseException:
            self.close()
            raise

    async def generate(self, group: GroupRequest) -> list[Sample]:
        """As Agents.generate().

        Raises:
            TryAgain: the process that played the group was lost.
        """
        process = min(self._processes, key=lambda process: process.groups)
        samples, broken = await process.play(group)
        self.broken += broken
        self._broken_in_a_row = 0 if is_whole(samples) else self._broken_in_a_row + 1
        if self._broken_in_a_row == MOST_BROKEN_GROUPS:
            raise broken_groups(self.broken)
        return samples

    def broken_metrics(self, whole: int) -> dict[str, float]:
        """As Agents.broken_metrics()."""
        counts = self.broken
        self.broken = Counter()
        return broken_metrics(counts, whole)

    def close(self) -> None:
        """End the processes, with their agents."""
        for process in self._processes:
            process.hang_up()
        ends_at = time.monotonic() + CLOSE_SECONDS + _END_SECONDS
        for process in self._processes:
            process.close(ends_at)

    async def _begin(self, config: RolloutConfig, tokenizer: TextTokenizer) -> None:
        starting = [process.begin(config, tokenizer) for process in self._processes]
        for error in await asyncio.gather(*starting, return_exceptions=True):
            if error is not None:
                raise error


def open_agents(
    dispatcher: TurnWriter, tokenizer: TextTokenizer, config: RolloutConfig
) -> Agents | AgentProcesses:
    """What plays episodes of rollout.agent: in this process, or in others."""
    if config.episode.processes:
        return AgentProcesses(dispatcher, tokenizer, config)
    return Agents(dispatcher, tokenizer, config)

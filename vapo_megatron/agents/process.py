"""A process that plays a share of the episodes: `python -m vapo_megatron.agents.process SOCKET
TRAINER_PID PYTHONPATH`, started by agents.processes alone.

It has its own endpoint, templates and copy of the user's agent. The engines are rank 0's: each turn
is a call to its dispatcher.
"""

import asyncio
import itertools
import os
import queue
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from vapo_megatron import logs
from vapo_megatron.agents.endpoint import Waits
from vapo_megatron.agents.episodes import Agents
from vapo_megatron.agents.peer import Peer
from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.logs import LogLevel
from vapo_megatron.loop_thread import LoopThread, allow_connections
from vapo_megatron.rollout.request import GroupRequest
from vapo_megatron.signals import STOP_SIGNALS, end_with_parent

_Wanted = tuple[RolloutConfig, TextTokenizer, Future[Agents]]


class DistantDispatcher:
    """Passes on what the endpoint wants of the engines to the dispatcher of rank 0."""

    def __init__(self) -> None:
        self.loop = LoopThread("endpoint")
        self.peer: Peer | None = None
        self._numbers = itertools.count()
        self._clocks: dict[int, tuple[Waits, ExitStack]] = {}

    async def generate(self, group: GroupRequest, waits: Waits = nullcontext) -> list[Sample]:
        """As Dispatcher.generate()."""
        number = next(self._numbers)
        self._clocks[number] = (waits, ExitStack())
        # An agent may have put anything into its row, and engines read tokens alone
        prompt = _without_row(group.prompt)
        begun = [replace(sample, prompt=prompt) for sample in group.begun]
        try:
            samples = await self._call(
                "generate", number, replace(group, prompt=prompt, begun=begun)
            )
        finally:
            _, stopped = self._clocks.pop(number)
            stopped.close()
        # The prompt does not travel back: it is most of a long episode
        return [replace(sample, prompt=group.prompt) for sample in samples]

    async def parse_tool_calls(
        self, url: str, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[dict[str, Any]]]:
        """As Dispatcher.parse_tool_calls()."""
        read: tuple[str, list[dict[str, Any]]] = await self._call(
            "parse_tool_calls", url, text, tools, parser
        )
        return read

    async def waiting(self, number: int, begins: bool) -> None:
        """Stop the clocks of a request that waits for an engine with room, or start them again."""
        if number not in self._clocks:  # it was given up
            return
        waits, stopped = self._clocks[number]
        if begins:
            stopped.enter_context(waits())
        else:
            stopped.close()

    async def _call(self, method: str, *arguments: Any) -> Any:
        assert self.peer is not None, "serve() sets it"
        return await self.peer.call(method, *arguments)


class Player:
    """What rank 0 may call."""

    def __init__(self, dispatcher: DistantDispatcher) -> None:
        self._dispatcher = dispatcher
        self._told: Counter[str] = Counter()
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._is_loading = False
        self.agents: Agents | None = None

    async def begin(self, config: RolloutConfig, tokenizer: TextTokenizer, level: LogLevel) -> None:
        """Load the agent.

        Raises:
            BadInput: it cannot be run.
        """
        logs.configure(level)
        loaded: Future[Agents] = Future()
        self._wanted.put((config, tokenizer, loaded))
        self.agents = await asyncio.wrap_future(loaded)

    async def play(self, group: GroupRequest) -> tuple[list[Sample], Counter[str]]:
        """As Agents.generate(), without the rows of the samples' prompts; and how many episodes
        broke since the last answer, by cause."""
        assert self.agents is not None, "begin() comes first"
        samples = await self.agents.generate(group)
        broken = self.agents.broken - self._told
        self._told = self.agents.broken.copy()
        return [replace(sample, prompt=_without_row(sample.prompt)) for sample in samples], broken

    def load(self) -> None:
        """Load the agent once begin() is called. For the main thread, in which rank 0 loads it:
        the user's module may start its own loop, or take long."""
        wanted = self._wanted.get()
        if wanted is None:
            return
        config, tokenizer, loaded = wanted
        if not loaded.set_running_or_notify_cancel():
            return
        self._is_loading = True
        try:
            loaded.set_result(Agents(self._dispatcher, tokenizer, config))
        except Exception as error:
            loaded.set_exception(error)
        self._is_loading = False

    def stop_loading(self) -> None:
        """Rank 0 is gone: load nothing; a module that is being loaded ends with this process."""
        if self._is_loading:
            os._exit(1)
        self._wanted.put(None)


def main() -> None:
    """Play until rank 0 closes its end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    end_with_parent()
    if os.getppid() != int(sys.argv[2]):
        return  # it ended before the kernel was asked
    # Agents' own processes find what they would find if rank 0 started them
    os.environ.pop("PYTHONPATH", None)
    if sys.argv[3]:
        os.environ["PYTHONPATH"] = sys.argv[3]
    for number in (signal.SIGINT, *STOP_SIGNALS):
        # Rank 0 decides when this ends. What an agent starts does not inherit a handler.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    logs.outlive_output()
    logs.set_rank(0)
    allow_connections()
    code = 1
    try:
        _play(connection)
        code = 0
    except BaseException:  # of a module that ends its process, too
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # an agent may have closed them
            os._exit(code)  # a thread that an agent has left behind does not keep it


def _play(connection: socket.socket) -> None:
    dispatcher = DistantDispatcher()
    player = Player(dispatcher)
    dispatcher.peer = Peer(
        {"begin": player.begin, "play": player.play, "waiting": dispatcher.waiting}
    )
    served = dispatcher.loop.start(dispatcher.peer.serve(connection))
    served.add_done_callback(lambda _: player.stop_loading())
    player.load()
    served.result()
    if player.agents is not None:
        player.agents.close()


def _without_row(prompt: Prompt) -> Prompt:
    return Prompt("", "", "", prompt.token_ids, prompt.cursor)


if __name__ == "__main__":
    main()

"""One node's part of a server whose GPUs are on several nodes, and where the parts meet.

A store (TCP) in the process that owns the first part knows the server's current start: a name, and
where the ranks of all parts meet. The first part begins a start; the others join it. A part that
fails says so there, and every part of that start ends. The first part then begins the next one.
"""

import json
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from vapo_megatron.errors import BadInput

_START = "start"
_CLOSED = "closed"
_POLL_SECONDS = 0.1
# Of one call of the store: another process of this run or of `vapo-megatron engine` answers it.
_CALL_SECONDS = 20.0


class NodePart:
    """One node's part of a server.

    Its methods may be called from any thread.

    Args:
        index: the node's number in the server, from 0. Requests go to the first one.
        of: number of nodes.
        host, port: where the store of the first part listens; port 0, for the first part only: a
            free one.
        silent_s: seconds without a sign of life after which another part is taken to be lost.

    Raises:
        BadInput: this is the first part and its store cannot listen there.
    """

    def __init__(self, index: int, of: int, host: str, port: int, silent_s: float) -> None:
        self.index = index
        self.of = of
        self.host = host
        self._silent_s = silent_s
        self._start = ""
        self._store: dist.Store | None = None
        # The latest number of each other part's signs of life, and when it was seen.
        self._beats: dict[int, tuple[int, float]] = {}
        self.port = port
        if self.leads:
            self._store = self._listen()

    @property
    def leads(self) -> bool:
        """Whether requests go to this part."""
        return self.index == 0

    def begin(self, port: int) -> str:
        """On the first part: begin a start. Returns host:port where the ranks of all parts meet.

        port: free on this node.
        """
        assert self.leads and self._store is not None
        self._start = secrets.token_hex(8)
        self._beats = {}
        meeting = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
        _set(self._store, _START, json.dumps([self._start, meeting]))
        return meeting

    def join(self, wait_s: float) -> str:
        """On another part: join the start that the first part has begun since this part's last one.
        Returns host:port where the ranks of all parts meet.

        Raises:
            BadInput: it has begun none within wait_s seconds.
        """
        end = time.monotonic() + wait_s
        while True:
            try:
                begun = self._begun()
            except RuntimeError:
                begun = None
                self._store = None
            if begun is not None and begun[0] != self._start:
                self._start, meeting = begun
                self._beats = {}
                return meeting
            if time.monotonic() > end:
                raise BadInput(
                    f"part {self.index} of {self.of} of an engine: the first part, at "
                    f"{self.host}:{self.port}, has begun no start within {wait_s:.0f} s: start it, "
                    "with the same rollout.nodes"
                )
            time.sleep(_POLL_SECONDS)

    def look(self) -> str | None:
        """Why the current start has failed elsewhere, in words; None while it has not. Tells the
        others that this part lives."""
        if not self._start:
            return None
        try:
            return self._look()
        except RuntimeError:  # of the store, which ended with its process
            self._store = None
            return f"the first part, at {self.host}:{self.port}, is gone"

    def fail(self, cause: str) -> None:
        """Have every part of the current start end."""
        if self._start and self._store is not None:
            try:
                _set(self._store, f"{self._start}/lost", json.dumps([self.index, cause]))
            except RuntimeError:
                self._store = None

    def note_ready(self) -> None:
        """On the first part: the server answers."""
        assert self._store is not None
        _set(self._store, f"{self._start}/ready", "yes")

    def is_ready(self) -> bool:
        """On another part: whether the server answers."""
        try:
            return self._store is not None and self._store.check([f"{self._start}/ready"])
        except RuntimeError:
            return False

    def close(self) -> None:
        """The server ends and stays ended: no part is to be started again."""
        if self._store is not None:
            try:
                _set(self._store, _CLOSED, "yes")
            except RuntimeError:
                self._store = None

    def is_closed(self) -> bool:
        """Whether a part was closed."""
        try:
            return self._store is not None and self._store.check([_CLOSED])
        except RuntimeError:
            return False

    def _listen(self) -> dist.Store:
        try:
            store = dist.TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CALL_SECONDS),
            )
        except RuntimeError as error:
            reason = str(error).partition("\n")[0][:200]
            raise BadInput(
                f"the parts of an engine cannot meet at {self.host}:{self.port} ({reason}): give "
                "an address of this node and a free port"
            ) from None
        self.port = store.port
        return store

    def _connect(self) -> dist.Store | None:
        """The store of the first part; None where it does not answer."""
        if self._store is None:
            try:
                # The store itself would fill the log with its tries.
                socket.create_connection((self.host, self.port), _CALL_SECONDS).close()
            except OSError:
                return None
            self._store = dist.TCPStore(
                self.host, self.port, is_master=False, timeout=timedelta(seconds=_CALL_SECONDS)
            )
        return self._store

    def _begun(self) -> tuple[str, str] | None:
        """Name and meeting of the first part's latest start; None where it has begun none. Raises
        RuntimeError where its process is gone."""
        store = self._connect()
        if store is None or not store.check([_START]):
            return None
        start, meeting = json.loads(store.get(_START))
        return str(start), str(meeting)

    def _look(self) -> str | None:
        begun = self._begun()
        if begun is None:
            return f"the first part, at {self.host}:{self.port}, is gone"
        if begun[0] != self._start:
            return "its first part was started again"
        assert self._store is not None
        if self._store.check([f"{self._start}/lost"]):
            index, cause = json.loads(self._store.get(f"{self._start}/lost"))
            if index == self.index:
                return None  # its own keeper knows
            return f"its part on node {index} failed: {cause}"
        self._store.add(f"{self._start}/beat/{self.index}", 1)
        now = time.monotonic()
        for other in range(self.of):
            if other == self.index:
                continue
            beat = self._store.add(f"{self._start}/beat/{other}", 0)
            known, since = self._beats.get(other, (0, now))
            if beat != known:
                self._beats[other] = beat, now
            elif beat and now - since > self._silent_s:
                return f"its part on node {other} has given no sign of life for {now - since:.0f} s"
        return None


def _set(store: dist.Store, key: str, value: str) -> None:
    """Returns once the store has it, which set() alone does not wait for."""
    store.set(key, value)
    store.check([key])

"""An SGLang server as a subprocess of the rank that owns it."""

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import IO

from pydantic import JsonValue

from vapo_megatron.config.rollout import RolloutConfig
from vapo_megatron.deadlines import NO_ANSWER, ask
from vapo_megatron.engines.inside.heartbeat import lost_processes, stands_still
from vapo_megatron.engines.inside.owner_guard import remove_shared_memory, start_guard
from vapo_megatron.engines.inside.server_main import KEY_VARIABLE
from vapo_megatron.engines.server.address import NO_WEIGHTS, EngineAddress
from vapo_megatron.engines.server.environment import (
    BESIDE_MEETING,
    BESIDE_SERVER,
    engine_arguments,
    engine_environment,
    free_port,
)
from vapo_megatron.engines.server.model_directory import engine_directory
from vapo_megatron.engines.server.node_part import NodePart
from vapo_megatron.engines.server.scratch import (
    PREFIX,
    locked,
    remove_left_folders,
    short_temporary,
)
from vapo_megatron.engines.server.tool_parsers import SLOW_IMPORT
from vapo_megatron.errors import BadInput, RunFailed
from vapo_megatron.models.model_files import has_quantised_files
from vapo_megatron.models.registry import engine_arguments_of
from vapo_megatron.signals import how_it_ended
from vapo_megatron.weights.fp8 import BlockFp8

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
# Processes of a server that was killed hold its port until the kernel has ended them.
_PORT_SECONDS = 2.0
_READY_SECONDS = 10.0


class EngineServer:
    """One SGLang server, from start to end.

    The subprocess leads a process group. A guard beside it ends that group with this process
    (owner_guard).

    Args:
        model_path: Hugging Face directory.
        config: the rollout section.
        dtype: torch dtype that the engine computes in.
        log_file: receives the server's output.
        devices: indices of its GPUs, as this process counts them; None without GPUs.
        weight_version: version of the weights in model_path.
        host: address of this machine to listen on; not the default if ranks of other machines use
            the server.
        fp8: how the weights that are sent to it are quantised; None: not at all.
        port: to listen on; 0: a free one.
        key: required of requests; None makes one, which is in the address; empty: none is needed.
        identity: reported to trainers that did not start the server; see remote_engines.
        offloads: whether it shares its GPUs with a trainer and lends it their memory.
        part: this node's part of a server on several nodes; None: the whole server is on this one.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: RolloutConfig,
        dtype: str,
        log_file: Path,
        devices: Sequence[int] | None = None,
        weight_version: int = 0,
        host: str = "127.0.0.1",
        fp8: BlockFp8 | None = None,
        port: int = 0,
        key: str | None = None,
        identity: Mapping[str, JsonValue] | None = None,
        offloads: bool = False,
        part: NodePart | None = None,
    ) -> None:
        self._model_path = Path(model_path)
        self._config = config
        self._dtype = dtype
        self._log_file = log_file
        self._devices = devices
        self._offloads = offloads
        self._part = part
        self._meeting = ""
        self._weight_version = weight_version
        self._host = host
        self._fp8 = fp8
        self._scratch: Path | None = None
        self._lock: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._port = port
        # A process of another user on this machine could reach the port as well.
        self._key = secrets.token_urlsafe(32) if key is None else key
        self._identity = dict(identity or {})
        self._started_at = 0.0

    @property
    def address(self) -> EngineAddress:
        """Valid once started."""
        if ":" in self._host:
            host = f"[{self._host}]"
        else:
            host = self._host
        return EngineAddress(f"http://{host}:{self._port}", str(self._log_file), self._key)

    @property
    def leads(self) -> bool:
        """Whether requests go to it: of a server on several nodes, to the first part alone."""
        return self._part is None or self._part.leads

    @property
    def pid(self) -> int:
        """Process and process-group id of the running server."""
        if self._process is None:
            raise RunFailed(f"{self._log_file}: the server was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the subprocess and return at once; wait_until_ready() follows.

        A part of a server on several nodes waits for the first one to begin.

        Raises:
            BadInput: the host is not this machine's, or the port is in use; or the first part has
                not begun within rollout.start_timeout_s.
        """
        self._start(self._config.start_timeout_s)

    def _start(self, wait_s: float) -> None:
        """wait_s: seconds within which the first of several parts must begin."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        temporary = short_temporary()
        remove_left_folders(Path(temporary or tempfile.gettempdir()))
        self._scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
        self._lock = locked(self._scratch)
        self._started_at = time.monotonic()
        scratch = str(self._scratch)
        environment = self._environment(self._scratch)
        try:
            self._set_log_aside()  # of an engine that ended with its rank
            with self._bound() as listener, self._log_file.open("wb") as log:
                self._port = listener.getsockname()[1]
                self._meet(wait_s)
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "vapo_megatron.engines.inside.server_main",
                        str(listener.fileno()),
                        str(os.getpid()),
                        scratch,
                        json.dumps(self._identity),
                        *self._engine_args(self._scratch),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment
                    | {KEY_VARIABLE: self._key},  # not an argument: every user can see those
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            self._guard = start_guard(self._process.pid, scratch, environment)
        except BaseException:
            self.stop()
            raise

    def _meet(self, wait_s: float) -> None:
        """Agree on a start with the other parts of a server on several nodes."""
        if self._part is None:
            return
        if self._part.leads:
            beside = BESIDE_MEETING if self._config.attention_parts > 1 else ()
            self._meeting = self._part.begin(free_port(beside))
        else:
            self._meeting = self._part.join(wait_s)

    def check_arguments(self) -> None:
        """Have SGLang read the arguments of rollout.server_args, if any, in a process that starts
        no server.

        Raises:
            BadInput: SGLang refuses them.
            RunFailed: it did not read them within config.start_timeout_s.
        """
        parser = self._config.episode.tool_parser
        if not self._config.server_args and parser is None:
            return
        limit = self._config.start_timeout_s
        with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:
            try:
                ended = subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "vapo_megatron.engines.inside.server_main",
                        "check",
                        *self._engine_args(Path(scratch)),
                    ],
                    env=self._environment(Path(scratch)),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired:
                raise RunFailed(
                    "rollout.server_args: SGLang was not imported, or did not read them, within "
                    f"rollout.start_timeout_s={limit:g} s: {SLOW_IMPORT}"
                ) from None
        if ended.returncode:
            lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
            reason = (lines or [how_it_ended(ended.returncode)])[-1][:400]
            written = ", ".join(
                f"{name}={value}" for name, value in self._config.server_args.items()
            )
            if parser is not None and "tool-call-parser" in reason:
                raise BadInput(
                    f"rollout.episode.tool_parser={parser}: SGLang has no such parser ({reason})"
                )
            raise BadInput(
                f"rollout.server_args: SGLang does not take {written} ({reason}): see `sglang "
                "serve --help`"
            )

    def ended(self) -> str | None:
        """Why the server ended; None while it runs."""
        if self._process is None or self.is_closed():
            code = None
        else:
            code = self._process.poll()
        if code is None:
            return None
        return f"{how_it_ended(code)}; {self.address.cause()}"

    def lost(self) -> str | None:
        """A dead or stopped process of the server, in words, or why another part of it failed; None
        if there is none. Sends no request."""
        process = self._process
        scratch = self._scratch
        if process is None or scratch is None or self.is_closed():
            return None
        if (elsewhere := self.lost_elsewhere()) is not None:
            return elsewhere
        if (state := stands_still(process.pid)) is not None:
            return f"its HTTP server (process {process.pid}) is {state}"
        return next(iter(lost_processes(str(scratch))), None)

    def lost_elsewhere(self) -> str | None:
        """Why another node's part of the server failed, in words; None if it did not."""
        return None if self._part is None else self._part.look()

    def is_closed(self) -> bool:
        """Whether another node's part of the server has ended and will not start again."""
        return self._part is not None and self._part.is_closed()

    def is_ready(self) -> bool:
        """Whether the server answers."""
        if self._part is not None and not self._part.leads:
            return self._part.is_ready()
        try:
            answer = ask(f"{self.address.url}/health", _READY_SECONDS)
            is_ready = answer.status == HTTPStatus.OK
        except NO_ANSWER:
            return False
        if is_ready and self._part is not None:
            self._part.note_ready()
        return is_ready

    def start_again(self) -> None:
        """Start the server again after end(), at the same address. It has none of the trainer's
        weights.

        Raises:
            BadInput: the port is in use, or the first of several parts has not begun again yet.
        """
        self._weight_version = NO_WEIGHTS
        end = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                return self._start(_PORT_SECONDS)
            except BadInput:
                if time.monotonic() > end:
                    raise
                time.sleep(_POLL_SECONDS)

    def wait_until_ready(self) -> None:
        """Return when the server answers.

        Raises:
            RunFailed: it ended or did not answer within config.start_timeout_s; the message quotes
                its log.
        """
        if self._process is None:
            self.start()
        limit = self._config.start_timeout_s
        while not self.is_ready():
            problem = None
            if (ended := self.ended()) is not None:
                problem = f"the server ended while starting ({ended})"
            elif (elsewhere := self.lost_elsewhere()) is not None:
                problem = f"the server did not start: {elsewhere}"
            elif time.monotonic() > self._started_at + limit:
                problem = (
                    f"the server did not answer within rollout.start_timeout_s={limit:g} s (raise "
                    f"it for a large model): {self.address.cause()}"
                )
            if problem is not None:
                self.end(problem)
                raise RunFailed(f"{self._log_file}: {problem}")
            time.sleep(_POLL_SECONDS)

    def end(self, cause: str) -> Path:
        """End a server that is wrong, before it is started again. Returns the path under which its
        log is kept. The parts on other nodes end as well."""
        if self._part is not None:
            self._part.fail(cause)
        self.stop()
        with contextlib.suppress(OSError):  # start_again() tries it again
            return self._set_log_aside()
        return self._log_file

    def _set_log_aside(self) -> Path:
        number = 1
        while (
            aside := self._log_file.with_suffix(f".ended{number}{self._log_file.suffix}")
        ).exists():
            number += 1
        if self._log_file.exists():
            self._log_file.rename(aside)
        return aside

    def close(self) -> None:
        """End the server and keep it ended; the keepers of its parts on other nodes do not start it
        again."""
        if self._part is not None:
            self._part.close()
        self.stop()

    def stop(self) -> None:
        """End the server and all its processes. May be called at any time, any number of times."""
        process = self._process
        self._process = None
        guard = self._guard
        self._guard = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            remove_shared_memory(process.pid)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
        if self._lock is not None:
            self._lock.close()
        if guard is not None:  # last: until here this process may be killed
            guard.kill()
            guard.communicate()

    def __enter__(self) -> "EngineServer":
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _bound(self) -> socket.socket:
        """The bound port, to be inherited so that nobody else takes it. Not listening yet: early
        calls are refused."""
        listener = None
        # A port that the kernel gives to nobody while the server is started again
        if not self._port:
            self._port = free_port(BESIDE_SERVER if self._config.attention_parts > 1 else ())
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.socket(family, kind, protocol)
            # The port may be taken again right after its last server has ended.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            if listener is not None:
                listener.close()
            raise BadInput(
                f"an engine cannot listen on {self._host}, port {self._port} ({error.strerror}): "
                "give an address of this machine and a free port"
            ) from None
        return listener

    def _environment(self, scratch: Path) -> dict[str, str]:
        return engine_environment(
            os.environ,
            scratch,
            self._devices,
            float32=self._dtype == "float32",
            offloads=self._offloads,
            elsewhere=bool(self._identity),
            tp=self._config.tp,
            nodes=1 if self._part is None else self._part.of,
            host=self._host,
            cpu_threads=self._config.cpu_threads,
        )

    def _engine_args(self, scratch: Path) -> list[str]:
        return engine_arguments(
            self._config,
            self._dtype,
            self._fp8,
            on_gpus=self._devices is not None,
            offloads=self._offloads,
            family=engine_arguments_of(self._model_path),
            quantised=has_quantised_files(self._model_path),
            model_path=engine_directory(self._model_path, scratch),
            host=self._host,
            port=self._port,
            weight_version=self._weight_version,
            **self._place(),
        )

    def _place(self) -> dict[str, object]:
        """SGLang's arguments for a part of a server on several nodes."""
        if self._part is None:
            return {}
        return {
            "nnodes": self._part.of,
            "node_rank": self._part.index,
            "dist_init_addr": self._meeting,
        }

"""Requests from a trainer to one SGLang server, over HTTP."""

import asyncio
import base64
import errno
import json
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.data.sample import FinishReason
from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.inside.broadcast_group import Backend
from vapo_megatron.engines.inside.server_main import IDENTITY_PATH
from vapo_megatron.engines.inside.strict_loading import BROADCAST_GROUP, LOAD_FORMAT
from vapo_megatron.engines.server.process import NO_WEIGHTS, EngineAddress
from vapo_megatron.errors import BadInput, RunFailed, TryAgain, VapoError, reason_of
from vapo_megatron.weights.routed_experts import ExpertChoices

T = TypeVar("T")

_OWNER_END = ":"
_IDLE_POLL_SECONDS = 0.05
REQUEST_SECONDS = 600.0
"""Deadline of an answer that is not a rollout: a bucket of weights, say."""

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
# Running responses end, are recomputed later, or continue later with the cache as it is.
PauseMode = Literal["abort", "retract", "in_place"]


class EngineWrong(RunFailed):
    """The server's answer is invalid: another server, or this one after a restart, may do better."""


@dataclass(slots=True)
class Completion:
    """One response. logprobs, routed_experts: see EngineClient.generate. weight_version_oldest and weight_version are
    those of its first and last token; versions has each version with its number of tokens."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    weight_version_oldest: int
    weight_version: int
    routed_experts: Tensor | None = None
    versions: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """A server's answer to a bucket of weights.

    problems: one line each. seconds: taken to load or compare the bucket. checksums: of the tensors as they arrived
    (weights.bucket.checksum), a list for each of its ranks.
    """

    problems: list[str]
    seconds: float
    checksums: list[list[int]]


class EngineClient:
    """Sends requests to one server from one event loop.

    Every method raises TryAgain if the server is gone or silent for longer than the deadline (seconds), RunFailed if it
    refuses (EngineWrong if it is at fault); the message names its address and its log.
    """

    def __init__(self, address: EngineAddress, deadline: float = REQUEST_SECONDS) -> None:
        self.address = address
        self._deadline = deadline
        self._session: aiohttp.ClientSession | None = None
        self._keeps_cache = False

    async def close(self) -> None:
        """Close its connections; the next call opens new ones."""
        session, self._session = self._session, None  # at once, so that no later call uses it
        if session is not None:
            await session.close()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[dict[str, Any]],
        routed_experts: ExpertChoices | None = None,
        ids: Sequence[str] | None = None,
        unfinished: bool = False,
    ) -> list[Completion]:
        """One response to each prompt of token ids, in one request that returns when all are done.

        ids: names of the responses, for abort(). unfinished: return aborted responses as far as they got; else an
        aborted response is an error.

        sampling_params are SGLang's, one dict a prompt. logprobs has one natural logarithm per response token: under
        the softmax of logits / temperature over the whole vocabulary, whatever top_p and top_k cut away from sampling
        (at temperature 0, of the plain logits). Source: sglang/srt/layers/sampler.py, Sampler.forward.

        routed_experts (needs rollout.router_replay) asks for the experts of each token from its `start` on but the
        last: uint8 or int16 [prompt + response - 1 - start, layers * experts per token], layer by layer.
        """
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": list(sampling_params),
            "return_logprob": True,
            "return_routed_experts": routed_experts is not None,
        }
        if routed_experts is not None:
            body |= {"expert_choices": asdict(routed_experts), "routed_experts_start_len": routed_experts.start}
        if ids is not None:
            body["rid"] = list(ids)
        message = await self._call(columns.PATH, body)
        with self._readable(columns.PATH):
            answers = columns.unpack(message)
            if len(answers) != len(prompts):
                raise ValueError(f"{len(answers)} responses to {len(prompts)} prompts")
            completions = [self._completion(answer, unfinished) for answer in answers]
            if routed_experts is not None:
                for prompt, completion, answer in zip(prompts, completions, answers, strict=True):
                    if "wrong_experts" in answer.meta:
                        raise ValueError(answer.meta["wrong_experts"])
                    rows = len(prompt) + len(completion.token_ids) - 1 - routed_experts.start
                    completion.routed_experts = routed_experts.read(answer.experts, rows)
        return completions

    async def abort(self, ids: Sequence[str]) -> None:
        """Stop responses by the names that generate() was given; finished ones stay as they are."""
        await self._call(columns.ABORT_PATH, list(ids))

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[dict[str, Any]]]:
        """A response's text without its tool calls, and the calls (name, parameters), by one of SGLang's parsers."""
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        answer = await self._call("parse_function_call", body)
        with self._readable("parse_function_call"):
            return answer["normal_text"], answer["calls"]

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1: one value less than tokens, per sequence."""
        body = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = await self._call("generate", body)
        with self._readable("generate"):
            logprobs = [
                [math.nan if entry[0] is None else float(entry[0]) for entry in row[1:]]
                for row in (answer["meta_info"]["input_token_logprobs"] for answer in answers)
            ]
            if [len(row) + 1 for row in logprobs] != [len(sequence) for sequence in sequences]:
                raise ValueError(f"{list(map(len, logprobs))} log-probs of {list(map(len, sequences))} tokens")
        return logprobs

    async def identity(self) -> dict[str, Any] | None:
        """The identity of an engine on its own devices (remote_engines); None from any other server.

        Raises:
            BadInput: it does not take our key.
        """
        status, answer = await self._request(IDENTITY_PATH, None)
        if status in (401, 403):
            raise BadInput(
                f"{self.address.url}: the engine does not take our key: rollout.api_key_variable must name an "
                "environment variable with the key that the engine was started with"
            )
        return answer if status == 200 and isinstance(answer, dict) else None

    async def take_over(self) -> None:
        """End requests and a session that an earlier trainer may have begun. The server stays paused."""
        await self.pause()
        await self._request("end_weight_update", {})  # refused where no session is open

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Generate nothing until resume(); requests wait."""
        await self._call("pause_generation", {"mode": mode})
        self._keeps_cache = mode == "in_place"

    async def resume(self) -> None:
        """Take requests again."""
        await self._call("continue_generation", {})

    async def begin_weight_update(self) -> None:
        """Open the session in which send_bucket() is allowed, in place of one that was broken off."""
        await self._request("end_weight_update", {})  # refused where no session is open
        await self._call("begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close the session."""
        await self._call("end_weight_update", {})

    async def send_bucket(self, payloads: Sequence[bytes], *, version: int | None = None) -> LoadAnswer:
        """Send one bucket: a pickled weights.bucket.announce() for each tensor-parallel rank, with the "path" or
        the "buffer" (CUDA IPC) of its bytes.

        A version ends the weight sync: it marks what is generated from now on, and the cache of the old weights is
        dropped unless responses need it (pause in_place). receive_broadcast() answers alike.
        """
        body = {
            "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
            "load_format": LOAD_FORMAT,
        }
        return await self._load("update_weights_from_tensor", body, version)

    async def join_broadcast_group(self, host: str, port: int, first: int, size: int, backend: Backend) -> None:
        """Have the server join a broadcast_group that rank 0 opened at host:port: its ranks are first, first + 1 ..."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first,
            "world_size": size,
            "group_name": BROADCAST_GROUP,
            "backend": backend,
        }
        await self._call("init_weights_update_group", body)

    async def receive_broadcast(self, message: dict[str, Any], *, version: int | None = None) -> LoadAnswer:
        """Announce one bucket, whose bytes (if any) follow in the broadcast group."""
        body = {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": BROADCAST_GROUP,
            "load_format": f"{LOAD_FORMAT}:{json.dumps(message)}",
        }
        return await self._load("update_weights_from_distributed", body, version)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give GPU memory back to the trainer; frees nothing without a GPU. The cache is dropped in any case.

        Raises:
            TryAgain: the server is still busy at the deadline.
        """
        await self._wait_until_idle()
        await self._call("release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate GPU memory again. Weights are then undefined: send them before anything is generated."""
        await self._call("resume_memory_occupation", {"tags": list(tags)})

    async def _wait_until_idle(self) -> None:
        """Return once the server is idle, shown by its dropping its cache, which it does only when idle. Answers arrive
        before the scheduler's step has ended, and a server told to release memory within that step ends itself."""
        end = time.monotonic() + self._deadline
        while (reply := await self._request("flush_cache", {}))[0] != HTTPStatus.OK:
            if reply[0] != HTTPStatus.BAD_REQUEST:
                raise self._refused("flush_cache", *reply)
            if time.monotonic() > end:
                raise TryAgain(
                    f"{self.address}: the server was not idle within {self._deadline:g} s and keeps its memory: "
                    f"{self.address.cause()}"
                )
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    def _completion(self, answer: columns.Columns, unfinished: bool = False) -> Completion:
        reason = answer.meta["finish_reason"]["type"]
        if reason not in ("stop", "length") and not (unfinished and reason == "abort"):
            message = answer.meta["finish_reason"].get("message", "")
            raise TryAgain(f"{self.address}: a response was not finished ({reason}: {message})")
        token_ids, logprobs = answer.token_ids, answer.logprobs
        if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
            raise EngineWrong(
                f"{self.address}: {len(token_ids)} response tokens came with {len(logprobs)} log-probs, "
                "expected one finite value each: the engine's weights or logits are broken"
            )
        spans = answer.meta["weight_versions"]
        oldest, newest = (self._version(spans[index]["version"]) for index in (0, -1))
        versions: tuple[tuple[int, int], ...] = ((newest, len(token_ids)),)
        if len(spans) > 1:
            versions = tuple((self._version(span["version"]), span["end"] - span["start"]) for span in spans)
        return Completion(token_ids, logprobs, reason, oldest, newest, versions=versions)

    def _version(self, text: str) -> int:
        """The number in a version, after the mark of the trainer that sent the weights."""
        if text == str(NO_WEIGHTS):
            raise TryAgain(f"{self.address}: the server was restarted and does not have our weights yet")
        owner, _, number = text.rpartition(_OWNER_END)
        if owner != self.address.owner:
            raise RunFailed(
                f"{self.address}: it runs weights that another trainer has synced: an engine serves one run at a "
                "time, give each run its own engines in rollout.external_urls"
            )
        return int(number)

    async def _load(self, path: str, body: dict[str, Any], version: int | None) -> LoadAnswer:
        mark = f"{self.address.owner}{_OWNER_END}" if self.address.owner else ""
        body |= {
            "flush_cache": version is not None and not self._keeps_cache,
            "weight_version": None if version is None else f"{mark}{version}",
        }
        status, answer = await self._request(path, body)
        loaded = _load_answer(answer)
        if loaded is None:
            raise self._refused(path, status, answer)
        return loaded

    @contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """Raises EngineWrong if an answer cannot be read in here: the server is broken, not the run."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise EngineWrong(f"{self.address}: its answer to {path} cannot be read ({reason_of(error)})") from None

    async def _call(self, path: str, body: dict[str, Any] | list[str]) -> Any:
        status, answer = await self._request(path, body)
        if status != 200:
            raise self._refused(path, status, answer)
        return answer

    async def _request(self, path: str, body: dict[str, Any] | list[str] | None) -> tuple[int, Any]:
        """Status and answer of a POST, or of a GET where there is no body: bytes of a message of columns, else JSON."""
        if self._session is None:
            # A new connection each time: a kept one may be closed by the server while a request is on its way.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=self._deadline)
            headers = {"Content-Type": "application/json"}
            if self.address.key:
                headers["Authorization"] = f"Bearer {self.address.key}"
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        url = f"{self.address.url}/{path}"
        method = "GET" if body is None else "POST"
        try:
            data = None if body is None else orjson.dumps(body)
            async with self._session.request(method, url, data=data) as answer:
                content = await answer.read()
                return answer.status, content if answer.content_type == columns.MEDIA_TYPE else _decoded(content)
        except TimeoutError:
            raise TryAgain(
                f"{self.address}: no answer to {path} within {self._deadline:g} s: {self.address.cause()}"
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TryAgain(f"{self.address}: its connections were closed before {path} was asked for") from None
        except aiohttp.ClientError as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise RunFailed(
                    f"{self.address}: no connection for {path}: {error.strerror}; each group on its way takes one, "
                    "raise the limit (ulimit -Hn; LimitNOFILE of slurmd)"
                ) from None
            raise TryAgain(
                f"{self.address}: the server is gone ({type(error).__name__} on {path}): {self.address.cause()}"
            ) from None

    def _refused(self, path: str, status: int, answer: Any) -> VapoError:
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = error.get("message", error) if isinstance(error, dict) else error
        first_line = (str(message).splitlines() or ["no reason given"])[0]
        # A broadcast broke off: its sender or another receiver is gone.
        kind: type[VapoError] = TryAgain if first_line.startswith("Failed to receive weights") else RunFailed
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            kind = EngineWrong
        return kind(f"{self.address}: {path} was refused (HTTP {status}): {first_line[:400]}")


def ask(
    address: EngineAddress, call: Callable[[EngineClient], Coroutine[Any, Any, T]], deadline: float = REQUEST_SECONDS
) -> T:
    """One call to a server, for callers without an event loop."""

    async def run() -> T:
        client = EngineClient(address, deadline)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def _decoded(content: bytes) -> Any:
    """JSON if it is JSON; some answers are empty, errors may be plain text."""
    try:
        return orjson.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _load_answer(answer: Any) -> LoadAnswer | None:
    """The answer of strict_loading, if it is one; the server may append further words."""
    try:
        parsed, _ = json.JSONDecoder().raw_decode(answer["message"])
        return LoadAnswer(list(parsed["problems"]), float(parsed["seconds"]), list(parsed["checksums"]))
    except (ValueError, KeyError, TypeError):
        return None

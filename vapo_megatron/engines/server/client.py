"""Requests from a trainer to one SGLang server, over HTTP."""

import asyncio
import base64
import json
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vapo_megatron.data.sample import FinishReason
from vapo_megatron.engines.inside import columns
from vapo_megatron.engines.inside.broadcast_group import Backend
from vapo_megatron.engines.inside.server_main import IDENTITY_PATH
from vapo_megatron.engines.inside.strict_updates import BROADCAST_GROUP, LOAD_FORMAT
from vapo_megatron.engines.server.address import NO_WEIGHTS, EngineAddress
from vapo_megatron.engines.server.connection import REQUEST_SECONDS, Connection, EngineWrong
from vapo_megatron.errors import BadInput, RunFailed, TryAgain
from vapo_megatron.weights.routed_experts import ExpertChoices

T = TypeVar("T")

_OWNER_END = ":"
_IDLE_POLL_SECONDS = 0.05

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
# Running responses end, are recomputed later, or continue later with the cache as it is then.
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(slots=True)
class Completion:
    """One response.

    Attributes:
        token_ids: int32 [response].
        logprobs: float32 [response]; see EngineClient.generate.
        finish_reason: why the response ended.
        weight_version_oldest: weight version of the first token.
        weight_version: weight version of the last token.
        routed_experts: see EngineClient.generate.
        versions: each weight version with its number of tokens.
    """

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

    Attributes:
        problems: one line each.
        seconds: time to load or compare the bucket.
        checksums: of the tensors as they arrived (weights.bucket.sum_of_words), one list per rank.
    """

    problems: list[str]
    seconds: float
    checksums: list[list[int]]


class EngineClient(Connection):
    """Everything that a trainer asks of one server; raises as Connection does.

    Args:
        address: the server's address.
        deadline: seconds until each request must be answered.
        limits_responses: whether the deadline applies to generate() as well; if not, its caller
            limits how long it waits.
    """

    def __init__(
        self,
        address: EngineAddress,
        deadline: float = REQUEST_SECONDS,
        limits_responses: bool = True,
    ) -> None:
        super().__init__(address, deadline)
        self._limits_responses = limits_responses
        self._keeps_cache = False

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[dict[str, Any]],
        routed_experts: ExpertChoices | None = None,
        ids: Sequence[str] | None = None,
        unfinished: bool = False,
    ) -> list[Completion]:
        """One response to each prompt, in one request that returns when all are done.

        Args:
            prompts: token ids.
            sampling_params: SGLang's, one dict per prompt.
            routed_experts: asks for the experts of each token from its `start` on except the last
                one (needs rollout.router_replay).
            ids: names of the responses, for abort().
            unfinished: return the tokens of aborted responses. Otherwise an aborted response is an
                error.

        Returns:
            logprobs has one natural logarithm per response token: under the softmax of logits /
            temperature over the whole vocabulary, regardless of what top_p and top_k remove from
            sampling (at temperature 0, of the plain logits). Source: sglang/srt/layers/sampler.py,
            Sampler.forward. routed_experts is uint8 or int16
            [prompt + response - 1 - start, layers * experts per token], layer by layer.
        """
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": list(sampling_params),
            "return_logprob": True,
            "return_routed_experts": routed_experts is not None,
        }
        if routed_experts is not None:
            body |= {
                "expert_choices": asdict(routed_experts),
                "routed_experts_start_len": routed_experts.start,
            }
        if ids is not None:
            body["rid"] = list(ids)
        message = await self._call(columns.PATH, body, limited=self._limits_responses)
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
        """Stop responses by the names that generate() was given. Finished ones are not affected."""
        await self._call(columns.ABORT_PATH, list(ids))

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[dict[str, Any]]]:
        """A response's text without its tool calls, and the calls (name, parameters).

        parser: the name of one of SGLang's tool-call parsers.
        """
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        answer = await self._call("parse_function_call", body)
        with self._readable("parse_function_call"):
            return answer["normal_text"], answer["calls"]

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of each sequence's tokens, except the first, given those
        before."""
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
                raise ValueError(
                    f"{list(map(len, logprobs))} log-probs of {list(map(len, sequences))} tokens"
                )
        return logprobs

    async def identity(self) -> dict[str, Any] | None:
        """The identity of an engine on its own devices (remote_engines); None from any other
        server.

        Raises:
            BadInput: it does not accept our key.
        """
        status, answer = await self._request(IDENTITY_PATH, None)
        if status in (401, 403):
            raise BadInput(
                f"{self.address.url}: the engine does not accept our key: rollout.api_key_variable "
                "must name an environment variable with the key that the engine was started with"
            )
        if status == 200 and isinstance(answer, dict):
            return answer
        return None

    async def take_over(self) -> None:
        """End requests and a session that an earlier trainer may have started. The server stays
        paused."""
        await self.pause()
        await self._request("end_weight_update", {})  # refused where no session is open

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Generate nothing until resume(). Requests wait."""
        await self._call("pause_generation", {"mode": mode})
        self._keeps_cache = mode == "in_place"

    async def resume(self) -> None:
        """Accept requests again."""
        await self._call("continue_generation", {})

    async def begin_weight_update(self) -> None:
        """Open the session in which send_bucket() is allowed, replacing an interrupted one."""
        await self._request("end_weight_update", {})  # refused where no session is open
        await self._call("begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close the session."""
        await self._call("end_weight_update", {})

    async def send_bucket(
        self, payloads: Sequence[bytes], *, version: int | None = None
    ) -> LoadAnswer:
        """Send one bucket.

        Args:
            payloads: a pickled weights.bucket.announce() for each tensor-parallel rank, with the
                "path" or the "buffer" (CUDA IPC) of its bytes.
            version: ends the weight sync. It marks all tokens generated from now on, and the cache
                of the old weights is dropped unless responses need it (pause in_place).
        """
        body = {
            "serialized_named_tensors": [
                base64.b64encode(payload).decode() for payload in payloads
            ],
            "load_format": LOAD_FORMAT,
        }
        return await self._load("update_weights_from_tensor", body, version)

    async def join_broadcast_group(
        self, host: str, port: int, first: int, size: int, backend: Backend
    ) -> None:
        """Have the server join a broadcast_group that rank 0 opened at host:port.

        Its ranks are first, first + 1 and so on.
        """
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first,
            "world_size": size,
            "group_name": BROADCAST_GROUP,
            "backend": backend,
        }
        await self._call("init_weights_update_group", body)

    async def receive_broadcast(
        self, message: dict[str, Any], *, version: int | None = None
    ) -> LoadAnswer:
        """Announce one bucket, whose bytes (if any) follow in the broadcast group.

        The answer, and version: see send_bucket.
        """
        body = {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": BROADCAST_GROUP,
            "load_format": f"{LOAD_FORMAT}:{json.dumps(message)}",
        }
        return await self._load("update_weights_from_distributed", body, version)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Return GPU memory to the trainer. Without a GPU, only the cache is dropped.

        Raises:
            TryAgain: the server is still busy at the deadline.
        """
        await self._wait_until_idle()
        await self._call("release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate GPU memory again. Weights are undefined until they are sent."""
        await self._call("resume_memory_occupation", {"tags": list(tags)})

    async def _wait_until_idle(self) -> None:
        """Return once the server drops its cache, which it does only when idle.

        Answers arrive before the scheduler's step has ended, and a server that is told to release
        memory within that step exits.
        """
        end = time.monotonic() + self._deadline
        while (reply := await self._request("flush_cache", {}))[0] != HTTPStatus.OK:
            if reply[0] != HTTPStatus.BAD_REQUEST:
                raise self._refused("flush_cache", *reply)
            if time.monotonic() > end:
                raise TryAgain(
                    f"{self.address}: the server was not idle within {self._deadline:g} s and "
                    f"keeps its memory: {self.address.cause()}"
                )
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    def _completion(self, answer: columns.Columns, unfinished: bool = False) -> Completion:
        reason = answer.meta["finish_reason"]["type"]
        if reason not in ("stop", "length") and not (unfinished and reason == "abort"):
            message = answer.meta["finish_reason"].get("message", "")
            raise TryAgain(f"{self.address}: a response was not finished ({reason}: {message})")
        token_ids = answer.token_ids
        logprobs = answer.logprobs
        if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
            raise EngineWrong(
                f"{self.address}: {len(token_ids)} response tokens came with {len(logprobs)} "
                "log-probs, expected one finite value each: the engine's weights or logits are "
                "broken"
            )
        spans = answer.meta["weight_versions"]
        oldest, newest = (self._version(spans[index]["version"]) for index in (0, -1))
        versions: tuple[tuple[int, int], ...] = ((newest, len(token_ids)),)
        if len(spans) > 1:
            versions = tuple(
                (self._version(span["version"]), span["end"] - span["start"]) for span in spans
            )
        return Completion(token_ids, logprobs, reason, oldest, newest, versions=versions)

    def _version(self, text: str) -> int:
        """The number in a version, after the mark of the trainer that sent the weights."""
        owner, _, number = text.rpartition(_OWNER_END)
        # A new process of an external engine has the version of a checkpoint, without a mark.
        if text == str(NO_WEIGHTS) or (self.address.owner and not owner):
            raise TryAgain(
                f"{self.address}: the server was restarted and does not have our weights yet"
            )
        if owner != self.address.owner:
            raise RunFailed(
                f"{self.address}: it runs weights that another trainer has synced: an engine "
                "serves one run at a time, give each run its own engines in rollout.external_urls"
            )
        return int(number)

    async def _load(self, path: str, body: dict[str, Any], version: int | None) -> LoadAnswer:
        if self.address.owner:
            mark = f"{self.address.owner}{_OWNER_END}"
        else:
            mark = ""
        body |= {
            "flush_cache": version is not None and not self._keeps_cache,
            "weight_version": None if version is None else f"{mark}{version}",
        }
        status, answer = await self._request(path, body)
        loaded = _load_answer(answer)
        if loaded is None:
            raise self._refused(path, status, answer)
        return loaded


def call_once(
    address: EngineAddress,
    call: Callable[[EngineClient], Coroutine[Any, Any, T]],
    deadline: float = REQUEST_SECONDS,
) -> T:
    """One call to a server, for callers without an event loop."""

    async def run() -> T:
        client = EngineClient(address, deadline)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def _load_answer(answer: Any) -> LoadAnswer | None:
    """The answer of strict_loading, if it is one. The server may append further words."""
    try:
        parsed, _ = json.JSONDecoder().raw_decode(answer["message"])
        return LoadAnswer(
            list(parsed["problems"]), float(parsed["seconds"]), list(parsed["checksums"])
        )
    except (ValueError, KeyError, TypeError):
        return None

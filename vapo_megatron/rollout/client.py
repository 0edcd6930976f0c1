"""What a trainer asks of one SGLang server, over HTTP on the same machine."""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from vapo_megatron.errors import RunFailed, TryAgain
from vapo_megatron.experience.sample import FinishReason
from vapo_megatron.rollout.server import EngineAddress
from vapo_megatron.rollout.strict_loading import LOAD_FORMAT

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One response. logprobs: see EngineClient.generate; the versions are those of its first and last token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version_oldest: int
    weight_version: int


class EngineClient:
    """Speaks to one server from one event loop.

    Every method raises TryAgain where the server is gone or silent for longer than the deadline (seconds), RunFailed
    where it refuses; the one line names its address and its log.
    """

    def __init__(self, address: EngineAddress, deadline: float) -> None:
        self._address = address
        self._deadline = deadline
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> EngineAddress:
        """Of the server."""
        return self._address

    async def close(self) -> None:
        """Close its connections; the next call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling_params: Sequence[dict[str, Any]]
    ) -> list[Completion]:
        """One response to each prompt of token ids, in one request that returns when all are done.

        sampling_params are SGLang's, one dict a prompt. logprobs has one natural logarithm per response token: under
        the softmax of logits / temperature over the whole vocabulary, whatever top_p and top_k cut away from sampling
        (at temperature 0, of the plain logits). Source: sglang/srt/layers/sampler.py, Sampler.forward.
        """
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": list(sampling_params),
            "return_logprob": True,
        }
        answers = await self._call("generate", body)
        return [self._completion(answer) for answer in answers]

    async def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1: one value less than tokens, per sequence."""
        body = {
            "input_ids": [list(sequence) for sequence in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answers = await self._call("generate", body)
        return [[entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]

    async def info(self) -> dict[str, Any]:
        """The server's resolved arguments and state."""
        answer: dict[str, Any] = await self._call("server_info", None)
        return answer

    async def weight_version(self) -> int:
        """The version that new responses are marked with."""
        return int((await self._call("model_info", None))["weight_version"])

    async def pause(self) -> None:
        """Abort what runs and take nothing new until resume()."""
        await self._call("pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        """Take requests again."""
        await self._call("continue_generation", {})

    async def begin_weight_update(self) -> None:
        """Open the session in which send_bucket() is allowed."""
        await self._call("begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close it."""
        await self._call("end_weight_update", {})

    async def send_bucket(self, payloads: Sequence[bytes], *, version: int | None = None) -> list[str]:
        """Hand over one bucket: a payload of weight_bucket.WeightBuffer.pack for each tensor-parallel rank.

        Returns one line for each tensor that is wrong (strict_loading). A version ends the hand-over: it marks what is
        generated from now on, and what the cache holds of the old weights is dropped.
        """
        body = {
            "serialized_named_tensors": [base64.b64encode(payload).decode() for payload in payloads],
            "load_format": LOAD_FORMAT,
            "flush_cache": version is not None,
            "weight_version": None if version is None else str(version),
        }
        status, answer = await self._request("update_weights_from_tensor", body)
        if status == 200:
            return []
        problems = _problems(answer)
        if problems is None:
            raise self._refused("update_weights_from_tensor", status, answer)
        return problems

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Give GPU memory back to the trainer; needs rollout.memory_saver. Frees nothing without a GPU."""
        await self._call("release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take GPU memory again; weights come back undefined and are to be sent before anything is generated."""
        await self._call("resume_memory_occupation", {"tags": list(tags)})

    def _completion(self, answer: dict[str, Any]) -> Completion:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise RunFailed(
                f"{self._where()}: a response was not finished ({reason}: {meta['finish_reason'].get('message', '')})"
            )
        token_ids = answer["output_ids"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        if len(logprobs) != len(token_ids) or not all(value is not None and math.isfinite(value) for value in logprobs):
            raise RunFailed(
                f"{self._where()}: {len(token_ids)} response tokens came with {len(logprobs)} log-probs, "
                "expected a finite one each: the engine's weights or logits are broken"
            )
        spans = meta["weight_versions"]
        return Completion(token_ids, logprobs, reason, int(spans[0]["version"]), int(spans[-1]["version"]))

    async def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        status, answer = await self._request(path, body)
        if status != 200:
            raise self._refused(path, status, answer)
        return answer

    async def _request(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Status and decoded answer of a POST, or of a GET where there is no body."""
        if self._session is None:
            # A new connection each time: a kept one may be closed by the server while a request is on its way.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=self._deadline)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        url = f"{self._address.url}/{path}"
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, url, json=body) as answer:
                text = await answer.text()
                return answer.status, _decoded(text)
        except TimeoutError:
            raise TryAgain(
                f"{self._where()}: no answer to {path} within {self._deadline:g} s: {self._address.cause()}"
            ) from None
        except aiohttp.ClientError as error:
            raise TryAgain(
                f"{self._where()}: the server is gone ({type(error).__name__} on {path}): {self._address.cause()}"
            ) from None

    def _where(self) -> str:
        return f"{self._address.url} (log {self._address.log_file})"

    def _refused(self, path: str, status: int, answer: Any) -> RunFailed:
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = error.get("message", error) if isinstance(error, dict) else error
        first_line = (str(message).splitlines() or ["no reason given"])[0]
        return RunFailed(f"{self._where()}: {path} was refused (HTTP {status}): {first_line[:400]}")


def _decoded(text: str) -> Any:
    """JSON where it is JSON; some answers are empty, errors may be plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _problems(answer: Any) -> list[str] | None:
    """The list that strict_loading answers with, if that is what the answer is."""
    decoded = _decoded(answer["message"]) if isinstance(answer, dict) and "message" in answer else None
    return decoded if isinstance(decoded, list) else None

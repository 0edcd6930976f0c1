"""Grades by a model behind an OpenAI-compatible server."""

import asyncio
import hashlib
import os
import re
from concurrent.futures import Future
from typing import Any

from openai import OpenAIError
from openai.types.chat import ChatCompletion

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rewards.extract import final_part
from vapo_megatron.rewards.math import Grade
from vapo_megatron.rewards.openai_server import connect, one_line, reason_of_failure, text_of

_TRIES = 3
_FIRST_PAUSE = 1.0  # seconds; each further one is twice as long
_MOST_REMEMBERED = 200_000  # grades, some 30 MB
_FIELD = re.compile(r"\{(problem|answer|response)\}")
_VERDICT = re.compile(
    r"(?:verdict|score)[*_`]*\s*:[\s*_`]*(incorrect|correct|[01](?:\.\d+)?)(?![\w.]*\w|\s*[/%])", re.IGNORECASE
)


class Judge:
    """Asks the judge of section reward about responses, many at a time and each only once.

    A judgement that fails three times is a grade with the reason error, which is counted and not remembered.
    """

    def __init__(self, config: RewardConfig) -> None:
        assert config.judge is not None
        self._config, self._correct_above = config.judge, config.correct_above or 0.0
        self._loop = LoopThread()
        self._client = connect(self._config.url, os.environ.get("JUDGE_API_KEY"), self._config.timeout_s)
        self._free = asyncio.Semaphore(self._config.max_concurrency)
        self._judgements: dict[str, asyncio.Task[Grade]] = {}  # by what was asked, also those that are under way

    def submit(self, message: dict[str, str]) -> "Future[Grade]":
        """A future of the grade on {problem, ground_truth, response}."""
        return self._loop.start(self._judged(message))

    def close(self) -> None:
        """End all requests."""
        self._loop.cancel_all()
        self._loop.run(self._client.close())
        self._loop.close()

    async def _judged(self, message: dict[str, str]) -> Grade:
        prompt = filled(self._config.prompt, message["problem"], message["ground_truth"], message["response"])
        judgement = self._judgements.get(prompt)
        if judgement is None:
            if len(self._judgements) >= _MOST_REMEMBERED:
                del self._judgements[next(iter(self._judgements))]
            judgement = self._judgements[prompt] = asyncio.create_task(self._asked(prompt))
        grade = await asyncio.shield(judgement)  # whoever else waits for it goes on where this batch is given up
        if grade.reason == "error":
            self._judgements.pop(prompt, None)
        return grade

    async def _asked(self, prompt: str) -> Grade:
        async with self._free:
            return await self._tried(prompt)

    async def _tried(self, prompt: str) -> Grade:
        body = {"model": self._config.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0.0}
        failure = ""
        for attempt in range(_TRIES):
            try:
                answer = await self._client.post("/chat/completions", cast_to=ChatCompletion, body=body)
                reply = final_part(text_of(answer.choices[0].message))
                if verdicts := _VERDICT.findall(reply):
                    return self._grade(verdicts[-1].lower())
                failure = f"a reply without a verdict: {one_line(reply[-200:], 200)}"
            except (OpenAIError, ValueError) as error:
                failure, passing, wait = reason_of_failure(error, self._config.timeout_s)
                if attempt == _TRIES - 1 or (isinstance(error, OpenAIError) and not passing):
                    break
                await asyncio.sleep(min(max(wait, _FIRST_PAUSE * 2**attempt), self._config.timeout_s))
            except (AttributeError, IndexError, TypeError):  # the library does not check what a server sends
                failure = f"no chat completion: {one_line(str(answer), 200)}"
        return Grade(False, "error", detail=failure)

    def _grade(self, verdict: str) -> Grade:
        score = {"correct": 1.0, "incorrect": 0.0}.get(verdict)
        score = float(verdict) if score is None else score
        if not 0 <= score <= 1:
            return Grade(False, "error", detail=f"score {verdict} is not within 0 and 1")
        return Grade(score > self._correct_above, "scored", score=score)


def filled(prompt: str, problem: str, answer: str, response: str) -> str:
    """Fill in the fields of a prompt in one pass: braces inside a problem or response are left alone.

    The response stands between marks that hold a digest of it, so that no response can write the closing one, and
    without the beginnings of the special tokens of chat templates.
    """
    response = response.replace("<|", "< |")
    mark = hashlib.sha256(response.encode(errors="replace")).hexdigest()[:16]
    fields: dict[str, Any] = {"problem": problem, "answer": answer}
    fields["response"] = f"[response {mark}]\n{response}\n[end of response {mark}]"
    return _FIELD.sub(lambda match: fields[match[1]], prompt)

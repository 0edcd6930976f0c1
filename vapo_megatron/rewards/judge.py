"""Grades by a model behind an OpenAI-compatible server."""

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from openai import OpenAIError
from openai.types.chat import ChatCompletion

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.errors import TryAgain
from vapo_megatron.loop_thread import LoopThread
from vapo_megatron.rewards.extract import final_part
from vapo_megatron.rewards.grade import Case, Grade
from vapo_megatron.rewards.openai_server import (
    answered,
    connect,
    one_line,
    reason_of_failure,
    text_of,
)
from vapo_megatron.rewards.verifier import Message, Verifier

if TYPE_CHECKING:
    from vapo_megatron.data.sample import Prompt

_TRIES = 3
_FIRST_PAUSE = 1.0  # seconds; each further one is twice as long
_MOST_REMEMBERED = 200_000  # grades, some 160 MB
_FIELD = re.compile(r"\{(problem|answer|response)\}")
_VERDICT = re.compile(
    r"(?:verdict|score)[*_`]*\s*:[\s*_`]*(incorrect|correct|[01](?:[.,]\d+)?)(?![\w.]*\w|\s*[/%])",
    re.IGNORECASE,
)


# The judge's tokenizer is not known, so everything of the shape of a special token is broken up:
# <|im_start|>, <s>, </s>, <start_of_turn>, <think>, <<SYS>>, <extra_id_1>, DeepSeek's with
# full-width bars, [INST], [/INST], [TOOL_CALLS], [gMASK], MiniMax's ]~b] and [e~[.
_OPENS_SPECIAL_TOKEN = re.compile(
    r"[<＜](?=[|｜/<A-Za-z_▁])|\[(?=/?[A-Z][A-Z_]*\]|gMASK\]|e~\[)|\](?=~[A-Za-z!]+\[?\]?)"
)


class JudgeVerifier(Verifier):
    """Asks a model, over the network instead of in a process."""

    blames_user = True
    failure = TryAgain

    @property
    def name(self) -> str:
        """The server."""
        assert self.config.judge is not None
        return f"reward.judge.url={self.config.judge.url}"

    @property
    def remedy(self) -> str:
        """What to look at."""
        return (
            "check that the server runs and serves reward.judge.model, and what "
            "reward.judge.prompt asks"
        )

    def backend(self) -> "Judge":
        """The client of the server."""
        return Judge(self.config)

    def prepare(self, case: Case) -> Grade | Message:
        """The question to the judge, who does not see the reasoning."""
        answer = final_part(case.response).strip()
        if not answer:
            return Grade(False, "no_answer")
        return {"ground_truth": case.ground_truth, "response": answer, "problem": case.problem}

    def check(self, rows: "Sequence[Prompt]", grade: Callable[[Case], Grade]) -> None:
        """Ask about the first row, whose own answer should be right."""
        if not self.check_first(rows, grade).correct:
            print(
                f"vapo-megatron: caution: {self.name}: calls the reference answer of row "
                f"{rows[0].id} incorrect when it is the response: look at reward.judge.prompt",
                file=sys.stderr,
                flush=True,
            )


class Judge:
    """Asks the judge of section reward about responses, many at a time and each only once.

    A judgement that fails three times is a grade with the reason error, which is counted and not
    remembered.
    """

    def __init__(self, config: RewardConfig) -> None:
        assert config.judge is not None
        self._config = config.judge
        self._correct_above = config.correct_above or 0.0
        self._loop = LoopThread()
        self._client = connect(
            self._config.url, os.environ.get("JUDGE_API_KEY"), self._config.timeout_s
        )
        self._free = asyncio.Semaphore(self._config.max_concurrency)
        # By the question's digest, pending ones included: questions would take gigabytes
        self._judgements: dict[bytes, asyncio.Task[Grade]] = {}

    def submit(self, message: dict[str, str]) -> "Future[Grade]":
        """A future of the grade on {problem, ground_truth, response}."""
        return self._loop.start(self._judged(message))

    def close(self) -> None:
        """End all requests."""
        self._loop.cancel_all()
        self._loop.run(self._client.close())
        self._loop.close()

    async def _judged(self, message: dict[str, str]) -> Grade:
        prompt = filled(
            self._config.prompt, message["problem"], message["ground_truth"], message["response"]
        )
        question = hashlib.sha256(prompt.encode(errors="surrogatepass")).digest()
        judgement = self._judgements.get(question)
        if judgement is None:
            if len(self._judgements) >= _MOST_REMEMBERED:
                del self._judgements[next(iter(self._judgements))]
            judgement = self._judgements[question] = asyncio.create_task(self._asked(prompt))
        # Other waiters continue where this batch is given up
        grade = await asyncio.shield(judgement)
        if grade.reason == "error":
            self._judgements.pop(question, None)
        return grade

    async def _asked(self, prompt: str) -> Grade:
        async with self._free:
            return await self._tried(prompt)

    async def _tried(self, prompt: str) -> Grade:
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
        }
        failure = ""
        for attempt in range(_TRIES):
            try:
                request = self._client.post("/chat/completions", cast_to=ChatCompletion, body=body)
                answer = await answered(self._config.timeout_s, request)
                reply = final_part(text_of(answer.choices[0].message))
                if verdicts := _VERDICT.findall(reply):
                    return self._grade(verdicts[-1].lower())
                failure = f"a reply without a verdict: {one_line(reply[-200:], 200)}"
            except (OpenAIError, ValueError, RecursionError) as error:
                failure, passing, wait = reason_of_failure(error, self._config.timeout_s)
                if attempt == _TRIES - 1 or (isinstance(error, OpenAIError) and not passing):
                    break
                await asyncio.sleep(
                    min(max(wait, _FIRST_PAUSE * 2**attempt), self._config.timeout_s)
                )
            except (
                AttributeError,
                IndexError,
                TypeError,
            ):  # the library does not check what a server sends
                failure = f"no chat completion: {one_line(str(answer), 200)}"
        return Grade(False, "error", detail=failure)

    def _grade(self, verdict: str) -> Grade:
        score = {"correct": 1.0, "incorrect": 0.0}.get(verdict)
        score = float(verdict.replace(",", ".")) if score is None else score
        if not 0 <= score <= 1:
            return Grade(False, "error", detail=f"score {verdict} is not within 0 and 1")
        return Grade(score > self._correct_above, "scored", score=score)


def filled(prompt: str, problem: str, answer: str, response: str) -> str:
    """Fill in the fields of a prompt in one pass: braces inside a problem or response are left
    alone.

    The response stands between marks that hold a digest of it, so that no response can write the
    closing one, and with a space after whatever opens a special token of a chat template.
    """
    response = _OPENS_SPECIAL_TOKEN.sub(r"\g<0> ", response)
    mark = hashlib.sha256(response.encode(errors="replace")).hexdigest()[:16]
    fields: dict[str, Any] = {"problem": problem, "answer": answer}
    fields["response"] = f"[response {mark}]\n{response}\n[end of response {mark}]"
    return _FIELD.sub(lambda match: fields[match[1]], prompt)

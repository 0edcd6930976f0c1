"""The one way in which a set is evaluated: k responses to each problem, grades on all of them, metrics.

Where responses come from is a Generator's business: a run's own engines, engines started for an evaluation, or an
external server.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.sample import GRADED_BY_AGENT, Prompt, Sample
from vapo_megatron.engines.request import GenerationRequest
from vapo_megatron.evaluation.responses import Response, ResponseLog, response_of
from vapo_megatron.evaluation.sets import ProblemResult, SetResult, problem_results, summarise
from vapo_megatron.rewards.grading import TRUNCATED, case_of, graded_by_its_agent, grades_of
from vapo_megatron.rewards.pool import VerifierPool

OnDone = Callable[[int], None]
"""Is told how many more are done."""

Collect = Callable[[GenerationRequest, OnDone | None, Callable[[list[Sample]], None] | None], list[Sample]]
"""Answers a request; is given who is told of what is done, and of each group."""

Phase = Callable[[str, int], AbstractContextManager[OnDone]]
"""Shows a part of the work, by its name and size."""


class Generator(Protocol):
    """Whatever gives responses to prompts."""

    def generate(
        self, prompts: Sequence[Prompt], k: int, on_group: Callable[[list[Response]], None], on_done: OnDone
    ) -> None:
        """k responses to each prompt: on_group gets those of one prompt together, in order of index, as they come."""


class EngineGenerator:
    """Our own engines, a run's or those of an evaluation.

    Args:
        collect: Dispatcher.collect, or Agents.collect for episodes.
        decode: from token ids to text.
        sampling: how responses are drawn.
        seed: of the responses.
        weight_version: that the engines have.
        reward: from which reward on an episode counts as correct.
    """

    def __init__(
        self,
        collect: Collect,
        decode: Callable[[Sequence[int]], str],
        sampling: SamplingConfig,
        seed: int,
        weight_version: int,
        reward: RewardConfig,
    ) -> None:
        self._collect, self._decode, self._reward = collect, decode, reward
        self._sampling, self._seed, self._weight_version = sampling, seed, weight_version

    def generate(
        self, prompts: Sequence[Prompt], k: int, on_group: Callable[[list[Response]], None], on_done: OnDone
    ) -> None:
        """k responses to each prompt.

        Raises:
            RunFailed, TryAgain: see Dispatcher.collect.
        """

        def keep(samples: list[Sample]) -> None:
            for sample in samples:
                graded_by_its_agent(sample, self._reward)
            on_group([response_of(sample, self._decode) for sample in samples])

        request = GenerationRequest(prompts, k, self._sampling, self._seed, self._weight_version)
        self._collect(request, on_done, keep)


@dataclass(frozen=True)
class Evaluator:
    """Answers and grades sets. reward: the section that says how; phase: shows what goes on."""

    verifier: VerifierPool
    reward: RewardConfig
    phase: Phase = lambda name, total: nullcontext(lambda _: None)

    def answer(
        self, name: str, prompts: Sequence[Prompt], k: int, generator: Generator, log: ResponseLog | None = None
    ) -> list[Response]:
        """k responses to each prompt, not graded yet, in the order of prompts and index.

        Args:
            name: of the set.
            prompts: numbered() ones.
            k: responses to each.
            generator: of the responses.
            log: keeps responses as they come; what it has found of an earlier time is not asked for again.
        """
        groups = {} if log is None else log.complete_groups(k)

        def keep(responses: list[Response]) -> None:
            if log is not None:
                log.append(responses)
            groups[responses[0].id] = responses

        missing = [prompt for prompt in prompts if prompt.id not in groups]
        with self.phase(f"{name}: responses", len(prompts) * k) as on_done:
            on_done((len(prompts) - len(missing)) * k)
            if missing:
                generator.generate(missing, k, keep, on_done)
        return [response for prompt in prompts for response in groups[prompt.id]]

    def conclude(
        self, name: str, prompts: Sequence[Prompt], responses: Sequence[Response], k: int, outputs: Path
    ) -> tuple[SetResult, list[ProblemResult]]:
        """Grade all responses to a set and write them down; the metrics of the set and of its problems.

        A truncated response is not verified: it counts as incorrect.

        Args:
            name: of the set.
            prompts: its problems.
            responses: in the order of answer(), to be filled with their grades.
            k: responses to each problem.
            outputs: where every raw response goes, as jsonl.
        """
        by_id = {prompt.id: prompt for prompt in prompts}
        open_cases = [response for response in responses if not response.grade_reason.startswith(GRADED_BY_AGENT)]
        cases = [case_of(by_id[case.id], case.text, case.truncated, self.reward) for case in open_cases]
        with self.phase(f"{name}: grades", len(cases)) as on_done:
            grades = grades_of(cases, self.verifier, on_done)
        for response, grade in zip(open_cases, grades, strict=True):
            if grade is None:
                response.correct, response.grade_reason, response.extracted = False, TRUNCATED, ""
            else:
                response.correct, response.grade_reason = grade.correct, grade.reason
                response.extracted = grade.extracted
        write_rows(outputs, (response.row(by_id[response.id]) for response in responses))
        problems = problem_results(prompts, responses)
        return summarise(name, problems, k), problems

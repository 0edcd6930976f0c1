"""Evaluates a set: k responses to each problem, a grade for each, and the metrics.

The responses come from a run's own engines, from engines started for an evaluation, or from an
external server.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.config.rollout import SamplingConfig
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.sample import GRADED_BY_AGENT, Prompt, Sample
from vapo_megatron.evaluation.responses import Response, ResponseLog, response_of
from vapo_megatron.evaluation.sets import ProblemResult, SetResult, problem_results, summarise
from vapo_megatron.rewards.grading import TRUNCATED, case_of, graded_by_its_agent, grades_of
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.rollout.request import GenerationRequest

OnDone = Callable[[int], None]
"""Called with the number of responses that have just finished."""

Collect = Callable[
    [GenerationRequest, OnDone | None, Callable[[list[Sample]], None] | None], list[Sample]
]
"""Dispatcher.collect, or Agents.collect for episodes."""

Phase = Callable[[str, int], AbstractContextManager[OnDone]]
"""Shows the progress of a part of the work, given its name and size."""

Generate = Callable[[Sequence[Prompt], int, Callable[[list[Response]], None], OnDone], None]
"""generate(prompts, k, on_group, on_done): on_group gets the k responses to a prompt together, in
order of index."""


def generate_with(
    collect: Collect,
    decode: Callable[[Sequence[int]], str],
    sampling: SamplingConfig,
    seed: int,
    weight_version: int,
    reward: RewardConfig,
) -> Generate:
    """Responses from our own engines, which have the weights of weight_version.

    reward: from which reward an episode counts as correct. The function raises RunFailed and
        TryAgain as
    Dispatcher.collect does.
    """

    def generate(
        prompts: Sequence[Prompt],
        k: int,
        on_group: Callable[[list[Response]], None],
        on_done: OnDone,
    ) -> None:
        def keep(samples: list[Sample]) -> None:
            for sample in samples:
                graded_by_its_agent(sample, reward)
            on_group([response_of(sample, decode) for sample in samples])

        collect(GenerationRequest(prompts, k, sampling, seed, weight_version), on_done, keep)

    return generate


@dataclass(frozen=True)
class Evaluator:
    """Answers and grades sets.

    reward: the config section of the verifier; phase: shows progress; optional: entered, with the
        name of a file, while
    it is written.
    """

    verifier: VerifierPool
    reward: RewardConfig
    phase: Phase = lambda name, total: nullcontext(lambda _: None)
    optional: Callable[[str], AbstractContextManager[object]] = nullcontext

    def answer(
        self,
        name: str,
        prompts: Sequence[Prompt],
        k: int,
        generate: Generate | None,
        log: ResponseLog | None = None,
    ) -> list[Response]:
        """k responses to each of the numbered() prompts of a set, not graded yet, in order of
        prompt and index.

        log keeps responses as they come; those that it holds already are not generated again.
        generate may be None where it holds all of them.
        """
        groups = {} if log is None else log.groups

        def keep(responses: list[Response]) -> None:
            groups[responses[0].id] = responses
            if log is not None:
                log.append(responses)

        missing = [prompt for prompt in prompts if prompt.id not in groups]
        with self.phase(f"{name}: responses", len(prompts) * k) as on_done:
            on_done((len(prompts) - len(missing)) * k)
            if missing:
                assert generate is not None
                generate(missing, k, keep, on_done)
        return [response for prompt in prompts for response in groups[prompt.id]]

    def conclude(
        self,
        name: str,
        prompts: Sequence[Prompt],
        responses: Sequence[Response],
        k: int,
        outputs: Path,
    ) -> tuple[SetResult, list[ProblemResult]]:
        """Grade the responses to a set and write them to the file `outputs`; the metrics of the set
        and its problems.

        responses: as answer() returns them, whose grades are filled in. A truncated response is not
            verified:
        it counts as incorrect.
        """
        by_id = {prompt.id: prompt for prompt in prompts}
        ungraded = [
            response
            for response in responses
            if not response.grade_reason.startswith(GRADED_BY_AGENT)
        ]
        cases = [
            case_of(by_id[case.id], case.text, case.truncated, self.reward) for case in ungraded
        ]
        with self.phase(f"{name}: grades", len(cases)) as on_done:
            grades = grades_of(cases, self.verifier, on_done)
        for response, grade in zip(ungraded, grades, strict=True):
            if grade is None:
                response.correct = False
                response.grade_reason = TRUNCATED
                response.extracted = ""
            else:
                response.correct = grade.correct
                response.grade_reason = grade.reason
                response.extracted = grade.extracted
        with self.optional(outputs.name):
            write_rows(outputs, (response.row(by_id[response.id]) for response in responses))
        problems = problem_results(prompts, responses)
        return summarise(name, problems, k), problems

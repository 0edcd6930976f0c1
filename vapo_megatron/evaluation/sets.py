"""The metrics of a problem and of a set, from k responses to each problem."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vapo_megatron.data.sample import Prompt
from vapo_megatron.evaluation.metrics import Interval, bootstrap_interval, maj_at_k, pass_at_k
from vapo_megatron.evaluation.responses import Response
from vapo_megatron.monitoring import names
from vapo_megatron.monitoring.pictures import Intervals
from vapo_megatron.rewards.grading import TRUNCATED
from vapo_megatron.rewards.normal_form import compact, normal_form, plain_number

# Grades of responses that hold no answer.
_NO_ANSWER = (TRUNCATED, "no_answer")


@dataclass(frozen=True)
class ProblemResult:
    """The metrics of one problem.

    digest tells it from another problem with the same id; majority is the answer with the most
    votes (on a tie the one that came first), None where none was read out. If the verifier reads
    out none, each response counts as a different answer, and maj_at_k the share of correct ones.
    """

    id: str
    digest: str
    answer: str
    samples: int
    correct: int
    majority: str | None
    maj_at_k: float
    response_length: float
    truncated: int


@dataclass(frozen=True)
class SetResult:
    """The metrics of one set; shares in [0, 1], lengths in tokens.

    low and high are the 95 % confidence interval of avg@k (bootstrap over problems). pass_at holds
    the unbiased pass@j for j = 1, 2, 4, ... and k.
    """

    name: str
    problems: int
    samples: int
    avg_at_k: float
    low: float
    high: float
    pass_at_k: float
    pass_at_k_interval: Interval
    pass_at: dict[int, float]
    maj_at_k: float
    maj_at_k_interval: Interval
    response_length: float
    truncated: float

    def metrics(self) -> dict[str, float]:
        """The metrics for a step's row."""
        prefix = f"{names.EVALUATION}{self.name}_"
        average = f"{prefix}avg@{self.samples}"
        low, high = names.interval_of(average)
        return {
            average: self.avg_at_k,
            low: self.low,
            high: self.high,
            f"{prefix}pass@{self.samples}": self.pass_at_k,
            f"{prefix}maj@{self.samples}": self.maj_at_k,
            f"{prefix}response_length": self.response_length,
            f"{prefix}truncated": self.truncated,
        }

    def line(self, when: str) -> str:
        """A line for the console."""
        return (
            f"{when}: {self.name} avg@{self.samples} {self.avg_at_k:.3f} [{self.low:.3f}, "
            f"{self.high:.3f}], pass@{self.samples} {self.pass_at_k:.3f}, maj@{self.samples} "
            f"{self.maj_at_k:.3f} on {self.problems} problems"
        )


def intervals_of(sets: Sequence[Mapping[str, Any]]) -> Intervals:
    """A picture of sets' results, as evaluation.json has them: avg@k and pass@k with intervals."""
    rows = []
    for entry in sets:
        name, k = entry["name"], entry["samples"]
        rows.append((f"{name} avg@{k}", entry["low"], entry["avg_at_k"], entry["high"]))
        if entry.get("pass_at_k_interval") and k > 1:
            low, high = entry["pass_at_k_interval"]
            rows.append((f"{name} pass@{k}", low, entry["pass_at_k"], high))
    return Intervals("Shares of correct responses, 95 % intervals", rows, 0.0, 1.0)


def numbered(name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a set, each with its place as cursor, from which the seeds of its responses
    follow."""
    return [replace(prompt, cursor=place, source=name) for place, prompt in enumerate(prompts)]


def problem_results(
    prompts: Sequence[Prompt], responses: Sequence[Response]
) -> list[ProblemResult]:
    """The metrics of each problem, from responses in the order of prompts, as many to each."""
    k = len(responses) // len(prompts)
    groups = [responses[i : i + k] for i in range(0, len(responses), k)]
    return [_problem(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]


def summarise(name: str, problems: Sequence[ProblemResult], k: int) -> SetResult:
    """The metrics of a set, from its problems' results."""
    shares = [problem.correct / k for problem in problems]
    solved = [pass_at_k(k, problem.correct, k) for problem in problems]
    votes = [problem.maj_at_k for problem in problems]
    sizes = sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})
    interval = bootstrap_interval(shares)
    count = len(problems)
    return SetResult(
        name=name,
        problems=count,
        samples=k,
        avg_at_k=sum(shares) / count,
        low=interval.low,
        high=interval.high,
        pass_at_k=sum(solved) / count,
        pass_at_k_interval=bootstrap_interval(solved),
        pass_at={
            j: sum(pass_at_k(k, problem.correct, j) for problem in problems) / count for j in sizes
        },
        maj_at_k=sum(votes) / count,
        maj_at_k_interval=bootstrap_interval(votes),
        response_length=sum(problem.response_length for problem in problems) / count,
        truncated=sum(problem.truncated for problem in problems) / (count * k),
    )


def _vote(extracted: str) -> str | None:
    """One text for answers that differ in typesetting only; None where there is no answer."""
    text = normal_form(extracted)
    number = plain_number(text)
    if number is not None and number.base is None:
        return str(number.value)
    return compact(text) or None


def _votes(prompt: Prompt, group: Sequence[Response]) -> list[str | None]:
    """The vote of each response to a problem; None where it has none."""
    if any(response.extracted for response in group):
        # All correct answers vote as one, wrong ones by their extracted answer.
        return [
            prompt.answer if response.correct else _vote(response.extracted) for response in group
        ]
    # A function, a judge, tests of code and an agent read out no answer that could be compared: if
    # their correct responses voted as one and no other did, maj@k would be pass@k.
    return [
        None if response.grade_reason in _NO_ANSWER else str(place)
        for place, response in enumerate(group)
    ]


def digest_of(problem: str, answer: str) -> str:
    """Fingerprint of a problem."""
    return hashlib.sha256(json.dumps([problem, answer]).encode()).hexdigest()[:16]


def _problem(prompt: Prompt, group: Sequence[Response]) -> ProblemResult:
    votes = _votes(prompt, group)
    counted = Counter(vote for vote in votes if vote is not None)
    is_read = any(response.extracted for response in group)
    return ProblemResult(
        id=prompt.id,
        digest=digest_of(prompt.problem, prompt.answer),
        answer=prompt.answer,
        samples=len(group),
        correct=sum(response.correct for response in group),
        majority=counted.most_common(1)[0][0] if counted and is_read else None,
        maj_at_k=maj_at_k(votes, [response.correct for response in group]),
        response_length=sum(response.tokens for response in group) / len(group),
        truncated=sum(response.truncated for response in group),
    )

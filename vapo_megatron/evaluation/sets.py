"""Answering one evaluation set: k responses to each problem, and what they say of the model."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vapo_megatron.evaluation.metrics import avg_at_k, bootstrap_interval, maj_at_k, pass_at_k
from vapo_megatron.experience.jsonl import write_rows
from vapo_megatron.experience.sample import Prompt, Sample

Collect = Callable[[Sequence[Prompt], int], list[Sample]]
Grade = Callable[[Sequence[Sample]], None]


@dataclass(frozen=True)
class SetResult:
    """The figures of one set; shares in [0, 1], lengths in tokens. low and high bound avg@k with 95 % confidence."""

    name: str
    problems: int
    samples: int
    avg_at_k: float
    low: float
    high: float
    pass_at_k: float
    maj_at_k: float
    response_length: float
    truncated: float

    def figures(self) -> dict[str, float]:
        """As metrics of a run."""
        prefix = f"evaluation/{self.name}_"
        return {
            f"{prefix}avg@{self.samples}": self.avg_at_k,
            f"{prefix}pass@{self.samples}": self.pass_at_k,
            f"{prefix}maj@{self.samples}": self.maj_at_k,
            f"{prefix}response_length": self.response_length,
            f"{prefix}truncated": self.truncated,
        }

    def line(self, when: str) -> str:
        """For people."""
        return (
            f"{when}: {self.name} avg@{self.samples} {self.avg_at_k:.3f} [{self.low:.3f}, {self.high:.3f}], "
            f"pass@{self.samples} {self.pass_at_k:.3f}, maj@{self.samples} {self.maj_at_k:.3f} "
            f"on {self.problems} problems"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def answer_set(
    name: str, prompts: Sequence[Prompt], k: int, collect: Collect, grade: Grade, outputs: Path | None = None
) -> SetResult:
    """k graded responses to each prompt.

    Args:
        name: of the set.
        prompts: its problems.
        k: responses to each.
        collect: from prompts and k to samples in the order of prompt and index.
        grade: fills text, correct and verdict of samples.
        outputs: where every raw response goes, as jsonl; None keeps none.
    """
    numbered = [Prompt(p.id, p.problem, p.answer, p.token_ids, cursor=i, source=name) for i, p in enumerate(prompts)]
    samples = collect(numbered, k)
    grade(samples)
    if outputs is not None:
        write_rows(outputs, map(_row, samples))
    groups = [samples[i : i + k] for i in range(0, len(samples), k)]
    correct = [[bool(s.correct) for s in group] for group in groups]
    shares = [sum(row) / len(row) for row in correct]
    interval = bootstrap_interval(shares)
    lengths = [len(s.response_ids) for s in samples]
    return SetResult(
        name=name,
        problems=len(groups),
        samples=k,
        avg_at_k=avg_at_k(correct),
        low=interval.low,
        high=interval.high,
        pass_at_k=sum(pass_at_k(k, sum(row), k) for row in correct) / len(correct),
        maj_at_k=sum(maj_at_k([_answer(s) for s in g], row) for g, row in zip(groups, correct, strict=True))
        / len(groups),
        response_length=sum(lengths) / len(lengths),
        truncated=sum(s.truncated for s in samples) / len(samples),
    )


def _answer(sample: Sample) -> str | None:
    """What a sample votes for: all correct answers are one, others count by what was read out of them."""
    if sample.correct:
        return sample.prompt.answer
    return sample.extracted or None


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.prompt.id,
        "index": sample.index,
        "problem": sample.prompt.problem,
        "answer": sample.prompt.answer,
        "response": sample.text,
        "extracted": sample.extracted,
        "correct": sample.correct,
        "verdict": sample.verdict,
        "tokens": len(sample.response_ids),
        "finish_reason": sample.finish_reason,
        "weight_version": sample.weight_version,
    }

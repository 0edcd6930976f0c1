"""Responses of a run, kept for people to read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.experience.jsonl import write_rows
from vapo_megatron.experience.sample import Sample


class SampleWriter:
    """Keeps the first groups of every step in run_dir/samples/step_000012.jsonl, one sample per line."""

    def __init__(self, run_dir: Path, groups_per_step: int) -> None:
        """groups_per_step 0 keeps nothing."""
        self._folder = run_dir / "samples"
        self._groups = groups_per_step

    def write(self, step: int, samples: Sequence[Sample]) -> Path | None:
        """Write the samples of the step's first groups, in the order of group and index; the file, or None if none.

        Raises BadInput where the file cannot be written; it is whole or not there.
        """
        kept = set(sorted({sample.group for sample in samples})[: self._groups])
        if not kept:
            return None
        path = self._folder / f"step_{step:06d}.jsonl"
        chosen = sorted((s for s in samples if s.group in kept), key=lambda sample: (sample.group, sample.index))
        write_rows(path, map(_row, chosen))
        return path


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "prompt_id": sample.prompt.id,
        "group": sample.group,
        "index": sample.index,
        "problem": sample.prompt.problem,
        "answer": sample.prompt.answer,
        "response": sample.text,
        "tokens": len(sample.response_ids),
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
        "correct": sample.correct,
        "grade_reason": sample.grade_reason,
        "weight_version": sample.weight_version,
    }

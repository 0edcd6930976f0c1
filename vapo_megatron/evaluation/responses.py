"""Responses of an evaluated model, wherever they came from, and the file that keeps them as they
arrive."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo_megatron.data.jsonl import read_rows, write_rows
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput


@dataclass(slots=True)
class Response:
    """A response to the problem with this id.

    Attributes:
        tokens: its length.
        weight_version: None where an external server made it.
        episode: the whole text of an agent's episode, whose last message is `text`.
        response_ids: its tokens; None for external servers and for episodes.
        origin: fingerprint of the model, problems and sampling that it came from; empty within a
            training run.
    """

    id: str
    index: int
    text: str
    tokens: int
    finish_reason: str
    weight_version: int | None = None
    correct: bool = False
    grade_reason: str = ""
    extracted: str = ""
    episode: str = ""
    response_ids: list[int] | None = None
    origin: str = ""

    @property
    def truncated(self) -> bool:
        """Whether it was cut off at the token limit."""
        return self.finish_reason == "length"

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """The row of evaluation/<set>.jsonl."""
        optional: dict[str, Any] = {}
        if self.episode:
            optional["episode"] = self.episode
        if self.response_ids:
            optional["prompt_ids"] = list(prompt.token_ids)
            optional["response_ids"] = self.response_ids
        if self.origin:
            optional["origin"] = self.origin
        return {
            "id": self.id,
            "index": self.index,
            "problem": prompt.problem,
            "answer": prompt.answer,
            "response": self.text,
            "extracted": self.extracted,
            "correct": self.correct,
            "grade_reason": self.grade_reason,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "weight_version": self.weight_version,
            **optional,
        }


def response_of(sample: Sample, decode: Callable[[Sequence[int]], str]) -> Response:
    """The response of a sample from our own engines, graded only if its agent graded it."""
    return Response(
        id=sample.prompt.id,
        index=sample.index,
        text=decode(sample.last_turn.tolist()),
        tokens=int(sample.written.sum()),
        finish_reason=sample.finish_reason,
        weight_version=sample.weight_version,
        correct=bool(sample.correct),
        grade_reason=sample.grade_reason,
        episode="" if sample.loss_mask is None else decode(sample.response_ids.tolist()),
        response_ids=sample.response_ids.tolist() or None if sample.loss_mask is None else None,
    )


def read_responses(path: Path) -> list[Response]:
    """The responses in a file of Response.row(); a last line that was cut short is left out.

    Raises:
        BadInput: a line is something else.
    """
    responses = []
    for number, row in read_rows(path, may_be_cut=True):
        fields = {name: row[name] for name in Response.__dataclass_fields__ if name in row}
        try:
            responses.append(Response(text=row["response"], **fields))
        except (KeyError, TypeError):
            raise BadInput(
                f"{path}:{number}: not a response: remove the file to answer again"
            ) from None
    return responses


def complete_groups(path: Path, k: int, origin: str) -> dict[str, list[Response]]:
    """The responses in a file to each problem that has all k of them, if there is such a file.

    Raises:
        BadInput: they have another origin, or the file cannot be read.
    """
    if not path.exists():
        return {}
    groups: dict[str, list[Response]] = {}
    for response in read_responses(path):
        if response.origin != origin:
            raise BadInput(
                f"{path}: its responses come from another model, other problems, other sampling or "
                "other rollout.server_args: give the config that they were made with, or another "
                "run.name, or run.overwrite=true"
            )
        groups.setdefault(response.id, []).append(response)
    return {name: group[:k] for name, group in groups.items() if len(group) >= k}


class ResponseLog:
    """The responses to one set in evaluation/<set>.jsonl, which an interrupted evaluation continues
    from.

    `groups` holds the responses to each problem that has all k of them, in order of index.
    Incomplete groups are dropped and answered again.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], k: int, origin: str) -> None:
        """Raises BadInput where the file's responses have another origin, or it cannot be read or
        written."""
        self.path = path
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._origin = origin
        self.groups = complete_groups(path, k, origin)
        # Rewritten, so that nothing is ever appended to a broken line.
        write_rows(
            path, (self._row(response) for group in self.groups.values() for response in group)
        )

    def append(self, group: list[Response]) -> None:
        """Keep the responses to a problem."""
        self.groups[group[0].id] = group
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps(self._row(response), ensure_ascii=False) + "\n" for response in group
            )

    def _row(self, response: Response) -> dict[str, Any]:
        response.origin = self._origin
        return response.row(self._prompts[response.id])

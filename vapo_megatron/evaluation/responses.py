"""One answer of a model under evaluation, wherever it came from, and the file that keeps all of them as they come."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.data.sample import Prompt, Sample
from vapo_megatron.errors import BadInput


@dataclass(slots=True)
class Response:
    """A response to the problem of this id.

    Attributes:
        tokens: its length.
        weight_version: None where an external server made it.
        episode: all that was said in an agent's episode, whose last message is the text.
        response_ids: its tokens; None where an external server made it, or an episode's.
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

    @property
    def truncated(self) -> bool:
        """Whether it ended for want of room rather than by its own end token."""
        return self.finish_reason == "length"

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """For the file of raw outputs."""
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
            **({"episode": self.episode} if self.episode else {}),
            **({"prompt_ids": list(prompt.token_ids), "response_ids": self.response_ids} if self.response_ids else {}),
        }


def response_of(sample: Sample, decode: Callable[[Sequence[int]], str]) -> Response:
    """A sample of our own engines, not graded yet, unless its agent did."""
    return Response(
        id=sample.prompt.id,
        index=sample.index,
        text=decode(sample.last_turn.tolist()),
        tokens=len(sample.response_ids) if sample.loss_mask is None else int(sample.loss_mask.sum()),
        finish_reason=sample.finish_reason,
        weight_version=sample.weight_version,
        correct=bool(sample.correct),
        grade_reason=sample.grade_reason,
        episode="" if sample.loss_mask is None else decode(sample.response_ids.tolist()),
        response_ids=sample.response_ids.tolist() or None if sample.loss_mask is None else None,
    )


def read_outputs(path: Path) -> list[Response]:
    """The responses of a file that Response.row wrote.

    Raises:
        BadInput: it is no such file.
    """
    responses = []
    for number, row in read_rows(path):
        row["text"] = row.pop("response", None)
        try:
            names = Response.__dataclass_fields__.keys() - {"episode", "response_ids"}
            more = {"episode": row.get("episode", ""), "response_ids": row.get("response_ids")}
            responses.append(Response(**{name: row[name] for name in names}, **more))
        except KeyError as error:
            raise BadInput(f"{path}:{number}: no field {error}: remove the file to answer again") from None
    return responses


class ResponseLog:
    """Responses on their way: appended as they come, found again by an evaluation that goes on.

    The first line says what the responses belong to. A last line that was cut short is left out, and so is whatever a
    group lacks to k responses; both are answered again.
    """

    def __init__(self, path: Path, origin: str) -> None:
        """origin: of the responses, a fingerprint of model, problems and sampling.

        Raises:
            BadInput: the file exists and its responses are of another origin, or it cannot be written.
        """
        self._path = path
        self._found: list[Response] = []
        if path.exists():
            self._found = self._read(origin)
        # Rewritten, so that nothing is ever appended to a broken line.
        with atomic_write(path) as file:
            file.write(json.dumps({"origin": origin}) + "\n")
            file.writelines(_line(response) for response in self._found)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def complete_groups(self, k: int) -> dict[str, list[Response]]:
        """Problems with k responses from an earlier time, these in the order of their index."""
        groups: dict[str, dict[int, Response]] = {}
        for response in self._found:
            groups.setdefault(response.id, {})[response.index] = response
        return {
            name: [group[index] for index in range(k)] for name, group in groups.items() if set(range(k)) <= set(group)
        }

    def append(self, responses: Iterable[Response]) -> None:
        """Keep some more."""
        self._file.writelines(_line(response) for response in responses)
        self._file.flush()

    def __enter__(self) -> "ResponseLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, origin: str) -> list[Response]:
        responses: list[Response] = []
        lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
        head = _decoded(lines[0])
        if head is not None and head.get("origin") != origin:
            raise BadInput(
                f"{self._path}: its responses come from another model, other problems or other sampling: give the "
                "config that they were made with, another run.name, or run.overwrite=true"
            )
        for line in lines[1:] if head is not None else ():
            row = _decoded(line)
            if row is None:
                break
            try:
                responses.append(Response(**row))
            except TypeError:
                raise BadInput(f"{self._path}: not written by this version: remove it to answer again") from None
        return responses


def _line(response: Response) -> str:
    return json.dumps(asdict(response), ensure_ascii=False) + "\n"


def _decoded(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None

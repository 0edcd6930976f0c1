"""Problems from files: rows of .jsonl, .jsonl.gz, .csv or .parquet, checked one by one."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from vapo_megatron.config.data import DataConfig, EvalSet, FieldNames
from vapo_megatron.config.hub import HUB, hub_files, hub_hint
from vapo_megatron.config.verifiers import VERIFIERS
from vapo_megatron.data.jsonl import check_characters, no_such_file, read_rows, unambiguous
from vapo_megatron.data.messages import Message, answer_of, messages_of, problem_of
from vapo_megatron.data.reference_answers import NoAnswer, reference_answer
from vapo_megatron.errors import BadInput, reason_of
from vapo_megatron.files import parse_json

# Field in which prepare-data writes the verifier of a row; another name is data.fields.verifier.
_VERIFIER = "verifier"
_OF_OTHERS = (
    "; vapo-megatron prepare-data turns the rows of verl, MATH, GSM8K and others into "
    "{id, problem, answer}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its reference answer.

    Attributes:
        place: "file:line" for messages.
        source: its file.
        extra: for functions.
        reward: what the row has other than section reward, as JSON.
        privileged: what the critic alone reads.
        before: messages before the problem.
    """

    id: str
    problem: str
    answer: str
    place: str
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    reward: str = ""
    privileged: str = ""
    before: tuple[Message, ...] = ()


def train_problems(data: DataConfig, privileged: str | None = None) -> list[Problem]:
    """The problems of data.train; see read_problems. If files have weights, ids and sources begin
    with the file."""
    problems: list[Problem] = []
    for path in data.train_files:
        rows = read_problems(
            path, data.fields_of(path), None, "data.train", data.reward_of(path), privileged
        )
        if data.weights:
            rows = [replace(row, id=f"{path}:{row.id}", source=str(path)) for row in rows]
        problems += rows
    return problems


def eval_problems(
    entry: EvalSet, fields: FieldNames, privileged: str | None = None
) -> list[Problem]:
    """The problems of one set of data.eval; see read_problems."""
    fields = FieldNames.model_validate(fields.model_dump() | entry.fields)
    return read_problems(
        entry.path, fields, entry.limit, f"data.eval (set {entry.name})", None, privileged
    )


def read_problems(
    path: Path,
    fields: FieldNames,
    limit: int | None = None,
    key: str = "",
    reward: Mapping[str, Any] | None = None,
    privileged: str | None = None,
) -> list[Problem]:
    """The problems of a file in its order, the first `limit` of them if given; key: the config key
    that names the file; reward: the file's own keys of section reward; privileged:
    critic.privileged_field, where it is read.

    Raises BadInput naming file, line and field for a missing or unreadable file, a file without
    rows, a row without problem, answer, a field of fields.extra or the privileged one, and an id
    that comes twice.
    """
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for number, row in read_file(path, key):
        if limit is not None and len(problems) == limit:
            break
        place = f"{path}:{number}"
        name = (
            _text(row, fields.id, place)
            if row.get(fields.id) is not None
            else f"{path.name}:{number}"
        )
        if name in places:
            raise BadInput(
                f"{place}: field {fields.id}={name} is also the id of {places[name]}; make the ids "
                "differ"
            )
        places[name] = place
        if isinstance(row.get(fields.problem), int | float):
            raise BadInput(
                f"{place}: field {fields.problem} is the number {row[fields.problem]}; expected a "
                "text"
            )
        problem, before = _problem(row, fields.problem, place)
        answer = _answer(row, fields.answer, place)
        extra = chosen_fields(row, fields.extra, place)
        changes = dict(reward or {})
        if fields.verifier is not None and row.get(fields.verifier) is not None:
            changes["verifier"] = row[fields.verifier]
            if changes["verifier"] not in VERIFIERS:
                raise BadInput(
                    f"{place}: field {fields.verifier}={changes['verifier']!r}: expected one of "
                    f"{', '.join(VERIFIERS)}"
                )
        elif fields.verifier is None and row.get(_VERIFIER) in VERIFIERS:
            changes["verifier"] = row[_VERIFIER]
        of_row = json.dumps(changes, sort_keys=True) if changes else ""
        text = privileged_text(row, privileged, place)
        problems.append(
            Problem(name, problem, answer, place, path.name, extra, of_row, text, before)
        )
    if not problems:
        raise BadInput(
            f"{path}: holds no rows; give at least one with the fields {fields.problem} and "
            f"{fields.answer}"
        )
    return problems


def read_file(path: Path, key: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of a .jsonl, .jsonl.gz, .csv or .parquet file, or a .json
    file with a list of rows. Rows of a .json file that are lists, as Open-Reasoner-Zero's are, get
    the one field conversation.

    A path that begins with hub: names a data set of the Hugging Face Hub (config.hub).

    Raises BadInput, naming the file and where it can the line, for one that is missing, unreadable
    or of another kind.
    """
    if str(path).startswith(HUB):
        rows = chain.from_iterable(read_file(file, key) for file in hub_files(str(path), key))
        yield from enumerate((row for _, row in rows), start=1)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path, key)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from read_rows(path, key)
    elif path.suffix == ".csv":
        yield from _csv_rows(path, key)
    elif path.suffix == ".json":
        yield from _list_rows(path, key)
    else:
        raise BadInput(
            f"{path}: unknown kind of file {path.suffix!r}; give a .jsonl, .jsonl.gz, .json, .csv "
            f"or .parquet file{hub_hint(path)}"
        )


def _list_rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unambiguous)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except FileNotFoundError:
        raise no_such_file(path, key) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read as JSON ({' '.join(str(error).split())})") from None
    if isinstance(rows, list):
        rows = [{"conversation": row} if _is_conversation(row) else row for row in rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadInput(f"{path}: expected a list of objects such as [{{...}}, {{...}}]")
    for number, row in enumerate(rows, start=1):
        check_characters(row, f"{path}:{number}")
        yield number, row


def _is_conversation(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(isinstance(entry, dict) for entry in row)


def _csv_rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), start=1):
                if None in row or None in row.values():
                    raise BadInput(f"{path}:{number}: has another number of fields than the header")
                check_characters(row, f"{path}:{number}")
                yield number, dict(row)
    except FileNotFoundError:
        raise no_such_file(path, key) from None
    except (OSError, ValueError, csv.Error) as error:
        raise BadInput(f"{path}: cannot be read as CSV ({' '.join(str(error).split())})") from None


def _parquet_rows(path: Path, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow  # not for those who have no such file
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except FileNotFoundError:
        raise no_such_file(path, key) from None
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise BadInput(
            f"{path}: cannot be read ({reason_of(error)}); give a valid .parquet file"
        ) from None


def privileged_text(row: Mapping[str, Any], name: str | None, place: str) -> str:
    """What the critic alone reads of a row (critic.privileged_field): a text as it is, anything
    else as JSON. Empty without a name. Raises BadInput for a field that is not there, is empty, or
    that JSON cannot hold."""
    if name is None:
        return ""
    value = chosen_fields(row, (name,), place, "critic.privileged_field")[name]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if value is None or not text.strip():
        raise BadInput(
            f"{place}: field {name} of critic.privileged_field is empty; fill it or remove the row"
        )
    return text


def chosen_fields(
    row: Mapping[str, Any], names: Sequence[str], place: str, key: str = "data.fields.extra"
) -> dict[str, Any]:
    """Those fields of a row. Raises BadInput for one that is not there, or that JSON cannot hold.
    key: names them."""
    for name in names:
        if name not in row:
            raise BadInput(
                f"{place}: no field {name!r} among {', '.join(sorted(row)) or 'none'}; name one of "
                f"those in {key} (vapo-megatron prepare-data: --keep)"
            )
        try:
            json.dumps(row[name], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"{place}: field {name} cannot be written as JSON ({reason_of(error)}): leave it "
                "out, or make it a text"
            ) from None
    return {name: row[name] for name in names}


def _problem(row: dict[str, Any], name: str, place: str) -> tuple[str, tuple[Message, ...]]:
    """The problem's text, and the messages before it where the field holds a conversation."""
    try:
        messages = messages_of(row.get(name))
        if messages is None:
            return _text(row, name, place), ()
        text, before = problem_of(messages)
    except ValueError as error:
        raise BadInput(f"{place}: field {name} has {error}") from None
    return _text({name: text}, name, place), before


def _answer(row: dict[str, Any], name: str, place: str) -> str:
    """The reference answer: also of a list, an object, or JSON in a text, as others write it."""
    try:
        messages = messages_of(row.get(name))
        value = row.get(name) if messages is None else answer_of(messages)
        if isinstance(value, str | list | dict):
            answer, _ = reference_answer(value)
            return _text({name: "" if answer is None else answer}, name, place)
    except NoAnswer:  # prepare-data leaves it out; here it is what the row says
        pass
    except (ValueError, TypeError, LookupError) as error:
        raise BadInput(f"{place}: field {name}: {error}") from None
    return _text(row, name, place)


def _text(row: dict[str, Any], name: str, place: str) -> str:
    if name not in row:
        raise BadInput(
            f"{place}: no field {name!r} among {', '.join(sorted(row)) or 'none'}; add it, or name "
            "the right field in data.fields (of an evaluation set alone: in its own fields)"
            f"{_OF_OTHERS}"
        )
    value = row[name]
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(
            f"{place}: field {name} is {value}; expected a text or a number, fill it or remove the "
            "row"
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise BadInput(
            f"{place}: field {name} is {type(value).__name__}; expected a text or a "
            f"number{_OF_OTHERS}"
        )
    if not value.strip():
        raise BadInput(f"{place}: field {name} is empty; fill it or remove the row")
    return value

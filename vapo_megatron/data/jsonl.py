"""JSON lines: errors name file and line, and files are written completely or not at all."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vapo_megatron.config.hub import hub_hint
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write


def read_rows(
    path: Path, key: str = "", may_be_cut: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, row) of a .jsonl or .jsonl.gz file; blank lines are skipped.

    key: the config key that names the file. may_be_cut: a last line that does not end is skipped.

    Raises BadInput, naming file and line, for a missing or unreadable file and for a line that is
    not a JSON object.
    """
    line_number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line_number, line in enumerate(lines, start=1):
                if may_be_cut and not line.endswith(b"\n"):
                    return
                # Some editors put a mark of the encoding before the first line.
                text = line.decode("utf-8-sig" if line_number == 1 else "utf-8")
                if text.strip():
                    yield line_number, _row(path, line_number, text)
    except FileNotFoundError:
        raise no_such_file(path, key) from None
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}:{line_number}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(
            f"{path}: cannot be read ({error}); give a readable .jsonl or .jsonl.gz file"
        ) from None


def no_such_file(path: Path, key: str = "") -> BadInput:
    """The error for a missing file; key: the config key that names it."""
    named = f", which {key} names" if key else ""
    return BadInput(
        f"{path}: no such file{named}; give the path of an existing one{hub_hint(path)}"
    )


def _row(path: Path, line_number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=unambiguous)
    except BadInput as error:
        raise BadInput(f"{path}:{line_number}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise BadInput(
            f"{path}:{line_number}: not JSON ({reason}); expected one JSON object a line"
        ) from None
    if not isinstance(row, dict):
        raise BadInput(
            f"{path}:{line_number}: a JSON {type(row).__name__}; expected an object such as {{...}}"
        )
    if "\\u" in line:
        check_characters(row, f"{path}:{line_number}")
    return row


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for json.loads. Raises BadInput for a repeated name, of which JSON would keep
    only the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"field {twice} comes twice in one object; remove one of them")
    return made


def check_characters(row: Mapping[str, Any], place: str) -> None:
    """Raises BadInput for half of a pair of surrogates, which JSON can hold and no file of text
    can."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        character = f"\\u{ord(error.object[error.start]):04x}"
        raise BadInput(
            f"{place}: holds {character}, half of a character (a lone surrogate); fix or remove "
            "the row"
        ) from None


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to path, whole or not at all (atomic_write)."""
    with atomic_write(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

"""Token ids of prompts: encoded many at a time, and kept in the user's cache folder, so that the
next start of a run with the same problems, tokenizer and template reads them there."""

import hashlib
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import orjson
from numpy.typing import NDArray

from vapo_megatron.data.rows import Problem
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.files import CannotWrite, atomic_write

_logger = logging.getLogger(__name__)

# Fewer problems are tokenized in less than a second or two, and are not kept.
KEPT_FROM = 20_000
# Files in the folder, the newest; a million prompts of 200 tokens take 0.8 GB.
_MOST_FILES = 4
_AT_ONCE = 1000

TokenIds = list[tuple[int, ...]]


def prompt_token_ids(
    problems: Sequence[Problem], tokenizer: TextTokenizer
) -> tuple[TokenIds, TokenIds]:
    """The prompt of each problem, and what the critic alone reads, as token ids.

    Raises:
        BadInput: a problem that the template cannot show.
    """
    if len(problems) < KEPT_FROM or not tokenizer.renders_alike:
        return _encoded(problems, tokenizer)
    path = _folder() / f"{_digest(problems, tokenizer)}.npz"
    kept = _read(path, len(problems), tokenizer.size)
    if kept is None:
        kept = _encoded(problems, tokenizer)
        _write(path, kept)
    return kept


def _encoded(problems: Sequence[Problem], tokenizer: TextTokenizer) -> tuple[TokenIds, TokenIds]:
    prompts: TokenIds = []
    privileged: TokenIds = []
    for start in range(0, len(problems), _AT_ONCE):
        part = problems[start : start + _AT_ONCE]
        prompts += tokenizer.encode_prompts(list(_texts(part, tokenizer)))
        privileged += [tokenizer.encode_privileged(problem.privileged) for problem in part]
    return prompts, privileged


def _texts(problems: Sequence[Problem], tokenizer: TextTokenizer) -> Iterator[str]:
    for problem in problems:
        try:
            yield tokenizer.prompt_text(problem.problem, problem.before)
        except ValueError as error:
            raise BadInput(f"{problem.place}: {error}") from None


def _folder() -> Path:
    """$XDG_CACHE_HOME/vapo-megatron/prompts, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vapo-megatron" / "prompts"


def _digest(problems: Sequence[Problem], tokenizer: TextTokenizer) -> str:
    """Of all that token ids depend on: what the problems say, the tokenizer's files, the template,
    and the libraries that apply them."""
    digest = hashlib.sha256(tokenizer.digest().encode())
    for library in ("transformers", "tokenizers", "jinja2"):
        digest.update(f"{library} {version(library)}\n".encode())
    for problem in problems:
        said = [problem.problem, problem.privileged, [dict(message) for message in problem.before]]
        digest.update(orjson.dumps(said, option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


def _read(path: Path, count: int, words: int) -> tuple[TokenIds, TokenIds] | None:
    """What a file holds; None where there is none, or none that can be used."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = [
                _cut(file[f"{name}_ids"], file[f"{name}_lengths"], count, words)
                for name in ("prompt", "privileged")
            ]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        _logger.warning("%s: not used, and written again: %s", path, error)
        return None
    return found[0], found[1]


def _cut(ids: NDArray[np.int32], lengths: NDArray[np.int64], count: int, words: int) -> TokenIds:
    if len(lengths) != count or (lengths < 0).any() or lengths.sum() != len(ids):
        raise ValueError(f"it has other lengths than {count} prompts")
    if len(ids) and not 0 <= ids.min() <= ids.max() < words:
        raise ValueError("it has token ids that the tokenizer has not")
    flat = ids.tolist()
    ends = lengths.cumsum().tolist()
    return [tuple(flat[end - n : end]) for end, n in zip(ends, lengths.tolist(), strict=True)]


def _write(path: Path, kept: tuple[TokenIds, TokenIds]) -> None:
    """Keep token ids; where that is not possible the next start tokenizes again."""
    arrays: dict[str, Any] = {}
    for name, ids in zip(("prompt", "privileged"), kept, strict=True):
        lengths = [len(one) for one in ids]
        flat = np.fromiter((number for one in ids for number in one), np.int32, sum(lengths))
        arrays |= {f"{name}_ids": flat, f"{name}_lengths": np.array(lengths, np.int64)}
    try:
        with atomic_write(path, "wb") as file:
            np.savez(file, **arrays)
    except CannotWrite as error:
        _logger.warning("token ids of prompts are not kept: %s", error)
        return
    with suppress(OSError):
        files = sorted(path.parent.glob("*.npz"), key=lambda file: -file.stat().st_mtime)
        for old in files[_MOST_FILES:]:
            old.unlink()

"""Converts published data sets to the rows that training and evaluation read, and accounts for
every row left out."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vapo_megatron.config.hub import HUB, hub_files
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.rows import chosen_fields, read_file
from vapo_megatron.errors import BadInput
from vapo_megatron.files import atomic_write
from vapo_megatron.operations.problem_rows import NoAnswer, RawProblem, find_layout, read_row
from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.normal_form import normal_form, plain_number

N_GRAM = 8
"""Words of an n-gram."""

# Evaluation problems with the same n-gram; more of them share a preamble.
_MOST_SHARING = 3
# Rows to be trained on with the same n-gram, and the share of all of them: more of both have a
# preamble, and are no repeats of one problem.
_MOST_ROWS = 8
_MOST_OF_ROWS = 0.01

_TYPESETTING = re.compile(
    r"\\(?:left|right|displaystyle|[dt]?frac|text|mathrm|mathbf|quad|,|;|!|:| )"
)
_MEANINGLESS = re.compile(r"\\(?:left|right|displaystyle|[,;:! ()\[\]])|[\s$~]")
_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)?|[^\sa-z\d$\\{}()\[\].,;:!?'\"~&]")


def words(text: str) -> tuple[str, ...]:
    """The words, numbers and operators of a problem without its typesetting, in small letters."""
    return tuple(_WORD.findall(_TYPESETTING.sub(" ", text.casefold())))


def identity(text: str) -> str:
    """A problem without spaces and typesetting that means nothing: equal for one problem written
    twice.

    Unlike words() it keeps every sign: (0,1] is not [0,1), 5! is not 5.
    """
    return _MEANINGLESS.sub(
        "", text.casefold().replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    )


class Match(NamedTuple):
    """The evaluation problem that a text is nearest to, and the share of n-grams that both have."""

    id: str
    overlap: float


class OverlapIndex:
    """Finds evaluation problems in training texts.

    The overlap of two texts is the share of N_GRAM-word sequences of the shorter one that the other
    has too (Brown et al., arXiv 2005.14165, appendix C, use the like). Texts of fewer words are
    compared as a whole.

    N-grams that several of the problems, or many of the texts, share, such as a preamble's, are no
    evidence and do not count.
    """

    def __init__(self, problems: Iterable[tuple[str, str]], texts: Sequence[str] = ()) -> None:
        """problems: (id, text) of what must not be trained on; texts: all training texts."""
        self._whole: dict[tuple[str, ...], str] = {}
        self._having: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        self._problems: list[tuple[str, int]] = []
        grams_of: list[set[tuple[str, ...]]] = []
        for name, text in problems:
            # A problem that comes twice is one, so that its n-grams count
            if words(text) in self._whole:
                continue
            self._whole[words(text)] = name
            grams_of.append(_n_grams(words(text)))
            for gram in grams_of[-1]:
                self._having[gram].append(len(grams_of) - 1)
        self._shared = {
            gram for gram, numbers in self._having.items() if len(numbers) > _MOST_SHARING
        }
        most = max(_MOST_ROWS, _MOST_OF_ROWS * len(texts))
        rows = Counter(
            gram for text in texts for gram in self._having.keys() & _n_grams(words(text))
        )
        self._shared |= {gram for gram, count in rows.items() if count > most}
        for gram in self._shared:
            del self._having[gram]
        names = list(self._whole.values())
        self._problems = [
            (name, len(grams - self._shared)) for name, grams in zip(names, grams_of, strict=True)
        ]

    def nearest(self, text: str) -> Match | None:
        """The problem with the largest overlap; None where nothing is shared."""
        text_words = words(text)
        if text_words in self._whole:
            return Match(self._whole[text_words], 1.0)
        grams = _n_grams(text_words) - self._shared
        matches = list[Match]()
        for number, count in Counter(
            number for gram in grams for number in self._having.get(gram, ())
        ).items():
            name, size = self._problems[number]
            matches.append(Match(name, count / min(len(grams), size)))
        return max(matches, key=lambda match: match.overlap, default=None)


def _n_grams(text_words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(text_words[i : i + N_GRAM]) for i in range(len(text_words) - N_GRAM + 1)}


OVERLAP_LIMIT = 0.6


@dataclass(frozen=True)
class LeftOut:
    """A row that is not written. reason is one of a few words to count by; detail is for people."""

    id: str
    place: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """Result of a preparation. repeated: rows whose problem and answer came before; they are not
    listed."""

    rows: int
    kept: int
    repeated: int
    left_out: Sequence[LeftOut]

    def counts(self) -> dict[str, int]:
        """Rows left out, by reason, the most frequent first."""
        counted = Counter(row.reason for row in self.left_out)
        return dict(
            (
                counted | Counter({"repeated": self.repeated}) if self.repeated else counted
            ).most_common()
        )


def prepare(
    sources: Sequence[str],
    out: Path,
    against: Sequence[Path] = (),
    *,
    overlap_limit: float = OVERLAP_LIMIT,
    integers_only: bool = False,
    keep: Sequence[str] = (),
) -> Outcome:
    """Write rows {id, problem, answer} to out, and the omitted rows with reasons to
    <out>.report.json.

    A row is left out, in this order, if it has no problem or answer (empty), if an earlier row has
    the same problem (repeated, or conflicting_answers, which removes all of them), if it is too
    near to an evaluation problem (contaminated), and if only integers are wanted and its answer is
    none (not_an_integer).

    Args:
        sources: files, or hub:OWNER/NAME[@REVISION][:PART].
        out: a .jsonl file.
        against: prepared files of problems that must not be trained on.
        overlap_limit: share of common 8-grams, of the shorter text, from which on a row counts as
            contaminated.
        integers_only: as DAPO's data.
        keep: fields of the source's rows that are written too.

    Raises:
        BadInput: a source cannot be read, an id comes twice, or nothing is left.
    """
    if out.suffix != ".jsonl":
        raise BadInput(f"--out {out}: expected a name that ends in .jsonl")
    if out.resolve() in {path.resolve() for path in (*map(Path, sources), *against)}:
        raise BadInput(
            f"--out {out}: is one of the files that are read, and would be lost: name another one"
        )
    left_out: list[LeftOut] = []
    rows, problems = _read(sources, left_out, keep)
    clean, repeated = _distinct(problems, left_out)
    if against:
        index = OverlapIndex(
            ((row.id, row.problem) for path in against for row in _read([str(path)])[1]),
            [row.problem for row in clean],
        )
        clean = _without(
            clean, "contaminated", lambda row: _overlap(row, index, overlap_limit), left_out
        )
    if integers_only:
        clean = _without(clean, "not_an_integer", _not_an_integer, left_out)
    _check_ids(clean)
    outcome = Outcome(rows, len(clean), repeated, left_out)
    if not clean:
        counts = (
            ", ".join(f"{count} {reason}" for reason, count in outcome.counts().items())
            or "there were none"
        )
        raise BadInput(
            f"{', '.join(sources)}: no row is left of {rows} ({counts}); nothing was written"
        )
    write_rows(
        out,
        (row.as_row() for row in clean),
    )
    with atomic_write(out.with_name(out.name + ".report.json")) as file:
        report = {
            "sources": list(sources),
            "against": [str(path) for path in against],
            "overlap_limit": overlap_limit,
            "rows": rows,
            "kept": len(clean),
            "left_out": outcome.counts(),
            "rows_left_out": [asdict(row) for row in left_out],
        }
        json.dump(report, file, indent=1, ensure_ascii=False)
    return outcome


def _read(
    sources: Sequence[str], left_out: list[LeftOut] | None = None, keep: Sequence[str] = ()
) -> tuple[int, list[RawProblem]]:
    """The number of rows of all sources, and the problems of those that have one and an answer."""
    problems: list[RawProblem] = []
    count = 0
    for source in sources:
        layout = None
        for path in hub_files(source) if source.startswith(HUB) else [Path(source)]:
            for number, row in read_file(path):
                place = f"{path}:{number}"
                count = count + 1
                layout = find_layout(row, place, layout)
                fault = LeftOut("", place, "empty", "no text in its problem or answer")
                try:
                    problem = read_row(row, layout, path.name.partition(".")[0], number, place)
                except NoAnswer as error:
                    problem = None
                    fault = LeftOut("", place, "no_answer", str(error))
                if problem is not None:
                    problems.append(
                        replace(problem, kept=chosen_fields(row, keep, place)) if keep else problem
                    )
                elif left_out is not None:
                    left_out.append(fault)
    return count, problems


def _without(
    problems: Sequence[RawProblem],
    reason: str,
    detail_of: Callable[[RawProblem], str | None],
    left_out: list[LeftOut],
) -> list[RawProblem]:
    """The problems for which detail_of returns None; the others go into left_out with their
    detail."""
    kept: list[RawProblem] = []
    for row in problems:
        detail = detail_of(row)
        if detail is None:
            kept.append(row)
        else:
            left_out.append(LeftOut(row.id, row.place, reason, detail))
    return kept


def _overlap(row: RawProblem, index: OverlapIndex, limit: float) -> str | None:
    match = index.nearest(row.problem)
    if match is None or match.overlap < limit:
        return None
    return f"{match.overlap:.0%} of its 8-grams are in evaluation problem {match.id}"


def _not_an_integer(row: RawProblem) -> str | None:
    number = plain_number(normal_form(row.answer))
    is_integer = number is not None and number.exact and number.value.denominator == 1
    if is_integer:
        return None
    return f"answer {row.answer[:80]}"


def _distinct(
    problems: Sequence[RawProblem], left_out: list[LeftOut]
) -> tuple[list[RawProblem], int]:
    """Each problem once, and the number of repeats. A problem with several answers is left out."""
    first: dict[str, RawProblem] = {}
    conflicts: set[str] = set()
    repeated = 0
    for row in problems:
        key = identity(row.problem) + "".join(message["content"] for message in row.before)
        before = first.setdefault(key, row)
        if before is row:
            continue
        if quick_comparison(before.answer, row.answer) is True:
            repeated += 1
            continue
        conflicts.add(key)
        detail = (
            f"the problem of {before.id} with the answer {row.answer[:80]}, not "
            f"{before.answer[:80]}"
        )
        left_out.append(LeftOut(row.id, row.place, "conflicting_answers", detail))
    for key in conflicts:
        row = first.pop(key)
        left_out.append(
            LeftOut(
                row.id, row.place, "conflicting_answers", "other rows have the problem with another"
            )
        )
    return list(first.values()), repeated


def _check_ids(problems: Sequence[RawProblem]) -> None:
    places: dict[str, str] = {}
    for row in problems:
        if row.id in places:
            raise BadInput(
                f"{row.place}: id {row.id} is used by {places[row.id]} too; make the ids differ, "
                "or prepare the files one by one"
            )
        places[row.id] = row.place

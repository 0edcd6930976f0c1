"""Converts published data sets to the rows that training and evaluation read, and accounts for every row left out."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.config.atomic import atomic_write
from vapo_megatron.config.hub import HUB, hub_files
from vapo_megatron.data.jsonl import write_rows
from vapo_megatron.data.rows import chosen_fields, read_file
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.extract import boxed
from vapo_megatron.rewards.normal_form import normal_form, plain_number

Row = Mapping[str, Any]
_IDS = ("id", "unique_id", "ID")  # fields that may hold a row's id

# Text that DAPO-Math-17k puts around each problem; here the config's template does that.
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line after"


class Layout(NamedTuple):
    """How the rows of a published set are read: those that have all `fields`; problem and answer give a row's text, or
    None where it has none."""

    fields: tuple[str, ...]
    problem: Callable[[Row], Any]
    answer: Callable[[Row], Any]


def _user_message(row: Row) -> Any:
    """The last user message of a row's prompt, without the instructions of DAPO-Math-17k."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = next((message.get("content") for message in reversed(prompt) if message.get("role") == "user"), None)
    if not isinstance(prompt, str):
        return prompt
    if prompt.startswith(_DAPO_BEFORE):
        prompt = prompt.partition("\n\n")[2]
    return prompt.partition(_DAPO_AFTER)[0]


def _ground_truth(row: Row) -> Any:
    model = row["reward_model"]
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _boxed_answer(row: Row) -> Any:
    solution = row["solution"]
    return (boxed(solution) or None) if isinstance(solution, str) else None


def _after_hashes(row: Row) -> Any:
    answer = row["answer"]
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return answer.rpartition("####")[2].strip().replace(",", "")


# The more demanding first: the first that fits the first row of a source is taken.
LAYOUTS = (
    # BytedTsinghua-SIA/DAPO-Math-17k, and whatever else is in verl's form.
    Layout(("prompt", "reward_model"), _user_message, _ground_truth),
    # HuggingFaceH4/MATH-500, HuggingFaceH4/aime_2024, agentica-org/DeepScaleR-Preview-Dataset, math-ai/aime25,
    # and the form that training reads.
    Layout(("problem", "answer"), itemgetter("problem"), itemgetter("answer")),
    # EleutherAI/hendrycks_math, DigitalLearningGmbH/MATH-lighteval: the answer stands in a box of the solution.
    Layout(("problem", "solution"), itemgetter("problem"), _boxed_answer),
    # Maxwell-Jia/AIME_2024.
    Layout(("Problem", "Answer"), itemgetter("Problem"), itemgetter("Answer")),
    # openai/gsm8k ("... #### 72"), opencompass/AIME2025.
    Layout(("question", "answer"), itemgetter("question"), _after_hashes),
    # open-r1/DAPO-Math-17k-Processed: the solution is the bare answer.
    Layout(("prompt", "solution"), _user_message, itemgetter("solution")),
)


@dataclass(frozen=True, slots=True)
class RawProblem:
    """A problem as a file gives it; place is "file:row" for messages, kept are fields that are written with it."""

    id: str
    problem: str
    answer: str
    place: str
    kept: Mapping[str, Any] = field(default_factory=dict)


def find_layout(row: Row, place: str, layout: Layout | None = None) -> Layout:
    """The layout of a row: that of the rows before it, or the first that fits. Raises BadInput where none does."""
    layouts = LAYOUTS if layout is None else (layout,)
    for fitting in layouts:
        if all(field in row for field in fitting.fields):
            return fitting
    expected = ", or ".join(" + ".join(layout.fields) for layout in layouts)
    raise BadInput(
        f"{place}: has the fields {', '.join(sorted(row)) or 'none'}; expected {expected}: rename them in the file"
    )


def _bare(answer: str) -> str:
    """An answer on one line without the display mathematics or box that stands around all of it."""
    answer = " ".join(answer.split())
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$"), (r"\(", r"\)")):
        inner = answer[len(opening) : -len(closing)]
        if answer.startswith(opening) and answer.endswith(closing) and opening not in inner and closing not in inner:
            answer = inner.strip()
    return boxed(answer) if answer.startswith(r"\boxed{") and answer.endswith("}") else answer


def read_row(row: Row, layout: Layout, stem: str, number: int, place: str) -> RawProblem | None:
    """The problem of a row; None where it has no problem or no answer. stem and number make an id where it has none."""
    problem, answer = layout.problem(row), layout.answer(row)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(problem, str) or not isinstance(answer, str) or not problem.strip() or not answer.strip():
        return None
    row_id = next((row[name] for name in _IDS if isinstance(row.get(name), (str, int))), None)
    extra = row.get("extra_info")
    if row_id is None and isinstance(extra, Mapping) and isinstance(extra.get("index"), str):
        row_id = extra["index"]
    return RawProblem(
        str(row_id) if row_id is not None else f"{stem}-{number:06d}", problem.strip(), _bare(answer), place
    )


N_GRAM = 8
"""Words of an n-gram."""

_TYPESETTING = re.compile(r"\\(?:left|right|displaystyle|[dt]?frac|text|mathrm|mathbf|quad|,|;|!|:| )")
_MEANINGLESS = re.compile(r"\\(?:left|right|displaystyle|[,;:! ()\[\]])|[\s$~]")
_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)?|[^\sa-z\d$\\{}()\[\].,;:!?'\"~&]")


def words(text: str) -> tuple[str, ...]:
    """The words, numbers and operators of a problem without its typesetting, in small letters."""
    return tuple(_WORD.findall(_TYPESETTING.sub(" ", text.casefold())))


def identity(text: str) -> str:
    """A problem without spaces and typesetting that means nothing: equal for one problem written twice.

    Unlike words() it keeps every sign: (0,1] is not [0,1), 5! is not 5.
    """
    return _MEANINGLESS.sub("", text.casefold().replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))


class Match(NamedTuple):
    """The evaluation problem that a text is nearest to, and the share of n-grams that both have."""

    id: str
    overlap: float


class OverlapIndex:
    """Finds evaluation problems in training texts.

    The overlap of two texts is the share of N_GRAM-word sequences of the shorter one that the other has too (Brown et
    al., arXiv 2005.14165, appendix C, use the like). Texts of fewer words are compared as a whole.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        """problems: (id, text) of what must not be trained on."""
        self._whole: dict[tuple[str, ...], str] = {}
        self._having: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
        self._problems: list[tuple[str, int]] = []
        for name, text in problems:
            self._whole.setdefault(words(text), name)
            grams = _n_grams(words(text))
            for gram in grams:
                self._having[gram].add(len(self._problems))
            self._problems.append((name, len(grams)))

    def nearest(self, text: str) -> Match | None:
        """The problem with the largest overlap; None where nothing is shared."""
        text_words = words(text)
        if text_words in self._whole:
            return Match(self._whole[text_words], 1.0)
        grams, matches = _n_grams(text_words), list[Match]()
        for number, count in Counter(number for gram in grams for number in self._having.get(gram, ())).items():
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
    """Result of a preparation. repeated: rows whose problem and answer came before; they are not listed."""

    rows: int
    kept: int
    repeated: int
    left_out: Sequence[LeftOut]

    def counts(self) -> dict[str, int]:
        """Rows left out, by reason, the most frequent first."""
        counted = Counter(row.reason for row in self.left_out)
        return dict((counted | Counter({"repeated": self.repeated}) if self.repeated else counted).most_common())


def prepare(
    sources: Sequence[str],
    out: Path,
    against: Sequence[Path] = (),
    *,
    overlap_limit: float = OVERLAP_LIMIT,
    integers_only: bool = False,
    keep: Sequence[str] = (),
) -> Outcome:
    """Write rows {id, problem, answer} to out, and what was left out and why to <out>.report.json.

    A row is left out, in this order, if it has no problem or answer (empty), if an earlier row has the same problem
    (repeated, or conflicting_answers, which removes all of them), if it is too near to an evaluation problem
    (contaminated), and if only integers are wanted and its answer is none (not_an_integer).

    Args:
        sources: files, or hub:OWNER/NAME[@REVISION][:PART].
        out: a .jsonl file.
        against: prepared files of problems that must not be trained on.
        overlap_limit: share of common 8-grams, of the shorter text, from which on a row counts as contaminated.
        integers_only: as DAPO's data.
        keep: fields of the source's rows that are written too.

    Raises:
        BadInput: a source cannot be read, an id comes twice, or nothing is left.
    """
    if out.suffix != ".jsonl":
        raise BadInput(f"--out {out}: expected a name that ends in .jsonl")
    if out.resolve() in {path.resolve() for path in (*map(Path, sources), *against)}:
        raise BadInput(f"--out {out}: is one of the files that are read, and would be lost: name another one")
    left_out: list[LeftOut] = []
    rows, problems = _read(sources, left_out, keep)
    clean, repeated = _distinct(problems, left_out)
    if against:
        index = OverlapIndex((row.id, row.problem) for path in against for row in _read([str(path)])[1])
        clean = _without(clean, "contaminated", lambda row: _overlap(row, index, overlap_limit), left_out)
    if integers_only:
        clean = _without(clean, "not_an_integer", _not_an_integer, left_out)
    _check_ids(clean)
    outcome = Outcome(rows, len(clean), repeated, left_out)
    if not clean:
        counts = ", ".join(f"{count} {reason}" for reason, count in outcome.counts().items()) or "there were none"
        raise BadInput(f"{', '.join(sources)}: no row is left of {rows} ({counts}); nothing was written")
    write_rows(out, ({**row.kept, "id": row.id, "problem": row.problem, "answer": row.answer} for row in clean))
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
                place, count = f"{path}:{number}", count + 1
                layout = find_layout(row, place, layout)
                problem = read_row(row, layout, path.name.partition(".")[0], number, place)
                if problem is not None:
                    problems.append(replace(problem, kept=chosen_fields(row, keep, place)) if keep else problem)
                elif left_out is not None:
                    left_out.append(LeftOut("", place, "empty", "no text in its problem or answer"))
    return count, problems


def _without(
    problems: Sequence[RawProblem], reason: str, detail_of: Callable[[RawProblem], str | None], left_out: list[LeftOut]
) -> list[RawProblem]:
    """The problems for which detail_of returns None; the others go into left_out with their detail."""
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
    return None if is_integer else f"answer {row.answer[:80]}"


def _distinct(problems: Sequence[RawProblem], left_out: list[LeftOut]) -> tuple[list[RawProblem], int]:
    """Each problem once, and the number of repeats. A problem with several answers is left out."""
    first: dict[str, RawProblem] = {}
    conflicts: set[str] = set()
    repeated = 0
    for row in problems:
        key = identity(row.problem)
        before = first.setdefault(key, row)
        if before is row:
            continue
        if quick_comparison(before.answer, row.answer) is True:
            repeated += 1
            continue
        conflicts.add(key)
        detail = f"the problem of {before.id} with the answer {row.answer[:80]}, not {before.answer[:80]}"
        left_out.append(LeftOut(row.id, row.place, "conflicting_answers", detail))
    for key in conflicts:
        row = first.pop(key)
        left_out.append(LeftOut(row.id, row.place, "conflicting_answers", "other rows have the problem with another"))
    return list(first.values()), repeated


def _check_ids(problems: Sequence[RawProblem]) -> None:
    places: dict[str, str] = {}
    for row in problems:
        if row.id in places:
            raise BadInput(
                f"{row.place}: id {row.id} is also that of {places[row.id]}; make the ids differ, or prepare the files "
                "one by one"
            )
        places[row.id] = row.place

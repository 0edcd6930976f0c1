"""Which training problems are those of an evaluation set, word for word or nearly."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
            found = words(text)
            self._whole.setdefault(found, name)
            grams = _n_grams(found)
            for gram in grams:
                self._having[gram].add(len(self._problems))
            self._problems.append((name, len(grams)))

    def nearest(self, text: str) -> Match | None:
        """The problem with the largest overlap; None where nothing is shared."""
        found = words(text)
        if found in self._whole:
            return Match(self._whole[found], 1.0)
        grams = _n_grams(found)
        shared = Counter(number for gram in grams for number in self._having.get(gram, ()))
        matches = (
            Match(name, count / min(len(grams), size))
            for number, count in shared.items()
            for name, size in (self._problems[number],)
        )
        return max(matches, key=lambda match: match.overlap, default=None)


def _n_grams(found: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(found[i : i + N_GRAM]) for i in range(len(found) - N_GRAM + 1)}

r"""The values of formulas, without a computer algebra system: \frac{2\sqrt{3}}{3}, 2(x+1)^2, (0,
\pi/2].

Formulas of rational numbers are evaluated exactly, others in floating point, letters at fixed
points. That settles many answers in microseconds where parsing them for sympy takes tens of
milliseconds. Whatever is not plainly arithmetic, or too close to call, is left to sympy: units,
words, functions, inequalities, a negative number under a root, numbers beyond 1e100, and roots and
letters beyond _LARGEST that agree up to rounding.
"""

import cmath
import re
from collections.abc import Mapping
from fractions import Fraction

_LONGEST = 200  # characters
_DEEPEST = 20
_EQUAL = 1e-11
_DIFFERENT = 1e-6
_DIFFERENT_DECIMALS = 1e-3  # relative; in between nothing is said
_LARGEST = 1e6  # rounding hides no difference of 1e-5 below it
_MOST_BITS = 4096  # of a rational number
# Close to the circle of radius 1, so that no power of a letter hides another one.
_POINTS = (cmath.rect(0.99, 0.6180339887), cmath.rect(1.01, -0.9042137))
_POSITIVE = (0.7312890625, 1.618033988749895)
# Unless they are variables: formulas are compared as both
_CONSTANTS = {
    "e": complex(cmath.e),
    "i": 1j,
}
_UNREAD_LETTERS = frozenset("dEIoO")  # differentials, other spellings of e and i, an o for a zero
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|(?P<letter>[a-eh-zA-EH-Z]|[fghFGH](?!\())|"
    r"(?P<command>\\(?:frac|sqrt|pi|times|cdot|div|sin|cos|tan)(?![a-zA-Z]))|"
    r"(?P<degree>\^(?:\\circ|\{\\circ\s*\}))|(?P<sign>[-+*/^(){}\[\]]))"
)
_WRITTEN_AS = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"^\circ": "°"}
_FUNCTIONS = {r"\sin": cmath.sin, r"\cos": cmath.cos, r"\tan": cmath.tan}
_REPEATING = re.compile(r"(?<![\d.])(?P<whole>\d*)\.(?P<first>\d*)\\overline\{(?P<again>\d+)\}")
_ENDS = ("", "+", "-", ")", "}", "]", "*", "/")
_BRACKETED = re.compile(r"(?P<open>[(\[]|\\\{)(?P<inside>.*)(?P<close>[)\]]|\\\})", re.DOTALL)

_Number = Fraction | complex


class _Unread(Exception):
    """Not a formula that this module reads."""


def same_value(ground_truth: str, answer: str) -> bool | None:
    """Whether two formulas, tuples, intervals, lists or sets of them have the same value; None: it
    cannot tell.

    Both are texts in normal form.
    """
    if max(len(ground_truth), len(answer)) > _LONGEST:
        return None
    true_opens, true_entries, true_closes = _entries(ground_truth)
    opens, entries, closes = _entries(answer)
    if (true_opens, true_closes, len(true_entries)) != (opens, closes, len(entries)):
        return None
    if len(entries) == 1 or opens in ("(", "["):
        same = [_same(*pair) for pair in zip(true_entries, entries, strict=True)]
        return False if False in same else None if None in same else True
    return _same_unordered(true_entries, entries)


def _entries(text: str) -> tuple[str, list[str], str]:
    """Opening bracket, the parts between the outermost commas, closing bracket; "" where there is
    no bracket."""
    match = _BRACKETED.fullmatch(text)
    if match and "," in match["inside"] and (entries := parted(match["inside"])) is not None:
        return match["open"], entries, match["close"]
    return "", parted(text) or [text], ""


def parted(text: str, separator: str = ",") -> list[str] | None:
    """text split at the separators outside of brackets; None where its brackets do not match."""
    entries = []
    depth = 0
    start = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == separator and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    return [*entries, text[start:]] if depth == 0 else None


def _same_unordered(true_entries: list[str], entries: list[str]) -> bool | None:
    """Whether the entries match one to one; None if that is ambiguous."""
    table = [[_same(truth, entry) for entry in entries] for truth in true_entries]
    if any(None in row for row in table):
        return None
    counts = [sum(map(bool, line)) for line in (*table, *zip(*table, strict=True))]
    return True if set(counts) == {1} else False if 0 in counts else None


def _same(ground_truth: str, answer: str) -> bool | None:
    infinite = [text.strip().removeprefix("+") for text in (ground_truth, answer)]
    ends = [text in (r"\infty", r"-\infty") for text in infinite]
    if all(ends):
        return infinite[0] == infinite[1]
    try:
        if any(ends):
            # Is a number, or raises
            _Reader(_tokens(answer if ends[0] else ground_truth), {}).value()
            return False
        true_tokens = _tokens(ground_truth)
        tokens = _tokens(answer)
        letters, others = (
            {token for token in side if token.isalpha()} for side in (true_tokens, tokens)
        )
        if letters ^ others <= _CONSTANTS.keys() and not letters & _UNREAD_LETTERS:
            verdicts = _verdicts(true_tokens, tokens, letters, others)
        else:
            return None
    except (_Unread, ArithmeticError, ValueError, LookupError, RecursionError):
        return None  # sympy reads more, in a separate process
    if verdicts == {True}:
        return True
    if letters != others or ("°" in true_tokens) != ("°" in tokens):
        return None
    # Special letters as constants, as variables: where one says different and the other equal,
    # sympy decides.
    return False if verdicts == {False} else None


def _verdicts(
    true_tokens: list[str], tokens: list[str], letters: set[str], others: set[str]
) -> set[bool | None]:
    try:
        return {_agree(true_tokens, tokens, point) for point in _points(letters, others)}
    except _Unread:
        # Roots of letters are read for positive numbers: \\sqrt{1/n} is 1/\\sqrt{n}.
        # Not where a power may hide a sign: \\sqrt{x^2} is not x.
        powers = "^" in true_tokens or "^" in tokens
        if powers or not letters or letters & _CONSTANTS.keys() or letters != others:
            raise
        points = [
            {letter: point ** (1 + ord(letter) / 97) + 0j for letter in letters}
            for point in _POSITIVE
        ]
        return {_agree(true_tokens, tokens, point) for point in points}


def _agree(true_tokens: list[str], tokens: list[str], point: Mapping[str, complex]) -> bool | None:
    truth = _Reader(true_tokens, point).value()
    value = _Reader(tokens, point).value()
    decimals = any("." in token for token in (*true_tokens, *tokens))
    if (
        isinstance(truth, Fraction)
        and isinstance(value, Fraction)
        and (truth == value or not decimals)
    ):
        return truth == value
    largest = max(abs(complex(truth)), abs(complex(value)))
    distance = abs(complex(truth - value)) / max(largest, 1e-9)
    if distance < _EQUAL:
        return True if largest < _LARGEST else None
    return False if distance > (_DIFFERENT_DECIMALS if decimals else _DIFFERENT) else None


def _points(letters: set[str], others: set[str]) -> list[dict[str, complex]]:
    points = [{letter: point ** (1 + ord(letter) / 97) for letter in letters} for point in _POINTS]
    with_constants = [point | _CONSTANTS for point in points]
    if letters != others:
        return with_constants
    return points + with_constants if letters & _CONSTANTS.keys() else points


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = _REPEATING.sub(_fraction, text.strip())
    only_letters = text.isalpha()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _Unread
        token = r"^\circ" if match["degree"] else match[0].strip()
        # Two numbers side by side are no product, nor is a number behind a letter; letters alone
        # are a word.
        if tokens and match["number"] and (tokens[-1][0].isdigit() or tokens[-1].isalpha()):
            raise _Unread
        if only_letters and len(text) > 1:
            raise _Unread
        tokens.append(_WRITTEN_AS.get(token, token))
        position = match.end()
    if not tokens:
        raise _Unread
    return tokens


def _fraction(repeating: re.Match[str]) -> str:
    """0.1\\overline{6} as (16-1)/90."""
    before = repeating["whole"] or "0"
    first = repeating["first"]
    again = repeating["again"]
    numerator = int(before + first + again) - int(before + first)
    return f"\\frac{{{numerator}}}{{{'9' * len(again)}{'0' * len(first)}}}"


class _Reader:
    """Evaluates tokens by recursive descent."""

    def __init__(self, tokens: list[str], letters: Mapping[str, complex]) -> None:
        self._tokens = tokens
        self._letters = letters
        self._next = 0
        self._depth = 0

    def value(self) -> _Number:
        """Return the value of the whole expression."""
        value = self._sum()
        if self._next < len(self._tokens):
            raise _Unread
        return value

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._peek()
        if not token or (expected and token not in expected):
            raise _Unread
        self._next += 1
        return token

    def _sum(self) -> _Number:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Unread
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        self._depth -= 1
        return _checked(value)

    def _product(self) -> _Number:
        if self._peek() in ("+", "-"):
            return self._product() if self._take() == "+" else -self._product()
        value = self._power()
        while (token := self._peek()) and token not in ("+", "-", ")", "}", "]"):
            if token in ("*", "/"):
                self._take()
                sign = -1 if self._peek() == "-" and self._take() else 1
                factor = sign * self._power()
                # 1/2x is read in two ways.
                if token == "/" and self._peek() not in _ENDS:
                    raise _Unread
                value = value * factor if token == "*" else value / factor
            elif token == r"\frac" and self._tokens[self._next - 1][0].isdigit():
                raise _Unread  # a mixed number, or a product
            else:
                value *= self._power()
        return _checked(value)

    def _power(self) -> _Number:
        base = self._atom()
        if self._peek() == "°":
            self._take()
            return complex(base) * cmath.pi / 180
        if self._peek() != "^":
            return base
        self._take()
        exponent = self._atom()
        whole = exponent.imag == 0 and exponent.real == int(exponent.real)
        if (not whole and (base.imag or base.real < 0)) or abs(complex(exponent)) > 1000:
            raise _Unread
        if not whole:
            return _checked(complex(base) ** complex(exponent))
        times = int(exponent.real)
        if isinstance(base, Fraction) and _bits(base) * abs(times) > _MOST_BITS:
            raise _Unread
        return _checked(base**times)

    def _atom(self) -> _Number:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return Fraction(token)
        if token.isalpha():
            if token not in self._letters:
                raise _Unread
            return self._letters[token]
        if token == r"\pi":
            return complex(cmath.pi)
        if token in ("(", "{"):
            value = self._sum()
            self._take(")" if token == "(" else "}")
            return value
        if token == r"\frac":
            top = self._group()
            return top / self._group()
        if token == r"\sqrt":
            return self._root()
        if token in _FUNCTIONS and (self._peek() == "(" or self._peek()[:1].isdigit()):
            value = _FUNCTIONS[token](self._power())
            if self._peek() in _ENDS:  # of sin 2x it is not said where its argument ends
                return value
        raise _Unread

    def _group(self) -> _Number:
        self._take("{")
        value = self._sum()
        self._take("}")
        return value

    def _root(self) -> _Number:
        degree: _Number = Fraction(2)
        if self._peek() == "[":
            self._take()
            degree = self._sum()
            self._take("]")
        radicand = self._group()
        if radicand.imag or radicand.real < 0 or degree.imag or degree.real < 1:
            raise _Unread
        return complex(float(radicand.real) ** (1 / float(degree.real)))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _checked(value: _Number) -> _Number:
    if isinstance(value, Fraction) and _bits(value) > _MOST_BITS:
        raise _Unread
    if not 1e-100 < abs(complex(value)) < 1e100 and value != 0:
        raise _Unread
    return value

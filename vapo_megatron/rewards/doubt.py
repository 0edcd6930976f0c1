r"""When math-verify's "equal" is not believed.

It finds two answers equal where it has read only a part of them, and drops all that it does not
know: 10^{-100} and 70^{-100} (both round to 0), two functions by cases, "n even" and "n odd".
What shows that in the texts alone is here; rewards.symbolic checks the values.
"""

import re
from collections import Counter

from vapo_megatron.rewards.normal_form import compact, normal_form, plain_number

_NUMBER = re.compile(r"\d+")
_SIGNED = re.compile(r"[-+]|\d+")
# Of a single number: what may stand beside it. Anything else was left out by the parser, not by the
# problem.
_BESIDE_A_NUMBER = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|div|text|textrm|mathrm|mbox|operatorname|circ|approx|equiv|pmod|"
    r"boxed|implies|iff|[lrR]\w*arrow|to|quad|in|left|right|degree|angle|triangle|[lr]vert|cup|cap|"
    r"sin|cos|tan|log|ln|"
    r"binom|infty|leq?|geq?|sum|int|lim|prod|measuredangle|mid|overline|therefore)(?![a-zA-Z])"
    r"|\\[%$ ,;!{}()\[\]]"
)
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)")
_FIGURE = re.compile(
    r"\\(?:angle|triangle|overline|overrightarrow|widehat|vec|odot)\s*\{?\s*[A-Z](?:\s*[A-Z'])+\s*\}?"
)
_COMPUTED = re.compile(
    r"\\[dt]?binom|\\choose|\\l(?:floor|ceil)|\\gcd|\\overline|\\dot|vmatrix|\\det|!|\|"
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TEXTS = re.compile(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_WORD = re.compile(r"[a-z]{2,}")
# Words that say nothing of the value.
_JOINING = frozenset(
    {"and", "or", "the", "is", "are", "an", "if", "for", "all", "any", "where", "with", "of", "in"}
    | {"to", "so", "we", "have", "as", "then", "that", "be", "it", "its", "when", "only", "exactly"}
)


def is_doubtful(ground_truth: str, answer: str) -> bool:
    """Whether the texts of two answers, which math-verify found equal, show that it has not read
    them."""
    true_text = normal_form(ground_truth)
    text = normal_form(answer)
    if _FIGURE.fullmatch(true_text):
        return compact(true_text) != compact(text)
    if plain_number(true_text) is not None:
        return _leaves_out(text.rpartition("=")[2])
    return _other_words(true_text, text)


def differs_in_numbers(ground_truth: str, answer: str) -> bool:
    """Whether two texts differ in their numbers or signs and in nothing else, and not in their
    order alone.

    Such answers are rarely equal: 2 + 3 and 3 + 2 are, \\binom{5}{2} and \\binom{5}{3} are.
    """
    true_text = compact(normal_form(ground_truth))
    text = compact(normal_form(answer))
    if _skeleton(true_text) != _skeleton(text):
        return False
    return Counter(_SIGNED.findall(true_text)) != Counter(_SIGNED.findall(text))


def covers(text: str, formula: str) -> bool:
    """Whether the integers of a text are all in the formula that was read from it, 0 and 1 aside.

    A plain number is read for certain. Functions that math-verify computes at once, such as
    binomials, leave no trace of their arguments.
    """
    if _COMPUTED.search(text) or plain_number(normal_form(text)) is not None:
        return True
    read = set(_NUMBER.findall(formula))
    plain = _THOUSANDS.sub("", normal_form(text))
    written = set(re.findall(r"(?<![\d.])\d+(?![\d.])", plain))
    return written - {"0", "1"} <= read


def _skeleton(text: str) -> str:
    return _NUMBER.sub("0", text.replace("-", "+"))


def _leaves_out(answer: str) -> bool:
    """Whether beside a single number there is a command that is no unit, operation or relation."""
    rest = _BESIDE_A_NUMBER.sub("", answer)
    return _COMMAND.search(rest) is not None


def _other_words(true_text: str, text: str) -> bool:
    """Whether both texts have words, and none of them in common."""
    true_words = _words(true_text)
    words = _words(text)
    return bool(true_words and words) and not true_words & words


def _words(text: str) -> frozenset[str]:
    joined = " ".join(_TEXTS.findall(text)).casefold()
    return frozenset(_WORD.findall(joined)) - _JOINING

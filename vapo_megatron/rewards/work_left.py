r"""Answers that leave the work to the reader: 33 - 4 where the reference is 29, an expression of
the problem itself, or an equation that is not solved.

The first two have the right value, so a comparison by value rewards them, and a policy finds that
restating the question pays (docs/verifier.md). Plain string handling; nothing here computes a
value.
"""

import re
from functools import lru_cache

from vapo_megatron.rewards.normal_form import normal_form, plain_number, unwrapped
from vapo_megatron.rewards.values import parted

_NUMBER = r"\d[\d,]*(?:\.\d*)?|\.\d+"
_INTEGER = r"-?\d[\d,]*"
# Numbers that are written with an operation and have none left to carry out. The mixed number comes
# before normal_form, which turns 1 1/2 into a sum.
_MIXED = re.compile(r"(?:\d+\s+\d+/\d+|\d+\s*\\[dt]?frac\s*(?:\{\d+\}\s*\{\d+\}|\d\s*\d))(?!\d)")
_POWER_OF_TEN = re.compile(
    rf"(?:(?:{_NUMBER})\s*(?:\\times|\\cdot|\*|×|·)\s*)?(?<![\d.])10\s*(?:\^|\*\*)\s*(?:\{{[-+]?\d+\}}|\(?[-+]?\d+\)?)"
)
_FRACTION = re.compile(
    rf"\\frac\{{{_INTEGER}(?:\.\d+)?\}}\{{{_INTEGER}(?:\.\d+)?\}}|(?:{_NUMBER})/(?:{_NUMBER})"
)
# A fraction that is not reduced: its numerator may be a product where the reference is a fraction
# too.
_UNREDUCED = re.compile(
    r"\d+(?:\s*(?:\\cdot|\\times|\*)\s*\d+)*/\d+"
    r"|\\frac\{\d+(?:\s*(?:\\cdot|\\times|\*)\s*\d+)*\}\{\d+\}"
)
_ANGLE = re.compile(r"\\frac\{\d*\\pi\s*\}\{\d+\}|\d*\\pi\s*/\d+")
# A root of a number that comes out even. Labelled sets accept it.
_ROOT = re.compile(rf"-?(?:\\sqrt(?:\[\d+\])?\{{)+(?:{_NUMBER})\}}+")

_FUNCTIONS = (
    "arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|lg|exp|gcd|lcm|max|min|det|abs|floor|ceil|"
    "sqrt|[dt]?binom|comb|choose|fact(?:orial)?|phi|varphi|Gamma|sum|prod|i{1,3}nt|oint|lim|bmod|mod|lfloor|lceil"
)
# Between operands, or before one: what has to be carried out. Units such as cm^2 and km/h have no
# number before them.
_OPERATION = re.compile(
    r"(?<=[\d)}\]!.%])\s*"
    r"(?:[-+*/^!]|\\(?:cdot|times|div|pm|mp|ast|over|choose|sqrt|frac)(?![a-zA-Z]))"
    rf"|\\(?:{_FUNCTIONS}|frac|d?dots[bcmo])(?![a-zA-Z])"
    rf"|(?<![a-zA-Z\\])(?:{_FUNCTIONS}|[CP])\s*[({{]"
    r"|\d\s*\(|\)\s*\(|[-+]\s*[-+(|]|\|\s*-?\d"
    r"|\d\s*(?:%|\\%|percent)?\s*"
    r"(?:of|mod|choose|plus|minus|times|divided by|over|squared|cubed|factorial)\b"
    r"|(?:sum|product|difference|quotient|square|cube|root|half|double|twice)\s+of\b",
    re.IGNORECASE,
)
_LETTERED = re.compile(
    r"(?<=[\da-zA-Z)}\]!])\s*(?:[-+*/^!]|\\(?:cdot|times|div|pm)(?![a-zA-Z]))\s*[\da-zA-Z({\\]"
)
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})")
_SIDES = re.compile(
    r"=|\\approx|\\equiv|\\implies|\\iff|\\(?:Long)?[rR](?:ight)?arrow|\\to(?![a-z])|[→⇒≈≡]|\bso\b|\bis\b"
)
_JOINTS = re.compile(r";|\band\b|\bor\b|\\c[ua]p(?![a-zA-Z])")
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([^()]*\))?")
# A side of letters and numbers that is no name, as xy and f(2) are.
_ALGEBRA = re.compile(r"(?:[a-z\d\s.+\-*/^(){}]|\\(?:frac|sqrt|left|right)(?![a-zA-Z]))+")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_CONSTANTS = {"e", "i"}
_BRACKETS = re.compile(r"^(?:\\\{|[(\[{])+|(?:\\\}|[)\]}])+$")
_LONGEST_PROBLEM = 20_000  # characters; longer ones, which hold documents, are searched as they are
_PASSAGE = 6  # words that stand in the problem one after another are no answer


def leaves_work(ground_truth: str, answer: str) -> bool:
    """Whether the ground truth is a plain number (or some), and the answer still has an operation
    to carry out.

    A fraction, a percentage, scientific notation, a power of ten and a root of one number are
    finished, and so is an equation with a finished side (33 - 4 = 29). A fraction is not if the
    ground truth is whole: 58/2 is not 29.
    """
    numbers = _numbers(ground_truth)
    if not numbers:
        return False
    whole = all(plain_number(number).value.denominator == 1 for number in numbers)  # type: ignore[union-attr]
    entries = _split(normal_form(_MIXED.sub("1", answer)))
    return any(_is_open(entry, whole) for entry in entries)


def stands_in(problem: str, answer: str, ground_truth: str) -> bool:
    """Whether the answer is an expression, with an operation, that the problem itself has.

    Not where the ground truth stands there too (the problem offers a choice), or is written as the
    answer is.
    """
    if not problem:
        return False
    expression = _spelling(answer)
    if not (_OPERATION.search(expression) or _LETTERED.search(expression)):
        return False
    if _MIXED.fullmatch(answer.strip()) or plain_number(normal_form(answer)) is not None:
        return False
    reference = _spelling(ground_truth)
    text = _problem_spelling(problem)
    return reference != expression and _within(expression, text) and not _within(reference, text)


def is_unsolved(problem: str, answer: str, ground_truth: str) -> bool:
    """Whether the answer is an equation in one unknown that is still to be solved (2x = 5 is not
    5), or the ground truth is an equation of which the answer gives a side alone (5 is not x + y =
    5).

    Not where the problem has the left side, which it may ask for. Sums of several unknowns have no
    other value than their right side: m + n = 5 is an answer of 5.
    """
    if ("=" in answer) == ("=" in ground_truth):
        return False
    left, letters = _unsolved_side(answer if "=" in answer else ground_truth)
    if not letters or ("=" in answer and len(letters) > 1):
        return False
    return not _within(left, _problem_spelling(problem))


def _unsolved_side(equation: str) -> tuple[str, set[str]]:
    """The left side of an equation with its unknowns; none where it is a name, or no algebra."""
    left, *others = [side.strip() for side in _spelling(equation).split("=")]
    letters, known = (
        set(re.findall("[a-z]", _COMMAND.sub("", t))) for t in (left, "".join(others))
    )
    if _NAME.fullmatch(left) or not _ALGEBRA.fullmatch(left) or letters & known:
        return left, set()
    return left, letters - _CONSTANTS


def is_copied(problem: str, answer: str, ground_truth: str) -> bool:
    """Whether an answer of any verifier restates the problem: an expression of it, or a passage of
    several words.

    Not where the ground truth stands in the problem too.
    """
    if stands_in(problem, answer, ground_truth):
        return True
    passage, text, reference = (
        " ".join(part.split()).strip(" .?!") for part in (answer, problem, ground_truth)
    )
    return passage.count(" ") + 1 >= _PASSAGE and passage in text and reference not in text


def _numbers(ground_truth: str) -> list[str]:
    """The numbers, in normal form, that a ground truth consists of; empty where it is or has
    anything else."""
    name, _, side = normal_form(ground_truth).rpartition("=")
    if name and not _NAME.fullmatch(name):
        return []
    numbers = []
    for entry in _split(side):
        text = normal_form(
            _DEGREES.sub("", _BRACKETS.sub("", re.sub(r"\\text\{[^{}]*\}", "", entry)))
        )
        if _POWER_OF_TEN.fullmatch(text):
            text = "1"
        number = plain_number(text)
        if number is None or number.base is not None:
            return []
        numbers.append(text)
    return numbers


def _split(text: str) -> list[str]:
    """Entries of a list, tuple or set; commas within further brackets, as of \\gcd(12, 20), do not
    count."""
    text = text.strip().strip("$").strip()
    entries = parted(_BRACKETS.sub("", text)) or [text]
    return [part for entry in entries for part in _JOINTS.split(entry) if part.strip()] or [text]


def _is_open(entry: str, whole: bool) -> bool:
    """Whether no side of an entry is a finished number. whole: of whole ground truths, for which a
    fraction is not."""
    text = _DEGREES.sub("", normal_form(unwrapped(entry)))
    sides = [side.strip() for side in _SIDES.split(text)]
    stated = [side for side in sides if re.search(r"\d", side)]
    if not stated:
        return bool(_OPERATION.search(text))
    return all(_has_operation(side, whole) for side in stated)


def _has_operation(side: str, whole: bool) -> bool:
    side = side.strip("$ ")
    if _ROOT.fullmatch(side) or (not whole and _UNREDUCED.fullmatch(side)):
        return False
    atoms = _ANGLE.sub("1", _POWER_OF_TEN.sub("1", side))
    if not whole:
        atoms = _FRACTION.sub("1", atoms)
    return bool(_OPERATION.search(atoms))


def _spelling(text: str) -> str:
    """Normal form with one sign for each operation, so that 33 \\times 4 is found as 33 * 4."""
    text = normal_form(unwrapped(text)).replace("$", "")
    text = re.sub(r"\s*\\(?:times|cdot|ast)(?![a-zA-Z])\s*", "*", text)
    text = re.sub(r"\s*\\div(?![a-zA-Z])\s*", "/", text)
    text = re.sub(r"\*\*", "^", text)
    text = re.sub(r"\^\{(\w)\}", r"^\1", text)
    return text.strip().rstrip(" .?=")


@lru_cache(maxsize=256)
def _problem_spelling(problem: str) -> str:
    return _spelling(problem) if len(problem) <= _LONGEST_PROBLEM else problem


def _within(expression: str, text: str) -> bool:
    """Whether text has the expression, not as a part of a longer number or word: 3 - 4 is not in 33
    - 4."""
    if not expression:
        return False
    pattern = rf"(?<![\w.]){re.escape(expression)}(?!\w|\.\d)"
    return re.search(pattern, text) is not None

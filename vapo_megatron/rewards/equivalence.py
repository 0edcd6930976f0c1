"""Decides whether two answers are equivalent, where possible without a computer algebra
system."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from vapo_megatron.rewards.normal_form import PlainNumber, compact, normal_form, plain_number, words
from vapo_megatron.rewards.values import parted, same_value

# For each dimension and unit: its size in the dimension's first unit, and its names.
_TABLE = {
    "length": """1 m meter meters metre metres;
        1/100 cm centimeter centimeters centimetre centimetres;
        1/1000 mm millimeter millimeters; 1000 km kilometer kilometers kilometre kilometres;
        254/10000 in inch inches; 3048/10000 ft foot feet; 9144/10000 yd yard yards;
        1609344/1000 mi mile miles""",
    "time": """1 s sec second seconds; 60 min minute minutes; 3600 h hr hrs hour hours;
        86400 day days; 604800 week weeks""",
    "month": "1 month months; 12 year years",
    "mass": "1 g gram grams; 1000 kg kilogram kilograms; 45359237/100000 lb lbs",
    "volume": "1 l liter liters litre litres; 1/1000 ml milliliter milliliters",
    "dollar": "1 dollar dollars $; 1/100 cent cents",
    "euro": "1 euro euros €",
    "sterling": "1 £",
    "count": """12 dozen; 100 hundred; 1000 thousand; 1000000 million; 1000000000 billion;
        1000000000000 trillion""",
    "speed": "1 m/s; 1000/3600 km/h kph; 1609344/3600000 mph milesperhour miles/hour",
}
_UNITS = {
    name: (dimension, Fraction(unit.split()[0]))
    for dimension, units in _TABLE.items()
    for unit in units.split(";")
    for name in unit.split()[1:]
}
_WRITTEN = re.compile(
    r"(?P<value>.*?[\d)}.])\s*(?:\\text|\\mathrm|\\textrm|\\mbox|\\operatorname)"
    r"\s*\{\s*(?P<unit>[A-Za-z./ ]+?)\.?\s*\}(?:\^\{?(?P<power>[23])\}?)?"
    r"|(?P<plain>[-+\d.,/ ]*\d)\s*"
    r"(?P<word>(?:[A-Za-z]{2,}|(?<=\s)[A-Za-z](?=/[A-Za-z]))(?:[ /][A-Za-z]+)*)"
    r"(?:\^\{?(?P<exponent>[23])\}?)?",
    re.DOTALL,
)
_SIGN = re.compile(
    r"(?P<minus>-?)(?:\\text\{\s*)?\\?(?P<sign>[$€£])\s*\}?\s*(?P<value>.+)", re.DOTALL
)
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d))?\s*(?P<half>[ap])\.?\s*m\.?|(?P<h24>\d{1,2}):(?P<m24>\d\d)"
)
_UNWRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value as text and its unit; scale is in the first unit of the dimension (metre, second,
    dollar)."""

    value: str
    dimension: str
    scale: Fraction


def quantity(text: str) -> Quantity | None:
    """The quantity that a text in normal form states, or None where there is no unit that this
    module knows."""
    if match := _SIGN.fullmatch(text):
        dimension, scale = _UNITS[match["sign"]]
        return Quantity(match["minus"] + match["value"], dimension, scale)
    if not (match := _WRITTEN.fullmatch(text)):
        return None
    named = (match["unit"] or match["word"]).casefold().split()
    power = int(match["power"] or match["exponent"] or 1)
    if len(named) > 1 and named[0] in _POWERS:
        power = _POWERS[named.pop(0)]
    unit = _UNITS.get("".join(named))
    if unit is None:
        return None
    dimension, scale = unit
    return Quantity(
        (match["value"] or match["plain"]).strip(), f"{dimension}^{power}", scale**power
    )


def time_of_day(text: str) -> tuple[int, bool] | None:
    """(minutes since midnight, whether the half of the day is stated) of 4:30 p.m., 9 AM or 16:30,
    or None."""
    match = _CLOCK.fullmatch(_UNWRAPPED.sub(r"\1", text).casefold().strip())
    if not match:
        return None
    if match["h24"]:
        return int(match["h24"]) * 60 + int(match["m24"]), int(match["h24"]) > 12
    hour = int(match["hour"]) % 12 + (12 if match["half"] == "p" else 0)
    return hour * 60 + int(match["minute"] or 0), True


# A decimal stands for every number that it is a rounding of: 0.333333 for 1/3 (six places, as
# math-verify has it), but not 0.0000001 for 0.0000002.
ABSOLUTE_TOLERANCE = Fraction(1, 2_000_000)
RELATIVE_TOLERANCE = Fraction(1, 100_000)

_CHOICE = re.compile(r"\(?([A-J])\)?(?:[.):]\s*\S.*)?", re.DOTALL)
_LETTERS = re.compile(r"\(?[a-j]\)?(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+)\(?[a-j]\)?)+")
_RATIO = re.compile(r"\d+(?: ?:\s?\d+)+")
_VARIABLE = re.compile(r"\d+[A-Za-z]")  # 2B is not 2b
_FORMULA = re.compile(r"[\d^_+*/=\\-]")  # in which R is not r
# Relations, and what joins several answers: "33 or 34" is not 34, but the cup of P(A \cup B) = 0.5
# is not the answer.
_RELATION = re.compile(
    r"[<>\u2228]|\\(?:le|leq|ge|geq|lt|gt|ne|neq|leqslant|geqslant|lor|vee)(?![a-zA-Z])|\\c[ua]p(?![a-zA-Z])[^=]*$"
)
# The sides of \pi/3 = 60^\circ are not both 60, nor the sides of 2x = 68 \implies x = 34 all 34.
_OTHER_MEASURE = re.compile(
    r"\\circ|mod|\\equiv|\u2261|arrow|\\to(?![a-z])|\\mapsto|\\i(?:mplies|ff)|[\u2192\u21d2\u27f6\u27f9]"
)
# A name, with an index or an argument.
_LEFT = re.compile(r"(?:\\?[a-zA-Z]+'*|\\[a-z]+\{[^{}]*\})(?:_\{?\w+\}?)?(?:\([^()]*\))?|\|[^|]*\|")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_MOST_SIDES = 8  # that are evaluated
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# The problem handed back: a sum, product, limit or integral that is left to the reader.
_UNEVALUATED = re.compile(r"\\(?:sum|prod|lim|i{1,3}nt|oint)(?![a-zA-Z])")
_SAID_ALIKE = {
    **dict.fromkeys(("no solutions", r"\emptyset", r"\varnothing", r"\{\}"), "no solution"),
    "dne": "does not exist",
}
_CONGRUENT = re.compile(r"[a-zA-Z]\s*\\equiv(?![a-zA-Z])\s*")
_RESIDUE = re.compile(
    r"(?:(?P<name>[a-zA-Z])\s*(?:\\equiv(?![a-zA-Z])|\u2261)\s*)?(?P<residue>-?\d{1,30})\s*\(?\s*"
    r"(?:\\?[pb]?mod(?![a-zA-Z])|\\(?:text|textrm|mathrm|mbox|operatorname)\{\s*mod\s*\})\s*"
    r"\{?(?P<modulus>\d{1,30})\}?\)?"
)
_PERCENT = re.compile(r"%|\bpercent|\bpct\b", re.IGNORECASE)
_BASE = re.compile(r"(?<![a-zA-Z])\d_\{?\d")


def quick_comparison(ground_truth: str, answer: str) -> bool | None:
    """Compare two answers as strings and plain numbers; None: mathematics is needed to tell.

    Percent is part of the value (50 % is 1/2, 10 % is not 10), and so is a written base (1101_2 is
    not 1101).
    """
    sides = _Sides(
        ground_truth.strip(), answer.strip(), normal_form(ground_truth), normal_form(answer)
    )
    if not sides.truth or not sides.answer:
        return False
    if compact(sides.truth) == compact(sides.answer):
        return True
    same = _first_verdict(_RULES, sides)
    if same is not None:
        return same
    if sides.true_number is not None and sides.number is not None:
        return _same_number(sides.true_number, sides.number)
    same = _first_verdict(_RULES_OF_FORMULAS, sides)
    return same_value(sides.truth, sides.answer) if same is None else same


@dataclass(frozen=True, slots=True)
class _Sides:
    """Two answers as written and in normal form."""

    written_truth: str
    written_answer: str
    truth: str
    answer: str

    @property
    def true_number(self) -> PlainNumber | None:
        return plain_number(self.truth)

    @property
    def number(self) -> PlainNumber | None:
        return plain_number(self.answer)


def _congruence(sides: _Sides) -> bool | None:
    """x \\equiv 3 \\pmod 7, 3 \\pmod{7} and 3 (mod 7)."""
    read = [_RESIDUE.fullmatch(side) for side in (sides.truth, sides.answer)]
    if read[0] and read[1]:
        names = {match["name"] for match in read if match and match["name"]}
        if len(names) < 2 and read[0].group("residue", "modulus") == read[1].group(
            "residue", "modulus"
        ):
            return True
    if bool(_CONGRUENT.match(sides.truth)) == bool(_CONGRUENT.match(sides.answer)):
        return None
    truth = _CONGRUENT.sub("", sides.truth)
    answer = _CONGRUENT.sub("", sides.answer)
    return quick_comparison(truth, answer) if r"\pmod" in truth and r"\pmod" in answer else None


def _handed_back(sides: _Sides) -> bool | None:
    """A sum or limit that is left to the reader is no answer, unless the ground truth is one."""
    is_open = _UNEVALUATED.search(_sides(sides.answer)[-1]) is not None
    return False if is_open and not _UNEVALUATED.search(sides.truth) else None


def _measure(sides: _Sides) -> bool | None:
    """Quantities with units, times of day and ratios."""
    true_quantity = quantity(sides.written_truth) or quantity(sides.truth)
    answer_quantity = quantity(sides.written_answer) or quantity(sides.answer)
    if true_quantity or answer_quantity:
        return _same_quantity(true_quantity, answer_quantity, sides.truth, sides.answer)
    return _same_ratio_or_time(sides.truth, sides.answer)


def _relation(sides: _Sides) -> bool | None:
    """x > 5 is not 5, nor is "5 or 6", nor is 5 either of these."""
    if sides.true_number is not None:
        return False if _RELATION.search(sides.answer) else None
    return False if sides.number is not None and _RELATION.search(sides.truth) else None


def _right_sides(sides: _Sides) -> bool | None:
    """Equations with the same left side, such as F_n = ..., are read on their right sides alone."""
    true_left, _, true_right = sides.truth.partition("=")
    left, _, right = sides.answer.partition("=")
    if not true_right or compact(true_left) != compact(left) or "=" in true_right + right:
        return None
    return quick_comparison(true_right, right) if right else False


def _equation(sides: _Sides) -> bool | None:
    """An answer such as f(2) = 7 or 2 + 3 = 5, every side of which has to be right."""
    if _says_another(sides.truth, sides.true_number, sides.answer):
        return False
    last = _last_side(sides.truth, sides.answer)
    return quick_comparison(sides.truth, last) if last else None


def _named_value(sides: _Sides) -> bool | None:
    """The value alone where the ground truth names it: 2 for x = 2."""
    name, _, value = sides.truth.partition("=")
    if not value or "=" in value + sides.answer or not _LEFT.fullmatch(name):
        return None
    return True if quick_comparison(value, sides.answer) else None


def _solution(sides: _Sides) -> bool | None:
    """(1, 2) for x = 1, y = 2: in the order of the names, or in which they are listed."""
    named = [entry.strip().partition("=") for entry in parted(sides.truth) or ()]
    tuple_of = re.fullmatch(r"\((.*)\)", sides.answer)
    values = parted(tuple_of[1]) if tuple_of else None
    if values is None or not 1 < len(named) == len(values) == len({name for name, *_ in named}):
        return None
    if not all(_LEFT.fullmatch(name) and value for name, _, value in named):
        return None
    same = [
        [quick_comparison(entry[2], value) for entry, value in zip(order, values, strict=True)]
        for order in (named, sorted(named))
    ]
    if any(all(pairs) for pairs in same):
        return True
    return False if all(False in pairs for pairs in same) else None


def _same_words(sides: _Sides) -> bool | None:
    """Words, in whatever case and with or without an article."""
    true_words = words(sides.truth)
    answer_words = words(sides.answer)
    if true_words and true_words == answer_words:
        if _VARIABLE.fullmatch(sides.truth):
            return False
        if not _FORMULA.search(_UNWRAPPED.sub("", sides.truth)):
            return True
    plain = _plain_words(true_words)
    return True if plain and plain == _plain_words(answer_words) else None


def _choices(sides: _Sides) -> bool | None:
    """Letters of a multiple choice: (A), "A, B and C", "(C) 12"."""
    true_words = words(sides.truth)
    answer_words = words(sides.answer)
    if _LETTERS.fullmatch(true_words) and _LETTERS.fullmatch(answer_words):
        true_letters = re.findall(r"\b[a-j]\b", true_words)
        return sorted(true_letters) == sorted(re.findall(r"\b[a-j]\b", answer_words))
    choice = _CHOICE.fullmatch(true_words.upper())
    if choice is None or len(true_words.strip("()")) != 1:
        return None
    offered = _CHOICE.fullmatch(answer_words.upper())
    return None if offered is None else offered[1] == choice[1]


def _percentage(sides: _Sides) -> bool | None:
    """A percent sign on one side alone, with a plain number on either."""
    one_has_it = bool(_PERCENT.search(sides.truth)) != bool(_PERCENT.search(sides.answer))
    return False if one_has_it and (sides.true_number or sides.number) else None


Rule = Callable[[_Sides], bool | None]
# In this order. Each says whether the two are the same, or None where it does not know.
_RULES: tuple[Rule, ...] = (_congruence, _handed_back, _measure)
_RULES_OF_FORMULAS: tuple[Rule, ...] = (
    _relation,
    _right_sides,
    _equation,
    _named_value,
    _solution,
    _same_words,
    _choices,
    _percentage,
)


def _first_verdict(rules: tuple[Rule, ...], sides: _Sides) -> bool | None:
    for rule in rules:
        same = rule(sides)
        if same is not None:
            return same
    return None


def _last_side(ground_truth: str, answer: str) -> str:
    r"""The value of an answer such as f(2) = 7, \lim ... = 1 or 2 + 3 = 5; "" of an equation that
    is to be solved."""
    *sides, last = _sides(answer)
    if not 0 < len(sides) < _MOST_SIDES or "=" in ground_truth or _BASE.search(last):
        return ""
    number = plain_number(ground_truth)
    if "," in ground_truth and "," in "".join(sides) and (number is None or number.decimal_comma):
        return ""
    evaluated = all(
        _UNEVALUATED.search(side)
        or _LEFT.fullmatch(side)
        or not re.search("[a-zA-Z]", _COMMAND.sub("", side))
        for side in sides
    )
    return last if evaluated and re.search(r"\d|\\infty|\\pi", last) else ""


def _sides(text: str) -> list[str]:
    """Split at top-level equals signs."""
    return parted(text, "=") or [text]


def _says_another(ground_truth: str, true_number: PlainNumber | None, answer: str) -> bool:
    """Whether an earlier side of an equation clearly has another value than the last: 33 = 34 is
    not 34."""
    if "=" in ground_truth or "." in ground_truth or _OTHER_MEASURE.search(answer):
        return False
    sides = answer.split("=")[:-1][:_MOST_SIDES]
    if true_number is not None:
        if true_number.decimal_comma or true_number.base is not None:
            return False
        ground_truth, *sides = (_THOUSANDS.sub("", text) for text in (ground_truth, *sides))
    return any(same_value(ground_truth, side) is False for side in sides)


def _plain_words(text: str) -> str:
    """text without an article or "the answer is" before it; "" unless letters and spaces are all
    there is."""
    text = re.sub(r"^(?:the answer is|an|a|the) ", "", text)
    text = re.sub(r"^(yes|no)\b[,;.:].*", r"\1", text)
    return _SAID_ALIKE.get(text, text if re.fullmatch(r"[a-z][a-z ]+", text) else "")


def _same_ratio_or_time(ground_truth: str, answer: str) -> bool | None:
    """Ratios (3:4:5) and times of day; None where the two are neither."""
    true_time = time_of_day(ground_truth)
    answer_time = time_of_day(answer)
    if true_time and answer_time:
        return true_time[0] == answer_time[0] if true_time[1] and answer_time[1] else None
    if _RATIO.fullmatch(ground_truth) and _RATIO.fullmatch(answer):
        true_parts, parts = (
            [int(part) for part in re.split(r"\s*:\s*", text)] for text in (ground_truth, answer)
        )
        if len(true_parts) != len(parts):
            return False
        return all(
            a * parts[0] == b * true_parts[0] for a, b in zip(true_parts, parts, strict=True)
        )
    return None


def _same_quantity(
    true_quantity: Quantity | None, answer_quantity: Quantity | None, ground_truth: str, answer: str
) -> bool | None:
    if true_quantity and answer_quantity:
        return _converted(true_quantity, answer_quantity)
    # 1 million is a number
    if "count^1" in {side.dimension for side in (true_quantity, answer_quantity) if side}:
        unity = Fraction(1)
        true_quantity = true_quantity or Quantity(ground_truth, "count^1", unity)
        return _converted(true_quantity, answer_quantity or Quantity(answer, "count^1", unity))
    # A unit that one of the two leaves out is the problem's.
    true_value = true_quantity.value if true_quantity else ground_truth
    return quick_comparison(true_value, answer_quantity.value if answer_quantity else answer)


def _converted(ground_truth: Quantity, answer: Quantity) -> bool | None:
    if ground_truth.dimension.removesuffix("^1") != answer.dimension.removesuffix("^1"):
        return False
    if ground_truth.scale == answer.scale:
        return quick_comparison(ground_truth.value, answer.value)
    true_number = plain_number(ground_truth.value.strip())
    answer_number = plain_number(answer.value.strip())
    if true_number is None or answer_number is None:
        return False
    return true_number.value * ground_truth.scale == answer_number.value * answer.scale


def _same_number(ground_truth: PlainNumber, answer: PlainNumber) -> bool | None:
    if ground_truth.base is not None or answer.base is not None:
        return ground_truth.base == answer.base and ground_truth.digits == answer.digits
    if ground_truth.value == answer.value:
        return True
    if ground_truth.decimal_comma or answer.decimal_comma:
        return None
    if ground_truth.exact and answer.exact:
        return False
    if ground_truth.exact and _terminates(ground_truth.value):
        return False  # who writes 6.0000001 for 6 has not found it
    difference = abs(ground_truth.value - answer.value)
    return difference <= ABSOLUTE_TOLERANCE and difference <= RELATIVE_TOLERANCE * abs(
        ground_truth.value
    )


def _terminates(value: Fraction) -> bool:
    """Whether value has finitely many decimals, so that a decimal need not be a rounding of it."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0

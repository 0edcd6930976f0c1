"""Decides whether two answers are equivalent, as far as possible without a computer algebra system."""

import re
from dataclasses import dataclass
from fractions import Fraction

from vapo_megatron.rewards.normal_form import PlainNumber, compact, normal_form, plain_number, words
from vapo_megatron.rewards.values import parted, same_value

# For each dimension and unit: its size in the dimension's first unit, and its names.
_TABLE = {
    "length": """1 m meter meters metre metres; 1/100 cm centimeter centimeters centimetre centimetres;
        1/1000 mm millimeter millimeters; 1000 km kilometer kilometers kilometre kilometres;
        254/10000 in inch inches; 3048/10000 ft foot feet; 9144/10000 yd yard yards; 1609344/1000 mi mile miles""",
    "time": """1 s sec second seconds; 60 min minute minutes; 3600 h hr hrs hour hours; 86400 day days;
        604800 week weeks""",
    "month": "1 month months; 12 year years",
    "mass": "1 g gram grams; 1000 kg kilogram kilograms; 45359237/100000 lb lbs",
    "volume": "1 l liter liters litre litres; 1/1000 ml milliliter milliliters",
    "dollar": "1 dollar dollars $; 1/100 cent cents",
    "euro": "1 euro euros €",
    "sterling": "1 £",
    "count": "12 dozen; 100 hundred; 1000 thousand; 1000000 million; 1000000000 billion; 1000000000000 trillion",
    "speed": "1 m/s; 1000/3600 km/h kph; 1609344/3600000 mph milesperhour miles/hour",
}
_UNITS = {
    name: (dimension, Fraction(unit.split()[0]))
    for dimension, units in _TABLE.items()
    for unit in units.split(";")
    for name in unit.split()[1:]
}
_WRITTEN = re.compile(
    r"(?P<value>.*?[\d)}.])\s*(?:\\text|\\mathrm|\\textrm|\\mbox|\\operatorname)\s*\{\s*(?P<unit>[A-Za-z./ ]+?)\.?\s*\}"
    r"(?:\^\{?(?P<power>[23])\}?)?|(?P<plain>[-+\d.,/ ]*\d)\s*(?P<word>[A-Za-z]{2,}(?:[ /][A-Za-z]+)*)"
    r"(?:\^\{?(?P<exponent>[23])\}?)?",
    re.DOTALL,
)
_SIGN = re.compile(r"(?P<minus>-?)(?:\\text\{\s*)?\\?(?P<sign>[$€£])\s*\}?\s*(?P<value>.+)", re.DOTALL)
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d))?\s*(?P<half>[ap])\.?\s*m\.?|(?P<h24>\d{1,2}):(?P<m24>\d\d)"
)
_UNWRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value as text and its unit; scale is in the first unit of the dimension (metre, second, dollar)."""

    value: str
    dimension: str
    scale: Fraction


def quantity(text: str) -> Quantity | None:
    """The quantity that a text in normal form states, or None where there is no unit that this module knows."""
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
    return Quantity((match["value"] or match["plain"]).strip(), f"{dimension}^{power}", scale**power)


def time_of_day(text: str) -> tuple[int, bool] | None:
    """(minutes since midnight, whether the half of the day is stated) of 4:30 p.m., 9 AM or 16:30, or None."""
    match = _CLOCK.fullmatch(_UNWRAPPED.sub(r"\1", text).casefold().strip())
    if not match:
        return None
    if match["h24"]:
        return int(match["h24"]) * 60 + int(match["m24"]), int(match["h24"]) > 12
    hour = int(match["hour"]) % 12 + (12 if match["half"] == "p" else 0)
    return hour * 60 + int(match["minute"] or 0), True


# A decimal stands for every number that it is a rounding of: 0.333333 for 1/3 (six places, as math-verify has it),
# but not 0.0000001 for 0.0000002.
ABSOLUTE_TOLERANCE = Fraction(1, 2_000_000)
RELATIVE_TOLERANCE = Fraction(1, 100_000)

_CHOICE = re.compile(r"\(?([A-J])\)?(?:[.):]\s*\S.*)?", re.DOTALL)
_LETTERS = re.compile(r"\(?[a-j]\)?(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+)\(?[a-j]\)?)+")
_RATIO = re.compile(r"\d+(?: ?:\s?\d+)+")
_VARIABLE = re.compile(r"\d+[A-Za-z]")  # 2B is not 2b
_FORMULA = re.compile(r"[\d^_+*/=\\-]")  # in which R is not r
# Relations, and what joins several answers: "33 or 34" is not 34, but the cup of P(A \cup B) = 0.5 is not the answer.
_RELATION = re.compile(
    r"[<>\u2228]|\\(?:le|leq|ge|geq|lt|gt|ne|neq|leqslant|geqslant|lor|vee)(?![a-zA-Z])|\\c[ua]p(?![a-zA-Z])[^=]*$"
)
# The sides of \pi/3 = 60^\circ are not both 60, nor those of 2x = 68 \implies x = 34 all 34.
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
_PERCENT = re.compile(r"%|\bpercent|\bpct\b", re.IGNORECASE)
_BASE = re.compile(r"(?<![a-zA-Z])\d_\{?\d")


def quick_comparison(ground_truth: str, answer: str) -> bool | None:
    """Compare two answers as strings and plain numbers; None: mathematics is needed to tell.

    Percent is part of the value (50 % is 1/2, 10 % is not 10), and so is a written base (1101_2 is not 1101).
    """
    written = ground_truth, answer
    ground_truth, answer = normal_form(ground_truth), normal_form(answer)
    if not ground_truth or not answer:
        return False
    if compact(ground_truth) == compact(answer):
        return True
    if _UNEVALUATED.search(_sides(answer)[-1]) and not _UNEVALUATED.search(ground_truth):
        return False
    true_quantity = quantity(written[0].strip()) or quantity(ground_truth)
    answer_quantity = quantity(written[1].strip()) or quantity(answer)
    if true_quantity or answer_quantity:
        same = _same_quantity(true_quantity, answer_quantity, ground_truth, answer)
    else:
        same = _same_ratio_or_time(ground_truth, answer)
    if same is not None:
        return same
    true_number, answer_number = plain_number(ground_truth), plain_number(answer)
    if true_number is not None and answer_number is not None:
        return _same_number(true_number, answer_number)
    if true_number is not None and _RELATION.search(answer):
        return False
    if _says_another(ground_truth, true_number, answer):
        return False
    if (last := _last_side(ground_truth, answer)) and (same := quick_comparison(ground_truth, last)) is not None:
        return same
    name, _, value = ground_truth.partition("=")
    if value and "=" not in value + answer and _LEFT.fullmatch(name) and quick_comparison(value, answer):
        return True
    true_words, answer_words = words(ground_truth), words(answer)
    if true_words and true_words == answer_words:
        if _VARIABLE.fullmatch(ground_truth):
            return False
        if not _FORMULA.search(_UNWRAPPED.sub("", ground_truth)):
            return True
    if _plain_words(true_words) and _plain_words(true_words) == _plain_words(answer_words):
        return True
    if _LETTERS.fullmatch(true_words) and _LETTERS.fullmatch(answer_words):
        return sorted(re.findall(r"\b[a-j]\b", true_words)) == sorted(re.findall(r"\b[a-j]\b", answer_words))
    if len(true_words.strip("()")) == 1 and (choice := _CHOICE.fullmatch(true_words.upper())):
        offered = _CHOICE.fullmatch(words(answer).upper())
        if offered is not None:
            return offered[1] == choice[1]
    if bool(_PERCENT.search(ground_truth)) != bool(_PERCENT.search(answer)) and (true_number or answer_number):
        return False
    return same_value(ground_truth, answer)


def _last_side(ground_truth: str, answer: str) -> str:
    r"""The value of an answer such as f(2) = 7, \lim ... = 1 or 2 + 3 = 5; "" of an equation that is to be solved."""
    *sides, last = _sides(answer)
    if not 0 < len(sides) < _MOST_SIDES or "=" in ground_truth or _BASE.search(last):
        return ""
    number = plain_number(ground_truth)
    if "," in ground_truth and "," in "".join(sides) and (number is None or number.decimal_comma):
        return ""
    evaluated = all(
        _UNEVALUATED.search(side) or _LEFT.fullmatch(side) or not re.search("[a-zA-Z]", _COMMAND.sub("", side))
        for side in sides
    )
    return last if evaluated and re.search(r"\d|\\infty|\\pi", last) else ""


def _sides(text: str) -> list[str]:
    """Split at top-level equals signs."""
    return parted(text, "=") or [text]


def _says_another(ground_truth: str, true_number: PlainNumber | None, answer: str) -> bool:
    """Whether an earlier side of an equation clearly has another value than the last: 33 = 34 is not 34."""
    if "=" in ground_truth or "." in ground_truth or _OTHER_MEASURE.search(answer):
        return False
    sides = answer.split("=")[:-1][:_MOST_SIDES]
    if true_number is not None:
        if true_number.decimal_comma or true_number.base is not None:
            return False
        ground_truth, *sides = (_THOUSANDS.sub("", text) for text in (ground_truth, *sides))
    return any(same_value(ground_truth, side) is False for side in sides)


def _plain_words(text: str) -> str:
    """text without an article or "the answer is" before it; "" unless letters and spaces are all there is."""
    text = re.sub(r"^(?:the answer is|an|a|the) ", "", text)
    text = re.sub(r"^(yes|no)\b[,;.:].*", r"\1", text)
    return _SAID_ALIKE.get(text, text if re.fullmatch(r"[a-z][a-z ]+", text) else "")


def _same_ratio_or_time(ground_truth: str, answer: str) -> bool | None:
    """Ratios (3:4:5) and times of day; None where the two are neither."""
    true_time, answer_time = time_of_day(ground_truth), time_of_day(answer)
    if true_time and answer_time:
        return true_time[0] == answer_time[0] if true_time[1] and answer_time[1] else None
    if _RATIO.fullmatch(ground_truth) and _RATIO.fullmatch(answer):
        true_parts, parts = ([int(part) for part in re.split(r"\s*:\s*", text)] for text in (ground_truth, answer))
        if len(true_parts) != len(parts):
            return False
        return all(a * parts[0] == b * true_parts[0] for a, b in zip(true_parts, parts, strict=True))
    return None


def _same_quantity(
    true_quantity: Quantity | None, answer_quantity: Quantity | None, ground_truth: str, answer: str
) -> bool | None:
    if true_quantity and answer_quantity:
        return _converted(true_quantity, answer_quantity)
    if "count^1" in {side.dimension for side in (true_quantity, answer_quantity) if side}:  # 1 million is a number
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
    true_number, answer_number = plain_number(ground_truth.value.strip()), plain_number(answer.value.strip())
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
    return difference <= ABSOLUTE_TOLERANCE and difference <= RELATIVE_TOLERANCE * abs(ground_truth.value)


def _terminates(value: Fraction) -> bool:
    """Whether value has finitely many decimals, so that a decimal need not be a rounding of it."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0

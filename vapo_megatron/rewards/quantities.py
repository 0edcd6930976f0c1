r"""Units, currency and times of day as problem sets write them: 35 \mathrm{~cm}, \$40, 4:30 p.m."""

import re
from dataclasses import dataclass
from fractions import Fraction

# dimension: names of each unit and how many of the dimension's first unit it is
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "1": "m meter meters metre metres",
        "1/100": "cm centimeter centimeters centimetre centimetres",
        "1/1000": "mm millimeter millimeters",
        "1000": "km kilometer kilometers kilometre kilometres",
        "254/10000": "in inch inches",
        "3048/10000": "ft foot feet",
        "9144/10000": "yd yard yards",
        "1609344/1000": "mi mile miles",
    },
    "time": {
        "1": "s sec second seconds",
        "60": "min minute minutes",
        "3600": "h hr hrs hour hours",
        "86400": "day days",
        "604800": "week weeks",
    },
    "month": {"1": "month months", "12": "year years"},
    "mass": {"1": "g gram grams", "1000": "kg kilogram kilograms", "45359237/100000": "lb lbs"},
    "volume": {"1": "l liter liters litre litres", "1/1000": "ml milliliter milliliters"},
    "dollar": {"1": "dollar dollars $", "1/100": "cent cents"},
    "euro": {"1": "euro euros €"},
    "sterling": {"1": "£"},
    "count": {
        "12": "dozen",
        "100": "hundred",
        "1000": "thousand",
        "1000000": "million",
        "1000000000": "billion",
        "1000000000000": "trillion",
    },
    "speed": {"1": "m/s", "1000/3600": "km/h kph", "1609344/3600000": "mph milesperhour miles/hour"},
}
_UNITS = {
    name: (dimension, Fraction(factor))
    for dimension, units in _TABLE.items()
    for factor, names in units.items()
    for name in names.split()
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
    known = _UNITS.get("".join(named))
    if known is None:
        return None
    dimension, scale = known
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

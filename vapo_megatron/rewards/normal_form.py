r"""One spelling for answers that differ in typesetting only, and plain numbers read without
sympy."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# Signs of Unicode that have one in ASCII (minus signs, hyphens, spaces, full-width ones), or a
# command.
_ASCII = dict(
    zip(
        "\u2212\u2013\u2010\u2011\ufe63\uff0d\u00a0\u202f\u2009\uff0c\uff08\uff09",
        "------   ,()",
        strict=True,
    )
)
_COMMANDS = r"×\times ·\cdot ÷\div π\pi ∞\infty ≤\le ≥\ge ≠\ne ∈\in ∪\cup ∩\cap °^\circ"
_CHARACTERS = str.maketrans(
    _ASCII
    | {command[0]: f"{command[1:]} " for command in _COMMANDS.split()}
    | {"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"}
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
)
_SUBSTITUTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\u221a\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        # typefaces, and letters set upright: \mathrm{e}^{\mathrm{i}\pi}. Those that are units stay
        # as they are.
        (
            r"\\(?:textbf|textit|textsc|emph|underline|mathbf|mathit|mathsf|boldsymbol|bm)\s*\{([^{}]*)\}",
            r"\1",
        ),
        (r"\\(?:boldsymbol|bm|mathbf|textbf)\s*\{(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})\}", r"\1"),
        (r"\\(?:mathrm|text|textrm)\s*\{\s*([a-fijknopqrt-z])\s*\}", r" \1"),
        # a number in words' type, with what follows it: \text{12 cm}
        (r"^\\(?:text|textrm|mathrm|mbox)\s*\{\s*([-+]?\d[^{}\\]*?)\s*\}$", r"\1"),
        # the spelling of programs: sqrt(2)*pi/2, exp(16), x**2
        (r"(?<![a-zA-Z\\])\\?(sqrt)\s*\(([^()]*)\)", r"\\sqrt{\2}"),
        (r"(?<![a-zA-Z\\])exp\s*\(([^()]*)\)", r"e^{\1}"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<=[\w)])\s*\*\*\s*(?=[\w(])", "^"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"^\{?([^{}]+?)\s*\\choose(?![a-zA-Z])\s*([^{}]+?)\}?$", r"\\binom{\1}{\2}"),
        (r"(?<=[\d)])_\{?\((\d{1,2})\)\}?", r"_{\1}"),
        (r"(?<=\d)(?:[eE]|\\mathrm\{E\})([-+]?\d{1,3})$", r"\\times 10^{\1}"),
        (
            r"(?:\s|~|\\ |,)*\\(?:text|textrm|mathrm|mbox)\{[\s~]*,?\s*and[\s~]*\}(?:\s|~|\\ )*"
            r"|,\s*and\s+(?=-?\d)",
            ", ",
        ),
        (r"\s*\\(?:text|textrm|mathrm|mbox)\{\s*(?:\\?%|percent|pct)\s*\}", r"\%"),
        (r"(?<=[\d)}])\$?\s+and\s+\$?(?=[-\d(\\]|[a-zA-Z]=)", ", "),
        (r"^\((\d+)\)_", r"\1_"),
        (r"^(\d+) (\d{1,2}/\d{1,2})$", r"\1+\2"),
        (r"^-(\d+) (\d{1,2})/(\d{1,2})$", r"-\1\\frac{\2}{\3}"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        # \frac \pi 2 and \frac {n^2} 4, of which math-verify reads a part
        (r"\\frac\s*(\\pi|(?<=\s)[a-zA-Z]|\d)\s*(\\pi|\d|[a-zA-Z])(?![a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([a-zA-Z])(?![a-zA-Z])", r"\1{\2}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\frac\s*\{", r"\\frac{"),
        (r"\\sqrt\s*([0-9a-zA-Z])(?![a-zA-Z])", r"\\sqrt{\1}"),
        # thousands: 1\,000 1{,}000 1~000 1\!000 and so on, before thin spaces go
        (r"(?<=\d)(?:\\[,;:! ]|~|\{,\}|\{\\,\}|,\\!)+(?=\d{3}(?!\d))", ""),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"\\(?:left|right|bigg?[lr]?|Bigg?[lr]?)(?![a-zA-Z])\.?", ""),
        (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])", " "),
        (r"\\\$|^\$(?=\d)", ""),
        (r"\s+", " "),
        (r"\s*([-+*/=()\[\]{}<>^_|&])\s*", r"\1"),
        # mixed numbers: 2 \frac{1}{3}
        (r"^([-+]?\d+) (?=\\frac\{\d+\}\{\d+\}(?: ?\\?%)?[.,;: ]*$)", r"\1"),
        # \{x \mid x > 2\}, of which math-verify reads the 2
        (
            r"^\\?\{[a-zA-Z](?:\s*\\in\s*(?:\\mathbb\{R\}|R))?\s*(?:\\middle)?"
            r"(?:\||\\mid(?![a-zA-Z])|\u2223|:)\s*"
            r"([^,;]*(?:[<>]|\\(?:le|ge|lt|gt)(?:q|qslant)?(?![a-zA-Z]))[^,;]*?)\s*\\?\}$",
            r"\1",
        ),
    )
)
# Rows of a system of equations, as \begin{cases} x = 1 \\ y = 2 \end{cases}
_SYSTEM = re.compile(r"\\begin\{cases\}(?P<rows>[^&]*)\\end\{cases\}")
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?")
_SOLVED = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?\s*=[^=]+")
_BASES = dict(
    two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, twelve=12, sixteen=16
)
_BASE_WORD = re.compile(rf"_\{{?\\text\{{\s*({'|'.join(_BASES)})\s*\}}\}}?")
# commands whose backslash came doubled from JSON or a program text; a matrix has true double ones
_DOUBLED = re.compile(
    r"\\\\(?=(?:[dtc]?frac|sqrt|left|right|text|pi|infty|cup|cap|times|cdot|pm|le|ge|in)(?![a-zA-Z]))"
)
_ENCLOSURES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)

_UNSIGNED = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)[$€£¥]?(?:
      (?P<whole>\d+)?\\frac\{{(?P<num>-?\d+)\}}\{{(?P<den>\d+)\}}
    | (?P<top>{_UNSIGNED})/(?P<bottom>{_UNSIGNED})
    | (?P<comma>\d+,\d+)
    | (?P<plain>{_UNSIGNED})
    )\s*(?:_\{{?(?P<base>\d{{1,2}})\}}?)?
    (?P<suffix>\s*(?:\\?%|percent|percentage|pct|\^\{{?\\circ\s?\}}?|degrees?))?""",
    re.VERBOSE | re.IGNORECASE,
)
_LONGEST_NUMBER = (
    1_000  # characters; longer ones are text, so that no quadratic big-number conversion is reached
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number written out. digits and base are kept where a base is written (1101_2); percent is
    within value.

    decimal_comma marks 1,22 read as 1.22, which might also be a pair.
    """

    value: Fraction
    exact: bool
    base: int | None
    digits: str
    decimal_comma: bool


@lru_cache(maxsize=1024)  # each stage asks for it, and a group's responses share their ground truth
def normal_form(text: str) -> str:
    """One spelling of text: ASCII signs, \\frac and \\sqrt with braces, no sizing, thin spaces or
    enclosing $."""
    text = text.translate(_CHARACTERS).strip()
    text = _solution(_without_enclosure(text))
    if "\\begin" not in text:
        text = _DOUBLED.sub(lambda _: "\\", text)
    text = _BASE_WORD.sub(lambda match: f"_{{{_BASES[match[1]]}}}", text)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return _without_enclosure(text.strip().rstrip(".,;: "))


def _solution(text: str) -> str:
    """A system of equations that is solved as a list: x = 1, y = 2."""
    match = _SYSTEM.fullmatch(text)
    rows = [row.strip(" ,.;\n") for row in _ROW_END.split(match["rows"])] if match else []
    rows = [row for row in rows if row]
    return ", ".join(rows) if rows and all(map(_SOLVED.fullmatch, rows)) else text


def compact(text: str) -> str:
    """text without the spaces that do not part two numbers, for comparison as a string."""
    return re.sub(r"(?<!\d) +| +(?!\d)", "", text)


def unwrapped(text: str) -> str:
    """text with the contents of \\text{} and the like in place of them."""
    return _TEXT.sub(r" \1 ", text)


def words(text: str) -> str:
    """text in small letters with \\text{} and the like unwrapped and without its spaces at the
    ends."""
    return " ".join(unwrapped(text).casefold().split())


def plain_number(text: str) -> PlainNumber | None:
    """The number that a text in normal form spells, or None: integers, decimals, fractions, mixed
    numbers, percent."""
    if len(text) > _LONGEST_NUMBER or not (match := _NUMBER.fullmatch(text)):
        return None
    suffix = (match["suffix"] or "").strip().casefold()
    exact = True
    decimal_comma = False
    if match["num"] is not None:
        if int(match["den"]) == 0 or (match["whole"] and match["num"].startswith("-")):
            return None
        value = Fraction(int(match["num"]), int(match["den"])) + int(match["whole"] or 0)
    elif match["top"] is not None:
        bottom = _decimal(match["bottom"])
        if bottom == 0:
            return None
        value = _decimal(match["top"]) / bottom
    elif match["comma"] is not None and not re.fullmatch(r"[1-9]\d{0,2},\d{3}", match["comma"]):
        value = _decimal(match["comma"].replace(",", "."))
        exact = False
        decimal_comma = True
    else:
        digits = match["plain"] or match["comma"]
        value = _decimal(digits)
        exact = "." not in digits
    if match["base"] and (match["plain"] is None or not match["plain"].isdigit()):
        return None
    if match["sign"] == "-":
        value = -value
    if suffix.endswith(("%", "percent", "percentage", "pct")):
        value /= 100
    base = int(match["base"]) if match["base"] and int(match["base"]) != 10 else None
    digits = match["sign"].strip("+") + (match["plain"] or "").lstrip("0")
    return PlainNumber(value, exact, base, digits, decimal_comma)


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _without_enclosure(text: str) -> str:
    for opening, closing in _ENCLOSURES:
        inner = text[len(opening) : -len(closing)]
        if (
            len(text) > len(opening) + len(closing)
            and text.startswith(opening)
            and text.endswith(closing)
            and opening not in inner
            and closing not in inner
        ):
            return inner.strip()
    return text

r"""Finds the answer in a response: \boxed{}, an "Answer:" line, <answer> tags, or ####.

Plain string handling, linear in the length of the response; nothing here parses mathematics.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# auto: the marker that stands last, and the free text where there is none; marked: the same without
# free text; the others: that marker alone.
AnswerFormat = Literal["auto", "marked", "boxed", "answer_line", "answer_tag", "hash"]
Marker = Literal["boxed", "answer_line", "answer_tag", "hash", "bare", "free_text", "none"]

FREE_TEXT_TAIL = (
    2_000  # characters at the end of an unmarked response that are searched for an answer
)

# Behind a backslash; begins with letters so that the search is fast
_BOX = re.compile(r"(?:boxed|fbox)\b\s*")
_ANSWER_LINE = re.compile(
    r"\banswer\b[ \t*_`]{0,8}[:\uff1a]|^(?-i:A:)", re.IGNORECASE | re.MULTILINE
)
_TAG_OPENS = re.compile(r"<answer>", re.IGNORECASE)
_TAG_CLOSES = re.compile(r"</answer>", re.IGNORECASE)
# Up to the next marker on the line: "#### 5 #### 4" answers with 4, not with both.
_HASH = re.compile(r"(?<!#)####(?!#)(?P<body>(?:(?!####)[^\n])*)")
_NEXT_TURN = re.compile(r"<\|im_start\|>\s*user\b|(?:<\|(?:im_end|endoftext|eot_id)\|>|</s>)\s*$")
# Lines with nothing but marks that open a formula or bold text.
_OPENING_LINES = re.compile(r"(?:(?:[ \t\r*_`$]|\\[\[(])*\n)*")
_PERCENT_AFTER = re.compile(r"\s*\$?\s*(?:\\?%|percent\b|pct\b)", re.IGNORECASE)
# Boxes that belong to one answer: nothing but a few words with "and", "or" or a comma lies between
# them.
_JOINED = re.compile(
    r"[^.\n]{0,40}(?:\band\b|\bor\b|,|\\quad)[^.\n]{0,40}|[\s$]{0,4}", re.IGNORECASE
)
_SECOND_THOUGHT = re.compile(
    r"\b(?:wait|actually|no|not|instead|sorry|rather|correction|but)\b", re.IGNORECASE
)
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s*\{|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_BRACE = re.compile(r"\\.|[{}]")
_SEPARATOR = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_CURRENCY = re.compile(r"\\?[$£€](?=\d[\d,.]*(?:\s|[.,;]*$))", re.MULTILINE)
_CLOSING_LIST = re.compile(
    r"(?:\b(?:is|are|be)|:)\s+((?:-?[\d./]+\s*,\s*)*-?[\d./]+,?\s+and\s+-?[\d./]*\d)[.\s]*$"
)
_SENTENCE = re.compile(r"[a-z]\s+(?:is|are)\s")
_LONGEST_BARE = 300
_MOST_BARE_WORDS = 3


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer's text, "" if there is none, and the marker that it was found by."""

    text: str
    marker: Marker


NOTHING = Extraction("", "none")


def extract_answer(response: str, answer_format: AnswerFormat = "auto") -> Extraction:
    """Find the answer of a response.

    What counts is the text after the last </think>; a <think> that is not closed holds no answer.
    Of several markers the last one counts; boxes joined by "and", "or" or a comma are one answer. A
    box cut off by the end of the response is no answer.
    """
    text = final_part(response)
    tagged = _last_tag(text) if answer_format in ("auto", "marked", "answer_tag") else None
    extraction = _last_marker(text if tagged is None else tagged, answer_format)
    if extraction.text:
        return extraction
    if tagged is not None:
        return _inside(tagged, "answer_tag")
    if answer_format != "auto" or extraction.marker != "none":
        return NOTHING
    text = text.strip()
    return (
        Extraction(text, "bare")
        if is_bare(text) and not _SENTENCE.search(text)
        else Extraction(text[-FREE_TEXT_TAIL:], "free_text")
    )


def final_part(response: str) -> str:
    """The response after its last closed thought and before any next turn; "" inside a thought that
    never closes."""
    text = response.rpartition("</think>")[2]
    if "<think>" in text:
        return ""
    end = _NEXT_TURN.search(text) if "<|" in text or "</s>" in text else None
    return text[: end.start()] if end else text


def boxed(text: str) -> str:
    """All boxes of text joined by commas, each content once; "" without a box. For reference
    solutions."""
    return ", ".join(dict.fromkeys(content for _, _, content in _boxes(text) if content))


def is_bare(text: str) -> bool:
    """Whether text is an answer by itself (a number, a formula, a few words) and not a sentence."""
    if len(text) > _LONGEST_BARE or not text.strip() or "\n" in text.strip():
        return False
    return count_words(text) <= _MOST_BARE_WORDS


def closing_list(text: str) -> str:
    """The numbers that free text ends with (2, 3 and 5), joined by commas; "" where it ends
    otherwise."""
    match = _CLOSING_LIST.search(text[-_LONGEST_BARE:])
    return re.sub(r",?\s+and\s+", ", ", match[1]) if match else ""


def without_separators(text: str) -> str:
    """Free text whose numbers have no thousands separators and no signs of currency before them."""
    return _CURRENCY.sub("", _SEPARATOR.sub("", text))


def count_words(text: str) -> int:
    """Number of words of two or more letters in text, not counting LaTeX commands."""
    return len(_WORD.findall(_COMMAND.sub(" ", text)))


def _last_tag(text: str) -> str | None:
    """The content of the last closed <answer>, or None."""
    closings = list(_TAG_CLOSES.finditer(text)) if "</" in text else []
    if not closings:
        return None
    openings = list(_TAG_OPENS.finditer(text, 0, closings[-1].start()))
    return text[openings[-1].end() : closings[-1].start()] if openings else None


def _last_marker(text: str, answer_format: AnswerFormat) -> Extraction:
    """The last marker of text with its answer; a marker that holds nothing has no text."""
    candidates: dict[int, Extraction] = {}  # by where they stand
    anything = answer_format in ("auto", "marked")
    if anything or answer_format == "boxed":
        start, content = _last_box(text)
        if start >= 0:
            candidates[start] = Extraction(content, "boxed")
    if anything or answer_format == "answer_line":
        lines = list(_ANSWER_LINE.finditer(text))
        if lines:
            opening = _OPENING_LINES.match(text, lines[-1].end())
            assert opening is not None
            answer = _inside(text[opening.end() :].partition("\n")[0], "answer_line")
            # Prose after a box ("The answer is \boxed{5}. Check the answer: it fits.") does not
            # take the box back.
            if not candidates or is_bare(answer.text):
                candidates[lines[-1].start()] = answer
    if anything or answer_format == "hash":
        matches = _HASH.finditer(text) if "####" in text else iter(())
        hashes = [match for match in matches if is_bare(match["body"]) or answer_format == "hash"]
        if hashes:
            candidates[hashes[-1].start()] = _inside(hashes[-1]["body"], "hash")
    return candidates[max(candidates)] if candidates else NOTHING


def _inside(body: str, marker: Marker) -> Extraction:
    """The answer within what a marker encloses: a box if there is one, else all of it without its
    Markdown."""
    start, content = _last_box(body)
    return Extraction(content if start >= 0 else body.strip(" \t\r\n*_`"), marker)


def _last_box(text: str) -> tuple[int, str]:
    """(start, content) of the last box with those it is joined to; start -1: there is none; "": it
    is cut off."""
    boxes = list(_boxes(text))
    if not boxes:
        return -1, ""
    start, end, content = boxes[-1]
    if not content:
        return start, ""
    contents = [content + ("%" if _PERCENT_AFTER.match(text, end) else "")]
    for earlier in reversed(boxes[:-1]):
        between = text[earlier[1] : start]
        if not earlier[2] or not _JOINED.fullmatch(between) or _SECOND_THOUGHT.search(between):
            break
        start = earlier[0]
        contents.insert(0, earlier[2])
    return start, ", ".join(dict.fromkeys(contents))


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, content) of every box, outermost first; the content of one that never closes is
    ""."""
    position = 0
    if "box" not in text:
        return
    while match := _BOX.search(text, position):
        start = match.start()
        brace = match.end()
        if text[start - 1 : start] != "\\":
            position = brace
            continue
        while text[start - 1 : start] == "\\":
            start -= 1
        if brace >= len(text):
            yield start, brace, ""
            return
        if text[brace] != "{":
            content = re.match(r"[^\s$.,;\\]*", text[brace:])
            assert content is not None
            position = brace + content.end()
            if content[0]:
                yield start, position, content[0]
            continue
        end = _closing_brace(text, brace)
        if end < 0:
            yield start, len(text), ""
            return
        yield start, end + 1, text[brace + 1 : end].strip()
        position = end


def _closing_brace(text: str, opening: int) -> int:
    r"""The position of the brace that closes the one at opening, or -1; \{ and \} are not
    counted."""
    depth = 0
    for match in _BRACE.finditer(text, opening):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1

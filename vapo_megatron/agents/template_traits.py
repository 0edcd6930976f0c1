"""What a chat template can tell apart in messages, read from its source."""

import re
from dataclasses import dataclass

from jinja2 import TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Methods of a text that look for another one in it; strip() and its like only take off an end.
_SEARCHING = {
    "count",
    "endswith",
    "find",
    "index",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "split",
    "startswith",
}
# What a message's place or a text's letters decide, beyond what an outline keeps.
_ODD_FILTERS = {"batch", "groupby", "hash", "random", "slice", "sort", "sum", "unique", "wordcount"}
_ODD_TESTS = {"divisibleby", "even", "ge", "gt", "le", "lt", "odd"}
_ODD_METHODS = {"cycle", "isalnum", "isalpha", "isdigit", "isnumeric", "splitlines"}
_ODD_OPERATIONS = (nodes.Mod, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Pow)
_LARGEST_NUMBER = 9
# transformers' own tag, which marks what an assistant wrote.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_CONVERSATION = {"content", "m", "message", "messages", "msg"}


@dataclass(frozen=True)
class TemplateTraits:
    """What a template looks for.

    Attributes:
        marks: texts that it looks for inside others, and where they are.
        present: texts of which it only looks whether another has them.
        words: texts that it compares others with.
        largest: the largest number in it: it cannot count further.
        ignores_case: whether it also reads texts with their case changed.
    """

    marks: tuple[str, ...]
    present: tuple[str, ...]
    words: frozenset[str]
    largest: int
    ignores_case: bool


def read_traits(source: str) -> TemplateTraits | None:
    """None: messages cannot be shortened for this template, as it computes with places or
    lengths, or counts to more than a few."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION.sub("", source))
    except TemplateSyntaxError:
        return None
    if _is_odd(tree):
        return None
    marks = set[str]()
    present = set[str]()
    words = set[str]()
    for node in tree.find_all(nodes.Compare):
        for operand in node.ops:
            words |= _texts(operand.expr)
            if operand.op in ("in", "notin"):
                present |= _texts(node.expr)
            else:
                words |= _texts(node.expr)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHING:
            for argument in call.args:
                marks |= _texts(argument)
    for applied in tree.find_all((nodes.Filter, nodes.Test)):
        for argument in applied.args:
            words |= _texts(argument)
            marks |= _texts(argument) if applied.name == "replace" else set()
    for name in tree.find_all(nodes.Assign):  # {% set mark = "</think>" %}
        if isinstance(name.node, nodes.Const) and isinstance(name.node.value, str):
            marks.add(name.node.value)
            words.add(name.node.value)
    called = {node.attr for node in tree.find_all(nodes.Getattr)}
    filters = {node.name for node in tree.find_all(nodes.Filter)}
    return TemplateTraits(
        tuple(sorted(filter(None, marks), key=lambda mark: (-len(mark), mark))),
        tuple(sorted(filter(None, present - marks))),
        frozenset(words),
        _largest(tree),
        bool((called | filters) & {"capitalize", "lower", "title", "upper"}),
    )


def _texts(node: nodes.Node) -> set[str]:
    constants = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
    return {constant.value for constant in constants if isinstance(constant.value, str)}


def _is_odd(tree: nodes.Template) -> bool:
    """Whether it has something that an outline of messages cannot answer for."""
    # A `%` after a text puts values into it
    computes = any(
        not (isinstance(node, nodes.Mod) and isinstance(node.left, nodes.Const | nodes.Concat))
        for node in tree.find_all(_ODD_OPERATIONS)
    )
    searches = any(
        isinstance(call.node, nodes.Getattr)
        and call.node.attr in _SEARCHING
        and not all(isinstance(argument, nodes.Const | nodes.Name) for argument in call.args)
        for call in tree.find_all(nodes.Call)
    )
    return (
        computes
        or searches
        or any(node.name in _ODD_FILTERS for node in tree.find_all(nodes.Filter))
        or any(node.name in _ODD_TESTS for node in tree.find_all(nodes.Test))
        or any(node.attr in _ODD_METHODS for node in tree.find_all(nodes.Getattr))
        or _largest(tree) > _LARGEST_NUMBER
    )


def _largest(tree: nodes.Template) -> int:
    """Of the numbers that can meet a conversation; a macro that writes tools has its own."""
    aside = {
        id(constant)
        for macro in tree.find_all(nodes.Macro)
        if not any(name.name in _CONVERSATION for name in macro.find_all(nodes.Name))
        for constant in macro.find_all(nodes.Const)
    }
    numbers = [
        abs(constant.value)
        for constant in tree.find_all(nodes.Const)
        if isinstance(constant.value, int | float) and id(constant) not in aside
    ]
    return int(max(numbers, default=0))

"""Reference answers as data sets write them: texts, numbers, lists, objects, JSON in a text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# What stands for an answer where a data set has none.
_NO_ANSWERS = frozenset({"proof", "notfound", "not found", "none", "null", "nan", "n/a"})


class NoAnswer(ValueError):
    """A row says itself that it has no answer that could be compared."""


def alternatives(answer: str) -> tuple[str, ...]:
    """The answers of a JSON list of texts, each of which is right; empty for any other text."""
    if not answer.startswith('["'):
        return ()
    values = _as_json(answer)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return ()
    return tuple(values)


def reference_answer(value: Any) -> tuple[str | None, str]:
    """The reference answer as text, and the verifier that it needs; empty: the config's.

    Several answers, each of which is right, are a JSON list of texts; tests of code are as
    rewards/code.py reads them.

    Raises:
        NoAnswer: it says that there is none.
        ValueError: no built-in verifier grades it.
    """
    if isinstance(value, str):
        if value.strip().lower() in _NO_ANSWERS:
            raise NoAnswer(f"the answer {value.strip()!r}")
        inner = _as_json(value)
        return (value, "") if inner is None else reference_answer(inner)
    if isinstance(value, bool):
        raise ValueError("the answer is a truth value: use reward.verifier=function")
    if isinstance(value, int | float):
        return str(value), ""
    if isinstance(value, Mapping):
        return _answer_in(value)
    if isinstance(value, Sequence):
        return _one_of(value)
    return None, ""


def _as_json(text: str) -> Any:
    """An object, or a list of texts or objects, that stands in a text; None: it is an answer. A
    list of numbers is one, too."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return value
    return value if value and all(isinstance(entry, str | dict) for entry in value) else None


def _one_of(values: Sequence[Any]) -> tuple[str | None, str]:
    if not values:
        return None, ""
    if all(isinstance(value, Mapping) and {"input", "output"} <= value.keys() for value in values):
        tests = [{"input": value["input"], "output": value["output"]} for value in values]
        return json.dumps(tests, ensure_ascii=False), "code"
    if not all(isinstance(value, str | int | float) for value in values) or any(
        isinstance(value, bool) for value in values
    ):
        raise ValueError("a list that no built-in verifier grades: use reward.verifier=function")
    texts = list(dict.fromkeys(str(value).strip() for value in values if str(value).strip()))
    if len(texts) <= 1:
        return (texts[0] if texts else None), ""
    return json.dumps(texts, ensure_ascii=False), ""


def _answer_in(value: Mapping[str, Any]) -> tuple[str | None, str]:
    for name in ("ground_truth", "target", "value", "answer"):
        if value.get(name) is not None:
            return reference_answer(value[name])
    if value.get("test_cases") is not None:
        return reference_answer(value["test_cases"])
    if {"inputs", "outputs"} <= value.keys():
        pairs = list(zip(value["inputs"], value["outputs"], strict=True))
        function = value.get("fn_name")
        if function is not None:
            tests = [_assertion(str(function), given, out) for given, out in pairs]
            return "\n".join(tests), "code"
        programs = [{"input": given, "output": out} for given, out in pairs]
        return json.dumps(programs, ensure_ascii=False), "code"
    raise ValueError(
        f"an object with {', '.join(sorted(value)) or 'nothing'} is no answer that a built-in "
        "verifier grades: use reward.verifier=function"
    )


def _assertion(name: str, arguments: Any, result: Any) -> str:
    given = ", ".join(map(repr, arguments)) if isinstance(arguments, list) else repr(arguments)
    return f"assert {name}({given}) == {result!r}"

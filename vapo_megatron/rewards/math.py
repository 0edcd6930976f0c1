r"""The verdict on a response to a mathematics problem.

Extraction by protocol (rewards.extract), then strings and plain numbers (rewards.equivalence), then math-verify
(rewards.symbolic). The first two are cheap and safe in any process; the third belongs into a worker (rewards.pool).
"""

from dataclasses import dataclass
from typing import Literal

from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.extract import Protocol, boxed, count_words, extract_answer, final_part

# equal, different: the answers were compared. no_answer: none found by the protocol. no_gold: the reference is empty.
# too_complex: refused unread. timeout, memory, crashed: what became of the worker. error: a function raised.
# scored: by a user's function.
Reason = Literal[
    "equal", "different", "no_answer", "no_gold", "too_complex", "timeout", "memory", "crashed", "error", "scored"
]

LONGEST_ANSWER = 2_000  # characters; a longer one is not read


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says of one response.

    extracted is the answer that was compared, detail explains reasons such as error, score is the reward
    (1 or 0 unless a pool was configured otherwise).
    """

    correct: bool
    reason: Reason
    extracted: str = ""
    score: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers that strings and plain numbers could not settle."""

    gold: str
    answer: str
    answer_is_formula: bool


def grade(gold: str, response: str) -> bool:
    """Whether the response answers with gold. Runs math-verify in this process, without a time limit."""
    return verdict(gold, response).correct


def verdict(gold: str, response: str, protocol: Protocol = "auto") -> Verdict:
    """The verdict on a response, with its reason. Runs math-verify in this process, without a time limit."""
    prepared = prepare(gold, response, protocol)
    return prepared if isinstance(prepared, Verdict) else settle(prepared)


def prepare(gold: str, response: str, protocol: Protocol = "auto") -> Verdict | Comparison:
    """A verdict if plain string handling gives one, else what is left to compare. Never imports sympy."""
    gold_answer = boxed(gold) or final_part(gold).strip()
    if not gold_answer:
        return Verdict(False, "no_gold")
    found = extract_answer(response, protocol)
    if not found.text:
        return Verdict(False, "no_answer")
    if len(found.text) > LONGEST_ANSWER:
        return Verdict(False, "too_complex", found.text[:LONGEST_ANSWER])
    if found.marker != "free_text":
        same = quick_comparison(gold_answer, found.text)
        if same is not None:
            return _verdict(same, found.text)
    enclosed = found.marker in ("boxed", "answer_tag", "hash")
    return Comparison(gold_answer, found.text, answer_is_formula=enclosed or count_words(found.text) <= 1)


def settle(comparison: Comparison) -> Verdict:
    """The verdict of math-verify on a comparison."""
    from vapo_megatron.rewards.symbolic import equivalent, too_costly

    if comparison.answer_is_formula and too_costly(comparison.answer):
        return Verdict(False, "too_complex", comparison.answer)
    same = equivalent(comparison.gold, comparison.answer, comparison.answer_is_formula)
    return _verdict(same, comparison.answer)


def _verdict(same: bool, answer: str) -> Verdict:
    return Verdict(same, "equal" if same else "different", answer, score=float(same))

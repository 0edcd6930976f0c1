"""Whether a verifier can compare responses with a ground_truth answer. Runs in verifier processes: ground_truths are
untrusted text."""

from collections.abc import Mapping
from typing import Any

from vapo_megatron.rewards.equivalence import quick_comparison
from vapo_megatron.rewards.extract import is_bare
from vapo_megatron.rewards.math import LONGEST_ANSWER
from vapo_megatron.rewards.normal_form import normal_form, plain_number, words
from vapo_megatron.rewards.symbolic import equivalent, reads_formula, too_costly


def readable(problem: str, answer: str, response: str, extra: Mapping[str, Any]) -> bool:
    """As a verifier function: whether `answer` is a number, a formula or a few words, and equal to itself.

    What is none of them (a proof, several sentences, broken LaTeX) no response could ever match.
    """
    if len(answer) > LONGEST_ANSWER or too_costly(answer) or not is_bare(answer):
        return False
    if plain_number(normal_form(answer)) is not None:
        return True
    if reads_formula(answer):
        return quick_comparison(answer, answer) is True or equivalent(answer, answer, True)
    return "\\" not in words(answer)

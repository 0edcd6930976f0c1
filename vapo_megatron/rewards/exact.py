"""The verifier of exact answers: the text after a response's last "answer:" is the ground truth."""

import re

from vapo_megatron.rewards.grade import Case, Grade
from vapo_megatron.rewards.verifier import Verifier

_MARKER = re.compile(r"answer:", re.IGNORECASE)


class ExactVerifier(Verifier):
    """Compares texts, without the spaces around them; no process is needed for it."""

    def prepare(self, case: Case) -> Grade:
        """The grade on a response."""
        ground_truth = case.ground_truth.strip()
        if not ground_truth:
            return Grade(False, "no_ground_truth")
        _, *answers = _MARKER.split(case.response)
        if not answers:
            return Grade(False, "no_answer")
        answer = answers[-1].strip()
        correct = answer == ground_truth
        return Grade(correct, "equal" if correct else "different", answer)

"""An environment as packages of the library verifiers have it: two turns with a tool, and a
rubric."""

from typing import Any


def load_environment() -> Any:
    """Called by verifiers.load_environment("sums_for_verifiers")."""
    import verifiers
    from datasets import Dataset

    class Asks(verifiers.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "w5 w5"}]

    def long_enough(completion: Any, answer: str, **_: Any) -> float:
        return 0.5 if answer == "w9" and len(completion) == 3 else 0.0

    rows = Dataset.from_list([{"question": "w3 w4", "answer": "w9"}])
    return Asks(max_turns=2, dataset=rows, rubric=verifiers.Rubric(funcs=[long_enough]))

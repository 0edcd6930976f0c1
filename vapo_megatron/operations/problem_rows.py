"""Rows of published data sets and of other trainers, read as problems with reference answers."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vapo_megatron.data.messages import Message, answer_of, messages_of, problem_of
from vapo_megatron.data.reference_answers import NoAnswer, alternatives, reference_answer
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.extract import boxed

Row = Mapping[str, Any]
_IDS = (
    "id",
    "unique_id",
    "ID",
    "problem_id",
    "uuid",
    "query_id",
)  # fields that may hold a row's id

# Text that DAPO-Math-17k puts around each problem; here the config's template does that.
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line after"

# Prompts that another model's chat template was applied to already.
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_TEMPLATE = re.compile(r"<[|｜][^<>|｜]{1,30}[|｜]>|</?think>|</?s>|\[/?INST\]")

_LONGEST_BARE = 200  # characters of a solution that is an answer itself


class Layout(NamedTuple):
    """How the rows of a published set are read.

    Attributes:
        fields: rows that have all of them.
        problem: text or messages of a row; None where it has none.
        answer: its reference answer; None where it has none.
        without: rows that have one of these are of another kind.
    """

    fields: tuple[str, ...]
    problem: Callable[[Row], Any]
    answer: Callable[[Row], Any]
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RawProblem:
    """A problem as a file gives it.

    Attributes:
        place: "file:row" for messages.
        kept: fields that are written with it.
        before: messages before the problem: a system message, earlier turns.
        verifier: of this row alone, such as code; empty: the config's.
    """

    id: str
    problem: str
    answer: str
    place: str
    kept: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[Message, ...] = ()
    verifier: str = ""

    def as_row(self) -> dict[str, Any]:
        """The row that training and evaluation read."""
        problem: Any = self.problem
        if self.before:
            problem = [*self.before, {"role": "user", "content": self.problem}]
        row = {**self.kept, "id": self.id, "problem": problem, "answer": self.answer}
        return row | ({"verifier": self.verifier} if self.verifier else {})


def _of(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name]


def _ground_truth(row: Row) -> Any:
    model = row["reward_model"]
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _boxed_solution(row: Row) -> Any:
    solution = row["solution"]
    return (boxed(solution) or None) if isinstance(solution, str) else None


def _final(text: Any) -> Any:
    """The answer of a solution: in its box, after ####, or a short text itself."""
    if not isinstance(text, str):
        return text
    if inside := boxed(text):
        return inside
    if "####" in text:
        return text.rpartition("####")[2].strip().replace(",", "")
    text = text.strip()
    return text if len(text) <= _LONGEST_BARE and "\n" not in text else None


def _final_of(name: str) -> Callable[[Row], Any]:
    return lambda row: _final(row[name])


def _after_hashes(row: Row) -> Any:
    answer = row["answer"]
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return answer.rpartition("####")[2].strip().replace(",", "")


def _asked(row: Row) -> Any:
    parameters = row["responses_create_params"]
    return parameters.get("input") if isinstance(parameters, Mapping) else None


def _last_answer(row: Row) -> Any:
    messages = messages_of(row["messages"])
    return None if messages is None else _final(answer_of(messages))


def _orz_problem(row: Row) -> Any:
    return row["conversation"][0].get("value")


def _orz_answer(row: Row) -> Any:
    return row["conversation"][-1].get("ground_truth")


# The more demanding first: the first that fits the first row of a source is taken.
LAYOUTS = (
    # BytedTsinghua-SIA/DAPO-Math-17k, Skywork-OR1, and whatever else is in verl's form.
    Layout(("prompt", "reward_model"), _of("prompt"), _ground_truth),
    # HuggingFaceH4/MATH-500, HuggingFaceH4/aime_2024, agentica-org/DeepScaleR-Preview-Dataset,
    # open-r1/OpenR1-Math-220k, Big-Math, Polaris, and the form that training reads.
    Layout(("problem", "answer"), _of("problem"), _of("answer")),
    # nvidia/OpenMathReasoning.
    Layout(("problem", "expected_answer"), _of("problem"), _of("expected_answer")),
    # EleutherAI/hendrycks_math, AI-MO/NuminaMath-CoT: the answer stands in a box of the solution.
    Layout(("problem", "solution"), _of("problem"), _boxed_solution),
    # Maxwell-Jia/AIME_2024.
    Layout(("Problem", "Answer"), _of("Problem"), _of("Answer")),
    # openai/gsm8k ("... #### 72"), opencompass/AIME2025, TIGER-Lab/WebInstruct-verified.
    Layout(("question", "answer"), _of("question"), _after_hashes),
    # zwhe99/DeepMath-103K.
    Layout(("question", "final_answer"), _of("question"), _of("final_answer")),
    # PrimeIntellect/SYNTHETIC-2, INTELLECT-2-RL-Dataset.
    Layout(("prompt", "verification_info"), _of("prompt"), _of("verification_info")),
    # NeMo Gym.
    Layout(("responses_create_params", "expected_answer"), _asked, _of("expected_answer")),
    # OpenRLHF.
    Layout(("context_messages", "label"), _of("context_messages"), _of("label")),
    Layout(("input", "answer"), _of("input"), _of("answer"), ("instruction",)),
    Layout(("input", "label"), _of("input"), _of("label"), ("instruction",)),
    # slime.
    Layout(("prompt", "label"), _of("prompt"), _of("label")),
    # AReaL (boba): answers of the solutions.
    Layout(("prompt", "answers"), _of("prompt"), _of("answers")),
    Layout(("prompt", "answer"), _of("prompt"), _after_hashes),
    # TRL, open-r1/DAPO-Math-17k-Processed: the solution is the bare answer, or has it in a box.
    Layout(("prompt", "solution"), _of("prompt"), _final_of("solution")),
    # NeMo RL.
    Layout(("input", "output"), _of("input"), _final_of("output"), ("instruction",)),
    Layout(("messages",), _of("messages"), _last_answer),
    # Open-Reasoner-Zero: lists, which are read as rows with the field conversation.
    Layout(("conversation",), _orz_problem, _orz_answer),
)


def find_layout(row: Row, place: str, layout: Layout | None = None) -> Layout:
    """The layout of a row: the same as for earlier rows, or the first that fits. Raises BadInput if
    none does."""
    layouts = LAYOUTS if layout is None else (layout,)
    for fitting in layouts:
        has_all = all(name in row for name in fitting.fields)
        if has_all and not any(name in row for name in fitting.without):
            return fitting
    if layout is None:
        _refuse_known(row, place)
    expected = ", or ".join(" + ".join(layout.fields) for layout in layouts)
    raise BadInput(
        f"{place}: has the fields {', '.join(sorted(row)) or 'none'}; expected {expected}: rename "
        "them in the file"
    )


def _refuse_known(row: Row, place: str) -> None:
    """Raises BadInput for forms that are known and hold no reference answer as such."""
    if {"instruction", "output"} <= row.keys():
        raise BadInput(
            f"{place}: instruction and output (Alpaca) are a demonstration; where output is an "
            "answer that can be compared, train reads it as it is with "
            "data.fields.problem=instruction data.fields.answer=output"
        )
    if "conversations" in row:
        raise BadInput(
            f"{place}: conversations (ShareGPT) are demonstrations; where the last message is an "
            "answer that can be compared, train reads it as it is with "
            "data.fields.problem=conversations data.fields.answer=conversations"
        )
    if {"quiz", "solution"} <= row.keys():
        raise BadInput(
            f"{place}: solution is a list of truth values, which no built-in verifier grades: "
            "write a reward function (reward.verifier=function) and train with "
            "data.fields.problem=quiz data.fields.answer=solution_text data.fields.extra=[solution]"
        )


def read_row(row: Row, layout: Layout, stem: str, number: int, place: str) -> RawProblem | None:
    """The problem of a row; None where it has no problem or no answer. stem and number make an id
    where it has none.

    Raises:
        NoAnswer: the row says that there is no answer.
        BadInput: its problem or answer is of a form that nothing here reads.
    """
    try:
        problem, before = _problem(layout.problem(row))
        answer, verifier = reference_answer(layout.answer(row))
    except NoAnswer:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadInput(f"{place}: {' and '.join(layout.fields)}: {error}") from None
    if not problem or not problem.strip() or not answer or not answer.strip():
        return None
    row_id = next((row[name] for name in _IDS if isinstance(row.get(name), (str, int))), None)
    extra = row.get("extra_info")
    if row_id is None and isinstance(extra, Mapping) and isinstance(extra.get("index"), str):
        row_id = extra["index"]
    return RawProblem(
        str(row_id) if row_id is not None else f"{stem}-{number:06d}",
        problem.strip(),
        answer if verifier or alternatives(answer) else _bare(answer),
        place,
        before=before,
        verifier=verifier or str(row.get("verifier") or ""),
    )


def _problem(value: Any) -> tuple[str | None, tuple[Message, ...]]:
    messages = messages_of(value)
    if messages is None and isinstance(value, str):
        messages = _written_by_template(value)
    if messages is None:
        return (value if isinstance(value, str) else None), ()
    text, before = problem_of(messages)
    if text.startswith(_DAPO_BEFORE):
        text = text.partition("\n\n")[2]
    return text.partition(_DAPO_AFTER)[0], before


def _written_by_template(prompt: str) -> tuple[Message, ...]:
    """Messages of a prompt; the special tokens of a chat template that was applied to it go."""
    if prompt.startswith("<|im_start|>"):
        turns = [(role, text.strip()) for role, text in _CHATML.findall(prompt)]
        messages = messages_of([{"role": role, "content": text} for role, text in turns if text])
        return messages or ()
    if _TEMPLATE.match(prompt):
        prompt = _TEMPLATE.sub("", prompt).strip()
    return ({"role": "user", "content": prompt},)


def _bare(answer: str) -> str:
    """An answer on one line without the display mathematics or box that stands around all of it."""
    answer = " ".join(answer.split())
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$"), (r"\(", r"\)"), ("$", "$")):
        inner = answer[len(opening) : -len(closing)]
        if (
            answer.startswith(opening)
            and answer.endswith(closing)
            and len(answer) > len(opening) + len(closing)
            and opening not in inner
            and closing not in inner
        ):
            answer = inner.strip()
    return boxed(answer) if answer.startswith(r"\boxed{") and answer.endswith("}") else answer

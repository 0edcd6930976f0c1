"""The forms in which published sets of problems come, and one row of each read as a problem with its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from vapo_megatron.errors import BadInput
from vapo_megatron.rewards.extract import boxed

Row = Mapping[str, Any]
_IDS = ("id", "unique_id", "ID")  # fields that may hold a row's id

# What DAPO-Math-17k writes around each problem; here the config's template does that.
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line after"


class Layout(NamedTuple):
    """How the rows of a published set are read: those that have all `fields`; problem and answer give a row's text, or
    None where it has none."""

    name: str
    fields: tuple[str, ...]
    problem: Callable[[Row], Any]
    answer: Callable[[Row], Any]


def _user_message(row: Row) -> Any:
    """The last user message of a row's prompt, without the instructions of DAPO-Math-17k."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = next((message.get("content") for message in reversed(prompt) if message.get("role") == "user"), None)
    if not isinstance(prompt, str):
        return prompt
    if prompt.startswith(_DAPO_BEFORE):
        prompt = prompt.partition("\n\n")[2]
    return prompt.partition(_DAPO_AFTER)[0]


def _ground_truth(row: Row) -> Any:
    model = row["reward_model"]
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _boxed_answer(row: Row) -> Any:
    solution = row["solution"]
    return (boxed(solution) or None) if isinstance(solution, str) else None


def _after_hashes(row: Row) -> Any:
    answer = row["answer"]
    if not isinstance(answer, str) or "####" not in answer:
        return answer
    return answer.rpartition("####")[2].strip().replace(",", "")


# The more demanding first: the first that fits the first row of a source is taken.
LAYOUTS = (
    # BytedTsinghua-SIA/DAPO-Math-17k, and whatever else is in verl's form.
    Layout("verl", ("prompt", "reward_model"), _user_message, _ground_truth),
    # HuggingFaceH4/MATH-500, HuggingFaceH4/aime_2024, agentica-org/DeepScaleR-Preview-Dataset, math-ai/aime25,
    # and the form that training reads.
    Layout("answer", ("problem", "answer"), itemgetter("problem"), itemgetter("answer")),
    # EleutherAI/hendrycks_math, DigitalLearningGmbH/MATH-lighteval: the answer stands in a box of the solution.
    Layout("math", ("problem", "solution"), itemgetter("problem"), _boxed_answer),
    # Maxwell-Jia/AIME_2024.
    Layout("aime", ("Problem", "Answer"), itemgetter("Problem"), itemgetter("Answer")),
    # openai/gsm8k ("... #### 72"), opencompass/AIME2025.
    Layout("question", ("question", "answer"), itemgetter("question"), _after_hashes),
    # open-r1/DAPO-Math-17k-Processed: the solution is the bare answer.
    Layout("prompt", ("prompt", "solution"), _user_message, itemgetter("solution")),
)


@dataclass(frozen=True, slots=True)
class RawProblem:
    """A problem as a file gives it; place is "file:row" for messages, kept are fields that are written with it."""

    id: str
    problem: str
    answer: str
    place: str
    kept: Mapping[str, Any] = field(default_factory=dict)


def find_layout(row: Row, place: str, layout: Layout | None = None) -> Layout:
    """The layout of a row: that of the rows before it, or the first that fits. Raises BadInput where none does."""
    layouts = LAYOUTS if layout is None else (layout,)
    for fitting in layouts:
        if all(field in row for field in fitting.fields):
            return fitting
    expected = ", or ".join(" + ".join(layout.fields) for layout in layouts)
    raise BadInput(
        f"{place}: has the fields {', '.join(sorted(row)) or 'none'}; expected {expected}: rename them in the file"
    )


def _bare(answer: str) -> str:
    """An answer on one line without the display mathematics or box that stands around all of it."""
    answer = " ".join(answer.split())
    for opening, closing in ((r"\[", r"\]"), ("$$", "$$"), (r"\(", r"\)")):
        inner = answer[len(opening) : -len(closing)]
        if answer.startswith(opening) and answer.endswith(closing) and opening not in inner and closing not in inner:
            answer = inner.strip()
    return boxed(answer) if answer.startswith(r"\boxed{") and answer.endswith("}") else answer


def read_row(row: Row, layout: Layout, stem: str, number: int, place: str) -> RawProblem | None:
    """The problem of a row; None where it has no problem or no answer. stem and number make an id where it has none."""
    problem, answer = layout.problem(row), layout.answer(row)
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(problem, str) or not isinstance(answer, str) or not problem.strip() or not answer.strip():
        return None
    row_id = next((row[name] for name in _IDS if isinstance(row.get(name), (str, int))), None)
    extra = row.get("extra_info")
    if row_id is None and isinstance(extra, Mapping) and isinstance(extra.get("index"), str):
        row_id = extra["index"]
    return RawProblem(
        str(row_id) if row_id is not None else f"{stem}-{number:06d}", problem.strip(), _bare(answer), place
    )

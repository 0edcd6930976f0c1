"""Rows of other trainers and data sets, as prepare-data and training read them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from vapo_megatron.config.data import FieldNames, PromptTemplate
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.rows import read_problems
from vapo_megatron.data.tokenizer import TextTokenizer
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.preparation import OverlapIndex, prepare
from vapo_megatron.rewards.code import grade_code
from vapo_megatron.rewards.grade import Case
from vapo_megatron.rewards.math import grade, grade_response
from vapo_megatron.rewards.pool import VerifierPool
from vapo_megatron.weights.tiny import CHATML_TEMPLATE, word_tokenizer

FORMATS = Path(__file__).parents[3] / "shared" / "cases" / "formats"
EXPECTED: dict[str, Any] = {}
if FORMATS.is_dir():
    EXPECTED = json.loads((FORMATS / "expected.json").read_text())
REFUSED = {name: case["refused"] for name, case in EXPECTED.items() if "refused" in case}
READ = {name: case for name, case in EXPECTED.items() if "refused" not in case}

needs_formats = pytest.mark.skipif(not EXPECTED, reason="../shared/cases is not here")


@needs_formats
@pytest.mark.parametrize("name", READ)
def test_a_format_of_others_is_read(name: str, tmp_path: Path) -> None:
    case = READ[name]
    out = tmp_path / "out.jsonl"
    outcome = prepare([str(FORMATS / name)], out)
    assert outcome.kept == case["rows"]
    first = read_problems(out, FieldNames())[0]
    assert case["problem_contains"] in first.problem
    assert "<" not in first.problem, "a special token of another template"
    if "answer" in case and "answers" not in case:
        assert first.answer == case["answer"]
    if "answers" in case:
        assert json.loads(first.answer) == case["answers"]
    system = [message["content"] for message in first.before if message["role"] == "system"]
    assert system == ([case["system"]] if "system" in case else [])
    assert len(first.before) + 1 == case.get("turns", 2 if "system" in case else 1)
    if "tests" in case:
        assert json.loads(first.reward) == {"verifier": case["verifier"]}
        assert json.loads(first.answer) == case["tests"]
        adds = "```python\nprint(sum(map(int, input().split())))\n```"
        assert grade_code(first.answer, adds, 10.0, 512, share=False)["correct"]
    if name == "numina15.jsonl":
        assert outcome.counts() == {"no_answer": 10}


@needs_formats
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alpaca.jsonl", ["instruction", "output", "data.fields.problem=instruction"]),
        ("sharegpt.jsonl", ["conversations", "data.fields.problem=conversations"]),
        ("kk.jsonl", ["solution", "reward.verifier=function"]),
    ],
)
def test_a_format_without_answers_is_refused_by_name(
    name: str, words: list[str], tmp_path: Path
) -> None:
    assert name in REFUSED
    with pytest.raises(BadInput) as error:
        prepare([str(FORMATS / name)], tmp_path / "out.jsonl")
    assert all(word in str(error.value) for word in words), error.value


@needs_formats
@pytest.mark.parametrize(
    ("name", "problem", "answer"),
    [
        ("slime.jsonl", "prompt", "label"),
        ("openrlhf_ctx.jsonl", "context_messages", "label"),
        ("sharegpt.jsonl", "conversations", "conversations"),
        ("alpaca.jsonl", "instruction", "output"),
        ("nemo_msgs.jsonl", "messages", "messages"),
        ("synthetic2.jsonl", "prompt", "verification_info"),
        ("dapo_eval.jsonl", "question", "answer"),
        ("rows.csv", "problem", "answer"),
    ],
)
def test_training_reads_messages_by_its_own_keys(name: str, problem: str, answer: str) -> None:
    rows = read_problems(FORMATS / name, FieldNames(problem=problem, answer=answer))
    assert rows[0].problem.startswith("What is 1 + 2") and rows[0].answer == "3"
    assert len(rows) == 40 and rows[0].before == ()


def test_messages_before_a_problem_are_in_the_prompt(tmp_path: Path) -> None:
    words = ["be", "brief", "hello", "hi", "what", "general"]
    word_tokenizer(words, 64, CHATML_TEMPLATE).save_pretrained(tmp_path)
    template = PromptTemplate(system_prompt="general")
    tokenizer = TextTokenizer(tmp_path, template)
    before = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
    )
    text = tokenizer.prompt_text("what", before)
    places = [text.index(word) for word in ("be brief", "hello", "hi", "what")]
    assert places == sorted(places) and "general" not in text
    assert "general" in tokenizer.prompt_text("what")
    plain = TextTokenizer(tmp_path, PromptTemplate(chat_template=False))
    with pytest.raises(ValueError, match=r"need data\.prompt\.chat_template=true"):
        plain.prompt_text("what", before)


def test_any_of_several_answers_is_right() -> None:
    answers = json.dumps(["3", "forty", r"\sqrt{12}"])
    for right in (r"\boxed{3}", r"\boxed{forty}", r"\boxed{2\sqrt{3}}"):
        assert grade(answers, right)
    assert not grade(answers, r"\boxed{4}")
    assert grade_response(answers, r"\boxed{\sqrt{3}}").reason == "different"
    with VerifierPool(RewardConfig(workers=1)) as pool:
        cases = [Case(answers, r"\boxed{2\sqrt{3}}"), Case(answers, r"\boxed{\sqrt{5}}")]
        assert [each.correct for each in pool.grade_batch(cases)] == [True, False]


PREAMBLE = (
    "You are a careful expert. Read the following exercise slowly, think about each of its parts, "
    "and then write down what you have found as one number without any unit. "
)
NOUNS = ("apples", "pears", "cards", "coins", "books", "stones", "stamps", "shells")


def _exercise(number: int) -> str:
    noun = NOUNS[number % len(NOUNS)]
    return f"A person number {number} has {3 * number} {noun} and gives {number} away. How many?"


def test_a_shared_preamble_is_no_repetition(tmp_path: Path) -> None:
    for name, numbers in (("train", range(1, 40)), ("eval", range(35, 75))):
        rows = [
            {"id": f"{name}{n}", "problem": PREAMBLE + _exercise(n), "answer": str(2 * n)}
            for n in numbers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = prepare(
        [str(tmp_path / "train.jsonl")], tmp_path / "out.jsonl", [tmp_path / "eval.jsonl"]
    )
    assert outcome.counts() == {"contaminated": 5}
    assert {row.id for row in outcome.left_out} == {f"train{n}" for n in range(35, 40)}


def test_the_search_is_linear_where_texts_share_a_preamble() -> None:
    """Eight times the problems took 64 times as long, and take some eight times as long."""
    seconds = []
    for count in (250, 2000):
        start = time.process_time()
        index = OverlapIndex((str(n), PREAMBLE + _exercise(n)) for n in range(count))
        for n in range(count):
            index.nearest(f"Say: {PREAMBLE}{_exercise(n)}")
        seconds.append(time.process_time() - start)
    assert seconds[1] < 24 * seconds[0]

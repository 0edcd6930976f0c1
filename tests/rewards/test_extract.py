from typing import cast

import pytest

from vapo_megatron.rewards.extract import (
    NOTHING,
    AnswerFormat,
    Extraction,
    Marker,
    boxed,
    extract_answer,
    final_part,
)


@pytest.mark.parametrize(
    ("response", "text", "marker"),
    [
        (r"x \boxed{\frac{1}{\sqrt{2}}} y", r"\frac{1}{\sqrt{2}}", "boxed"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", "boxed"),
        (r"$\boxed 5$", "5", "boxed"),
        (r"$\boxed{28}$ pct", "28%", "boxed"),
        (r"\boxed{28}%", "28%", "boxed"),
        (r"\boxed " + "x" * 50 + r" and \boxed{2}", "x" * 50 + ", 2", "boxed"),
        (r"\boxed{1} papers and \boxed{2} bins", "1, 2", "boxed"),
        (r"\boxed{1}. Later \boxed{2}", "2", "boxed"),
        ("Answer: 3\nAnswer: 4", "4", "answer_line"),
        ("**Answer:** 34", "34", "answer_line"),
        ("Answer:\n\n34\nmore", "34", "answer_line"),
        (r"Answer: \boxed{5}", "5", "boxed"),
        (r"\boxed{5}. Check the answer: it fits all of the conditions.", "5", "boxed"),
        ("<answer>1</answer> no <answer> 2 </answer> trailing 9", "2", "answer_tag"),
        ("s1 c1 s2 c0 #### 7", "7", "hash"),
        ("#### Step 1: look at all the terms\n\\boxed{3}\n", "3", "boxed"),
        # a box that is none, or that does not look like one
        (r"\\boxed{5}", "5", "boxed"),
        (r"boxed{4} \fbox{5} boxed{6}", "5", "boxed"),
        (r"\boxed  {5}", "5", "boxed"),
        (r"\boxed{5} \boxed", "", "none"),
        (r"\boxed{5} \boxed{}", "", "none"),
        (r"\boxed$, \boxed{5}", "5", "boxed"),
        (r"\boxed{5}, \boxed.", "5", "boxed"),
        (r"\boxed x+1,\boxed{2}", "x+1, 2", "boxed"),
        (r"\boxed{a\}b{c}\\} d}", r"a\}b{c}\\", "boxed"),
        # boxes that are joined, and that are not
        (r"\boxed{1} \boxed{2}", "1, 2", "boxed"),
        (r"\boxed{1}, \boxed{2} and \boxed{1}", "1, 2", "boxed"),
        (r"\boxed{1} AND \boxed{2} \quad \boxed{3}", "1, 2, 3", "boxed"),
        (r"\boxed{1}, \boxed{2.5}, \boxed{3}", "1, 2.5, 3", "boxed"),
        (r"\boxed{1} then \boxed{2} or \boxed{3}", "2, 3", "boxed"),
        (r"\boxed{1}, \boxed{}, \boxed{3}", "3", "boxed"),
        (r"\boxed{1}, no, \boxed{2}", "2", "boxed"),
        (r"\boxed{1} \boxed{2} % of them", "1, 2%", "boxed"),
        (r"\boxed{1} percent, \boxed{2}$\%", "1, 2%", "boxed"),
        # lines
        ("Answer: 3. This is my answer", "3. This is my answer", "answer_line"),
        ("answer: 3\nA: 4\nanswer: the", "the", "answer_line"),
        ("Answer: 3\nA: 4\n", "4", "answer_line"),
        ("A: 4\nAnswer: 3\nBA: 5", "3", "answer_line"),
        ("\u0130\nAnswer: 3\nAnswer: 4 \n", "4", "answer_line"),
        ("Final answer **\uff1a** __5__", "5", "answer_line"),
        ("**Answer:** **5**\r\n", "5", "answer_line"),
        ("Answer: X\n5", "X", "answer_line"),
        ("Answer: **\n\n `x` \n7", "x", "answer_line"),
        ("Answer:", "", "none"),
        ("Answer: ", "", "none"),
        ("Answer:\n\\[\n34\n\\]", "34", "answer_line"),
        ("Answer:\n\n$$\n34\n$$", "34", "answer_line"),
        ("Answer: \\[ \n 34\n\\]", "34", "answer_line"),
        ("Answer:\n\\[ 34 \\]", "\\[ 34 \\]", "answer_line"),
        ("Answer:\n[3, 4]", "[3, 4]", "answer_line"),
        (r"\boxed{3}. Answer: 4", "4", "answer_line"),
        ("Answer: no, wait. Answer: yes", "yes", "answer_line"),
        ("**Answer:** The answer: 5", "5", "answer_line"),
        ("\\boxed{5}\na: 7", "5", "boxed"),
        ("\\boxed{5}\nA: 7", "7", "answer_line"),
        (r"Answer: 4, or \boxed{3}", "3", "boxed"),
        # tags
        ("<ANSWER>1</Answer> <answer>2", "1", "answer_tag"),
        ("</answer>1</answer> and <answer>2</answer>", "2", "answer_tag"),
        ("1</answer> is it", "1</answer> is it", "bare"),
        ("<answer>Answer: 5</answer> Answer: 6", "5", "answer_line"),
        (r"<answer> \boxed{5 </answer>", "", "answer_tag"),
        ("<answer>**so it is 5**</answer>", "so it is 5", "answer_tag"),
        # hashes
        ("####1#### _2_ \n3", "2", "hash"),
        ("##### 1\n#### 2", "2", "hash"),
        ("#### 2\n\\boxed{1}", "1", "boxed"),
        ("\\boxed{1}\n#### 2", "2", "hash"),
        # no marker
        ("42", "42", "bare"),
        (" \nof two words\n", "of two words", "bare"),
        ("x\ny", "x\ny", "free_text"),
        (
            "\u0130 stands in a text without marker",
            "\u0130 stands in a text without marker",
            "free_text",
        ),
        ("1" * 300, "1" * 300, "bare"),
        ("1" * 301, "1" * 301, "free_text"),
        ("x" + "1" * 2000, "1" * 2000, "free_text"),
        (r"\text{so} a \mathrm {b} \frac12 one", r"\text{so} a \mathrm {b} \frac12 one", "bare"),
        ("so in the end there are 42 of them", "so in the end there are 42 of them", "free_text"),
    ],
)
def test_the_answer_is_found(response: str, text: str, marker: str) -> None:
    found = extract_answer(response)
    assert (found.text, found.marker) == (text, marker)


def test_cut_off_box_is_no_answer_even_after_a_complete_one() -> None:
    assert extract_answer(r"\boxed{7} and so in fact \boxed{8") == NOTHING


def test_only_what_follows_the_thought_counts() -> None:
    assert final_part("<think>\\boxed{1}</think> two") == " two"
    assert final_part("<think>\\boxed{1}") == ""
    assert final_part("<think>1</think> 2 </think>3") == "3"
    assert final_part("<think>1</think> 2 <think>3") == ""
    assert extract_answer("<think>\\boxed{1}</think>").text == ""


def test_the_next_turn_is_not_the_answer() -> None:
    assert extract_answer("Answer: 3\n<|im_start|>user\nAnswer: 4").text == "3"
    assert [
        final_part(f"5{end}") for end in ("<|im_end|>", "<|endoftext|>\n", "</s> ", "<|eot_id|>")
    ] == ["5"] * 4
    assert final_part("5</s>6") == "5</s>6"


@pytest.mark.parametrize("answer_format", ["boxed", "answer_line", "answer_tag", "hash"])
def test_an_answer_format_takes_its_own_marker_alone(answer_format: AnswerFormat) -> None:
    responses = {
        "boxed": r"\boxed{1}",
        "answer_line": "Answer: 1",
        "answer_tag": "<answer>1</answer>",
        "hash": "#### 1",
    }
    found = {name: extract_answer(response, answer_format) for name, response in responses.items()}
    own = Extraction("1", cast(Marker, answer_format))
    assert found == {name: own if name == answer_format else NOTHING for name in responses}
    assert extract_answer(responses[answer_format], "marked") == own


@pytest.mark.parametrize("answer_format", ["marked", "boxed", "answer_line", "answer_tag", "hash"])
def test_text_without_its_marker_is_no_answer(answer_format: AnswerFormat) -> None:
    assert extract_answer("5", answer_format) == NOTHING


def test_a_box_stands_for_what_is_around_it() -> None:
    assert extract_answer(r"Answer:\boxed{5} m", "answer_line").text == "5"
    assert extract_answer(r"<answer>\boxed{5} m</answer>", "answer_tag").text == "5"
    assert extract_answer(r"####\boxed{5} m", "hash").text == "5"


def test_hashes_that_are_asked_for_need_not_be_short() -> None:
    assert (
        extract_answer("#### the answer to all of this", "hash").text == "the answer to all of this"
    )
    assert extract_answer("#### the answer to all of this", "marked") == NOTHING


def test_a_gold_solution_gives_each_box_once() -> None:
    assert boxed(r"\boxed{1} ... \boxed{2} ... again \boxed{1} and \boxed{}") == "1, 2"


def test_extraction_is_linear_on_hostile_text() -> None:
    # Quadratic work on these would take minutes and run into the test's time limit.
    for hostile in (
        *(text * 100_000 for text in (r"\boxed{", "####", "answer ", "<answer>", "$$$$")),
        "answer:" + "\n*" * 200_000,
    ):
        assert extract_answer(hostile, "marked").marker in ("none", "hash")

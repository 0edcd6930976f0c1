import pytest

from vapo_megatron.rewards.extract import NOTHING, boxed, extract_answer, final_part


@pytest.mark.parametrize(
    ("response", "text", "marker"),
    [
        (r"x \boxed{\frac{1}{\sqrt{2}}} y", r"\frac{1}{\sqrt{2}}", "boxed"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}", "boxed"),
        (r"$\boxed 5$", "5", "boxed"),
        (r"$\boxed{28}$ pct", "28%", "boxed"),
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
        ("42", "42", "bare"),
        ("so in the end there are 42 of them", "so in the end there are 42 of them", "free_text"),
    ],
)
def test_the_answer_is_found(response: str, text: str, marker: str) -> None:
    found = extract_answer(response)
    assert (found.text, found.marker) == (text, marker)


def test_a_box_that_is_cut_off_is_no_answer_even_after_a_whole_one() -> None:
    assert extract_answer(r"\boxed{7} and so in fact \boxed{8") == NOTHING


def test_only_what_follows_the_thought_counts() -> None:
    assert final_part("<think>\\boxed{1}</think> two") == " two"
    assert final_part("<think>\\boxed{1}") == ""
    assert extract_answer("<think>\\boxed{1}</think>").text == ""


def test_the_next_turn_is_not_the_answer() -> None:
    assert extract_answer("Answer: 3\n<|im_start|>user\nAnswer: 4").text == "3"


@pytest.mark.parametrize("answer_format", ["boxed", "answer_line", "answer_tag", "hash"])
def test_an_answer_format_takes_its_own_marker_alone(answer_format: str) -> None:
    responses = {
        "boxed": r"\boxed{1}",
        "answer_line": "Answer: 1",
        "answer_tag": "<answer>1</answer>",
        "hash": "#### 1",
    }
    found = {name: extract_answer(response, answer_format).text for name, response in responses.items()}
    assert found == {name: "1" if name == answer_format else "" for name in responses}


def test_a_gold_solution_gives_each_box_once() -> None:
    assert boxed(r"\boxed{1} ... \boxed{2} ... again \boxed{1}") == "1, 2"


def test_extraction_is_linear_on_hostile_text() -> None:
    # Quadratic work on these would take minutes and run into the test's time limit.
    for hostile in (r"\boxed{" * 100_000, "####" * 100_000, "answer " * 100_000, "<answer>" * 100_000, "$" * 400_000):
        assert extract_answer(hostile, "marked").marker in ("none", "hash")

"""The verifier of code, against what a policy may write."""

import json
from types import SimpleNamespace

import pytest

from vapo_megatron.agents.sandbox import NoBoundary
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.sample import Prompt
from vapo_megatron.errors import BadInput
from vapo_megatron.rewards import code
from vapo_megatron.rewards.code import check_tests, grade_code
from vapo_megatron.rewards.pool import VerifierPool

ASSERTS = "import math\nassert double(2) == 4\nassert double(-1.5) == -3.0\nassert not double(0)"
PAIRS = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}])
RIGHT = "def double(x):\n    return 2 * x"
SUM = "print(sum(map(int, input().split())))"


def _block(code: str) -> str:
    return f"I think so.\n```python\nfirst = 1/0\n```\nNo, so:\n```python\n{code}\n```\nDone."


def _correct(code: str, tests: str = ASSERTS, seconds: float = 30.0) -> bool:
    return bool(grade_code(tests, _block(code), seconds, 512, share=False)["correct"])


def test_right_code_passes_and_wrong_code_does_not() -> None:
    assert _correct("import sys\nprint('noise')\nprint('noise', file=sys.stderr)\n" + RIGHT)
    assert _correct("import sys\nprint('noise', file=sys.stderr)\n" + SUM, PAIRS)
    assert _correct("import sys\nassert sys.stdin.read() == ''\n" + RIGHT), (
        "nothing to read where calls are tested"
    )
    assert not _correct("def double(x):\n    return x + 2")
    assert not _correct("print(3)", PAIRS)
    assert not _correct(SUM + "\nraise SystemExit(1)", PAIRS), "a program that ends with an error"
    assert (
        grade_code(ASSERTS, "def double(x): return 2 * x", 30.0, 512, share=False)["reason"]
        == "no_answer"
    )


@pytest.mark.parametrize(
    "response",
    [
        "```bash\npip list\n```\nThen\n```python\n{}\n```",
        "```cpp\nint x;\n```\nor\n```C++\nint y;\n```\nso\n```python\n{}\n```",
        "```python\n{}\n```\nIt prints\n```text\n4\n```",
        "```python\n{}\n```\nIt prints\n```\n4\n```",
        "Take ```2 * x```\nas here:\n```py \n{}\n```",
        "```python3\n{}\n```",
        "Here: ```Python\n{}\n```",
        "```\n{}\n```",
        "```python\r\n{}\r\n```\r\n",
        "1. One line:\n   ```python\n   double = lambda x: 2 * x\n   ```",
    ],
)
def test_the_answer_is_the_last_block_of_python(response: str) -> None:
    graded = grade_code(ASSERTS, response.format(RIGHT), 30.0, 512, share=False)
    assert graded["correct"]


def test_a_block_of_another_language_is_no_answer() -> None:
    for response in ("```cpp\n{}\n```", "`" * 3 + "{}" + "`" * 3):
        graded = grade_code(ASSERTS, response.format(RIGHT), 30.0, 512, share=False)
        assert graded["reason"] == "no_answer"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("<think>{}</think>I do not know.", "no_answer"),
        ("{}</think>I do not know.", "no_answer"),  # a template may open the thought
        ("<think>Perhaps\n{}", "no_answer"),
        ("<think>Perhaps\n```python\n1 / 0\n```\n</think>\n{}", "equal"),
        ("{}<|im_end|>\n<|im_start|>user\n```python\n1 / 0\n```", "equal"),
    ],
)
def test_code_in_thoughts_or_a_next_turn_is_no_answer(response: str, reason: str) -> None:
    graded = grade_code(ASSERTS, response.format(_block(RIGHT)), 30.0, 512, share=False)
    assert graded["reason"] == reason


@pytest.mark.parametrize(("right", "tests"), [(RIGHT, ASSERTS), (SUM, PAIRS)])
def test_right_code_may_begin_with_a_future_import(right: str, tests: str) -> None:
    first = '"""What it does."""\nfrom __future__ import annotations\n\n'
    assert _correct(first + right, tests)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except PermissionError: raise",
        "while True: print('4' * 999)",
        "x = bytearray(1 << 33)\n" + RIGHT,
        "open('/etc/hostname').read()\n" + RIGHT,
        "raise SystemExit(0)",
        "import os\nprint('\\n4')\nos._exit(0)",
        "import builtins\nclass Same:\n    __eq__ = lambda s, o: True\n    __bool__ = lambda s: "
        "False\nbuiltins.repr = lambda x: 'True'\nbuiltins.AssertionError = None\ndef double(x): "
        "return Same()",
        "import ast, sys\nast.literal_eval = lambda x: 4\nprint(sys._getframe(1).f_locals)\n"
        "def double(x): return next(c for c in sys._getframe(1).f_code.co_consts if c == 2 * x)",
        "print('(' * 9000)\nimport os\nos._exit(0)",
    ],
)
def test_a_hostile_answer_is_wrong(code: str) -> None:
    assert not _correct(code)


def test_sleeping_answer_is_wrong_and_shares_count_passed_tests() -> None:
    assert not _correct("import time\ntime.sleep(600)", seconds=0.5)
    config = RewardConfig(verifier="code_share", workers=1, incorrect=-1.0, response_timeout_s=60.0)
    cases = [
        (PAIRS, _block("a, b = map(int, input().split())\nprint(3 if a < b else 0)")),
        (PAIRS, _block(SUM)),
    ]
    with VerifierPool(config) as pool:
        grades = pool.grade_batch(cases)
    assert [(grade.correct, grade.score) for grade in grades] == [(False, 0.0), (True, 1.0)]
    with VerifierPool(config.model_copy(update={"verifier": "code"})) as pool:
        grades = pool.grade_batch(cases)
    assert [(grade.reason, grade.score) for grade in grades] == [
        ("different", -1.0),
        ("equal", 1.0),
    ]


@pytest.mark.parametrize(
    ("seconds_each", "limits"),
    [(0.75, [1.5, 0.75]), (0.625, [1.5, 0.875, 0.25]), (2.0, [1.5])],
)
def test_tests_share_their_time_to_its_last_moment(
    monkeypatch: pytest.MonkeyPatch, seconds_each: float, limits: list[float]
) -> None:
    clock = SimpleNamespace(now=100.0)
    given: list[tuple[float, int]] = []

    async def run(program: str, seconds: float, memory_mib: int) -> tuple[str, bool]:
        given.append((seconds, memory_mib))
        clock.now += seconds_each
        return "1", True

    monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(code, "run_python", run)
    tests = "assert f() == 1\n" * 3
    graded = grade_code(tests, _block("f = lambda: 1"), 1.5, 512, share=True)
    assert given == [(limit, 512) for limit in limits]
    assert graded["score"] == len(limits) / 3


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        "[]",
        "def f(:",
        "x = 1",
        "assert x",
        "assert abs(f(1) - 2) < 1e-3",
        "assert f(1) == g(2)",
        '[{"input": "1"}]',
    ],
)
def test_a_row_without_tests_is_refused_by_name(answer: str) -> None:
    with pytest.raises(BadInput, match=r"train\.jsonl: row r7: the answer holds no tests"):
        check_tests([Prompt("r7", "p", answer, (), source="train.jsonl")])


def test_a_kernel_that_cannot_confine_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise NoBoundary("running code needs Landlock")

    monkeypatch.setattr(code, "check_boundary", check)
    row = Prompt("r1", "p", "assert f(1) == 2", (), source="train.jsonl")
    with (
        VerifierPool(RewardConfig(verifier="code")) as pool,
        pytest.raises(BadInput, match="needs Landlock"),
    ):
        list(pool.check([row]))

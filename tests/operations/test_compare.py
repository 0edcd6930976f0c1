import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from called import exit_code_of

from vapo_megatron.data.sample import Prompt
from vapo_megatron.errors import BadInput
from vapo_megatron.evaluation.responses import Response
from vapo_megatron.evaluation.sets import problem_results
from vapo_megatron.operations.report.compare import compare_runs, shown_p_value, sign_flip_p_value


def _run(
    folder: Path, correct: dict[str, int], name: str = "aime", digest: str = "d", top_p: float = 0.7
) -> Path:
    (folder / "evaluation").mkdir(parents=True)
    (folder / "evaluation.json").write_text(
        json.dumps({"sampling": {"temperature": 1.0, "top_p": top_p}})
    )
    rows = [
        {"id": key, "digest": digest, "samples": 8, "correct": count}
        for key, count in correct.items()
    ]
    (folder / "evaluation" / f"{name}_problems.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return folder


def test_p_is_the_share_of_sign_flips_at_least_as_far_from_zero() -> None:
    generator = random.Random(1)
    for _ in range(20):
        differences = [generator.choice([-2, -1, 0, 0, 1, 2, 3]) / 8 for _ in range(9)]
        observed = abs(sum(differences))
        flips = itertools.product((-1, 1), repeat=9)
        sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
        expected = sum(value >= observed - 1e-12 for value in sums) / len(sums)
        assert sign_flip_p_value(differences) == pytest.approx(expected)


def test_random_flips_of_many_pairs_agree_with_the_exact_test() -> None:
    differences = [0.25] * 16 + [-0.25] * 8
    # 24 pairs of one size: |sum| >= 8 pairs' worth is a binomial tail.
    from math import comb

    exact = 2 * sum(comb(24, k) for k in range(9)) / 2**24
    assert sign_flip_p_value(differences) == pytest.approx(exact, abs=0.005)
    assert sign_flip_p_value(differences) == sign_flip_p_value(list(differences))
    assert 0 < sign_flip_p_value([0.5] * 60) < 1e-4
    assert (
        shown_p_value(sign_flip_p_value([0.5] * 60)) == "< 1e-4"
        and shown_p_value(0.0312) == "0.0312"
    )


def test_order_of_problems_does_not_matter_and_pairs_do(tmp_path: Path) -> None:
    first = _run(tmp_path / "a", {f"p{n}": n % 5 for n in range(30)})
    better = _run(tmp_path / "b", {f"p{n}": n % 5 + (n % 3 > 0) for n in reversed(range(30))})
    (one,) = compare_runs(first, better)
    assert (one.name, one.problems, one.better, one.worse) == ("aime", 30, 20, 0)
    assert one.difference == pytest.approx(20 / 30 / 8) and one.low > 0 and one.p_value < 1e-3
    assert one.difference == pytest.approx(one.b - one.a)
    (same,) = compare_runs(first, first)
    assert (same.difference, same.p_value, same.low, same.high) == (0.0, 1.0, 0.0, 0.0)


def test_different_problems_are_refused(tmp_path: Path) -> None:
    first = _run(tmp_path / "a", {"p1": 1, "p2": 2})
    with pytest.raises(BadInput, match="problem p2 was answered in one evaluation alone"):
        compare_runs(first, _run(tmp_path / "b", {"p1": 1, "p3": 2}))
    with pytest.raises(BadInput, match=r"no set in common \(aime and gsm8k\)"):
        compare_runs(first, _run(tmp_path / "c", {"p1": 1}, name="gsm8k"))
    with pytest.raises(BadInput, match="problem p1 has another text or another answer"):
        compare_runs(first, _run(tmp_path / "d", {"p1": 1, "p2": 2}, digest="other"))
    with pytest.raises(BadInput, match="give the directory of a finished evaluation"):
        compare_runs(first, tmp_path)


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _run(tmp_path / "a", {"p1": 1, "p2": 2})
    second = _run(tmp_path / "b", {"p1": 3, "p2": 2}, top_p=0.9)
    assert exit_code_of("compare", first, second) == 0
    output = capsys.readouterr().out
    assert (
        "aime" in output
        and "+0.125" in output
        and "not sampled alike: top_p 0.7 against 0.9" in output
    )


def test_json_has_the_figures_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _run(tmp_path / "a", {"p1": 1, "p2": 2})
    second = _run(tmp_path / "b", {"p1": 3, "p2": 2}, top_p=0.9)
    assert exit_code_of("compare", first, second, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    (aime,) = content["sets"]
    assert aime == asdict(compare_runs(first, second)[0]) and aime["difference"] == 0.125
    assert content["sampling_differences"] == {"top_p": [0.7, 0.9]}
    assert content["second"] == {"directory": str(second), "step": None}


def _training_run(folder: Path, correct: dict[str, list[bool]], top_p: float = 0.7) -> Path:
    """A run that was evaluated before its first step, when nothing was right, and after step 4."""
    (folder / "evaluation").mkdir(parents=True)
    (folder / "evaluation.json").write_text(
        json.dumps({"step": 4, "sampling": {"top_p": top_p}, "sets": []})
    )
    for step in (0, 4):
        rows = [
            {
                "id": name,
                "index": index,
                "problem": name,
                "answer": "1",
                "correct": right and step == 4,
            }
            for name, group in correct.items()
            for index, right in enumerate(group)
        ]
        path = folder / "evaluation" / f"step_{step:06d}_sums.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_training_runs_are_compared_by_their_last_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _training_run(tmp_path / "a", {"p": [True, False], "q": [False, False]})
    second = _training_run(tmp_path / "b", {"p": [True, True], "q": [False, True]}, top_p=0.9)
    (one,) = compare_runs(first, second)
    assert (one.name, one.problems, one.a, one.b, one.better) == ("sums", 2, 0.25, 0.75, 2)
    assert exit_code_of("compare", first, second) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "its evaluation after step 4" in output and "top_p 0.7 against 0.9" in output
    # An evaluation of a model on the same problems is comparable with it: digests are of text and
    # answer.
    result = problem_results(
        [Prompt("p", "p", "1", ()), Prompt("q", "q", "1", ())], [_response("p"), _response("q")]
    )
    evaluated = _run(tmp_path / "c", {})
    lines = "".join(json.dumps(asdict(problem)) + "\n" for problem in result)
    (evaluated / "evaluation" / "aime_problems.jsonl").rename(
        evaluated / "evaluation" / "sums_problems.jsonl"
    )
    (evaluated / "evaluation" / "sums_problems.jsonl").write_text(lines)
    assert compare_runs(first, evaluated)[0].difference == pytest.approx(0.75)


def _response(name: str) -> Response:
    return Response(name, 0, "1", 1, "stop", correct=True)

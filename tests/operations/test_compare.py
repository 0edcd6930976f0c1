import itertools
import json
import random
import sys
from pathlib import Path

import pytest

from vapo_megatron import cli
from vapo_megatron.errors import BadInput
from vapo_megatron.operations.compare import compare_runs, shown_p_value, sign_flip_p_value


def _run(folder: Path, correct: dict[str, int], name: str = "aime", digest: str = "d", top_p: float = 0.7) -> Path:
    (folder / "evaluation").mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps({"sampling": {"temperature": 1.0, "top_p": top_p}}))
    rows = [{"id": key, "digest": digest, "samples": 8, "correct": count} for key, count in correct.items()]
    (folder / "evaluation" / f"{name}_problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_p_is_the_share_of_all_sign_flips_at_least_as_far_from_zero() -> None:
    generator = random.Random(1)
    for _ in range(20):
        differences = [generator.choice([-2, -1, 0, 0, 1, 2, 3]) / 8 for _ in range(9)]
        observed = abs(sum(differences))
        flips = itertools.product((-1, 1), repeat=9)
        sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
        expected = sum(value >= observed - 1e-12 for value in sums) / len(sums)
        assert sign_flip_p_value(differences) == pytest.approx(expected)


def test_many_pairs_are_tested_by_random_flips_that_agree_with_the_exact_test() -> None:
    differences = [0.25] * 16 + [-0.25] * 8
    # 24 pairs of one size: |sum| >= 8 pairs' worth is a binomial tail.
    from math import comb

    exact = 2 * sum(comb(24, k) for k in range(9)) / 2**24
    assert sign_flip_p_value(differences) == pytest.approx(exact, abs=0.005)
    assert sign_flip_p_value(differences) == sign_flip_p_value(list(differences))
    assert 0 < sign_flip_p_value([0.5] * 60) < 1e-4
    assert shown_p_value(sign_flip_p_value([0.5] * 60)) == "< 1e-4" and shown_p_value(0.0312) == "0.0312"


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


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _run(tmp_path / "a", {"p1": 1, "p2": 2}), _run(tmp_path / "b", {"p1": 3, "p2": 2}, top_p=0.9)
    monkeypatch.setattr(sys, "argv", ["vapo-megatron", "compare", str(first), str(second), "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    content = json.loads(capsys.readouterr().out)
    assert content["sets"][0]["difference"] == pytest.approx(0.125)
    monkeypatch.setattr(sys, "argv", ["vapo-megatron", "compare", str(first), str(second)])
    with pytest.raises(SystemExit):
        cli.main()
    output = capsys.readouterr().out
    assert "aime" in output and "+0.125" in output and "not sampled alike: top_p 0.7 against 0.9" in output

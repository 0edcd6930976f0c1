from pathlib import Path

from vapo_megatron.data.sample import Prompt
from vapo_megatron.evaluation.responses import Response, ResponseLog


def _group(name: str, k: int = 2) -> list[Response]:
    return [
        Response(name, index, f"text {name} {index} ü", 3, "stop", origin="origin")
        for index in range(k)
    ]


def _log(path: Path) -> ResponseLog:
    return ResponseLog(
        path, [Prompt(name, "problem", "answer", (1,), "set") for name in "abc"], 2, "origin"
    )


def test_a_line_cut_short_costs_its_group_alone(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    log = _log(path)
    log.append(_group("a"))
    log.append(_group("b"))
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 13), len(whole) - 1):
        path.write_bytes(whole[:length])
        log = _log(path)
        kept = set(log.groups)
        log.append(_group("c"))
        again = _log(path).groups
        assert kept <= {"a", "b"} and again.keys() == kept | {"c"}
        for name, group in again.items():
            assert group == _group(name)
    assert kept == {"a"}  # a last line without its end counts as cut short


def test_another_group_size_keeps_the_groups_that_have_as_many(tmp_path: Path) -> None:
    prompts = [Prompt(name, "problem", "answer", (1,), "set") for name in "ab"]
    path = tmp_path / "set.jsonl"
    ResponseLog(path, prompts, 4, "origin").append(_group("a", 4))
    assert ResponseLog(path, prompts, 2, "origin").groups == {"a": _group("a", 2)}
    assert ResponseLog(path, prompts, 4, "origin").groups == {}

from pathlib import Path

from vapo_megatron.evaluation.responses import Response, ResponseLog


def _group(name: str, k: int = 2) -> list[Response]:
    return [Response(name, index, f"text {name} {index} ü", 3, "stop") for index in range(k)]


def test_a_line_cut_short_costs_its_group_alone(tmp_path: Path) -> None:
    path = tmp_path / "set.partial.jsonl"
    with ResponseLog(path, "origin") as log:
        log.append(_group("a"))
        log.append(_group("b"))
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 13), len(whole) - 1):
        path.write_bytes(whole[:length])
        with ResponseLog(path, "origin") as log:
            found = log.complete_groups(2)
            log.append(_group("c"))
        with ResponseLog(path, "origin") as log:
            again = log.complete_groups(2)
        assert found.keys() <= {"a", "b"} and again.keys() == found.keys() | {"c"}
        for name, group in again.items():
            assert group == _group(name)
    assert found.keys() == {"a", "b"}  # all but the end of the last line, which that does not need

"""From the courses of all seeds to the figures of the table: final accuracy, area, and VAPO less
each row, paired."""

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from ..intervals import interval
from .settings import ROWS
from .training import Course

Courses = dict[str, dict[int, Course]]  # by row and seed


def summarise(courses: Courses, rollouts: int) -> dict[str, dict[str, Any]]:
    """Of each row the final accuracy and the mean over the course ("area"), each also as VAPO less
    the row.

    Rows without a critic go on until they have drawn as many responses as VAPO with its value
    pretraining; here they are read after the same number of rollouts as the others. Intervals are
    (mean, half width).
    """
    rows: dict[str, dict[str, Any]] = {}
    reference = courses.get("vapo", {})
    for name, by_seed in courses.items():
        found = list(by_seed.values())
        row: dict[str, Any] = {
            "title": ROWS[name].title,
            "seeds": sorted(by_seed),
            "final": interval([course.accuracy[rollouts] for course in found]),
            "area": interval([_area(course, rollouts) for course in found]),
            "by_length": [
                mean(column) for column in zip(*(c.by_length[rollouts] for c in found), strict=True)
            ],
            "insight": mean(course.insight[rollouts] for course in found),
            "responses": found[0].responses[rollouts],
            "length": _metric(found, "length", rollouts - 1, rollouts),
            "clip_low": _metric(found, "clip_low", 0, rollouts),
            "clip_high": _metric(found, "clip_high", 0, rollouts),
        }
        shared = sorted(set(reference) & set(by_seed))
        if name != "vapo" and shared:
            pairs = [(reference[seed], by_seed[seed]) for seed in shared]
            row["final_less"] = interval(
                [a.accuracy[rollouts] - b.accuracy[rollouts] for a, b in pairs]
            )
            row["area_less"] = interval([_area(a, rollouts) - _area(b, rollouts) for a, b in pairs])
        if "critic_explains" in found[0].metrics:
            row["explains_first"] = _metric(found, "critic_explains", 0, 1)
            row["explains_last"] = _metric(found, "critic_explains", rollouts - 1, rollouts)
        rows[name] = row
    return rows


def at_responses(
    courses: Courses, parts: Sequence[float] = (0.25, 0.5, 0.75, 1.0)
) -> list[dict[str, Any]]:
    """Accuracy at parts of the responses that VAPO drew in all, value pretraining counted, and VAPO
    less each, paired.

    A row that has not begun with its policy by then stands where it started.
    """
    total = next(iter(courses["vapo"].values())).responses[-1]
    tables = []
    for part in parts:
        reached = {}
        for name, by_seed in courses.items():
            counts = next(iter(by_seed.values())).responses
            if counts[-1] >= part * total - max(1, counts[-1] // 50):
                done = max(0, sum(count <= part * total for count in counts) - 1)
                reached[name] = {seed: course.accuracy[done] for seed, course in by_seed.items()}
        rows = {
            name: {
                "accuracy": interval(list(found.values())),
                "less": interval(
                    [
                        reached["vapo"][seed] - found[seed]
                        for seed in found
                        if seed in reached["vapo"]
                    ]
                ),
            }
            for name, found in reached.items()
        }
        tables.append({"part": part, "responses": int(part * total), "rows": rows})
    return tables


def curves(courses: Courses) -> dict[str, dict[str, list[float]]]:
    """Of each row the mean accuracy over seeds by responses drawn so far."""
    return {
        name: {
            "responses": [float(count) for count in next(iter(by_seed.values())).responses],
            "accuracy": [
                mean(at)
                for at in zip(*(course.accuracy for course in by_seed.values()), strict=True)
            ],
        }
        for name, by_seed in courses.items()
    }


def _area(course: Course, rollouts: int) -> float:
    return mean(course.accuracy[1 : rollouts + 1])


def _metric(courses: Iterable[Course], name: str, first: int, end: int) -> float:
    return mean(mean(course.metrics[name][first:end]) for course in courses)

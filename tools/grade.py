"""Grade responses against ground-truth answers: rows {answer, response} in, as samples and
evaluations are written (or {gold, prediction}), the same rows with "correct" and "reason" out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from vapo_megatron.command_line import run_app
from vapo_megatron.config.explain import explain
from vapo_megatron.config.reward import RewardConfig
from vapo_megatron.data.jsonl import read_rows, write_rows
from vapo_megatron.errors import BadInput, told_in_one_line
from vapo_megatron.rewards.pool import VerifierPool

_NAMES = (("gold", "answer"), ("prediction", "response"))


def read_cases(path: Path) -> list[tuple[dict[str, Any], tuple[str, str]]]:
    """The rows of path, each with its answer and response. Raises BadInput, naming line and field,
    for one without."""
    rows = []
    for number, row in read_rows(path):
        texts = []
        for names in _NAMES:
            name = next((name for name in names if name in row), None)
            if name is None:
                raise BadInput(
                    f"{path}:{number}: no field {' or '.join(map(repr, names))}; each row needs one"
                )
            if not isinstance(row[name], str):
                raise BadInput(
                    f"{path}:{number}: field {name} is {type(row[name]).__name__}; expected a text"
                )
            texts.append(row[name])
        rows.append((row, (texts[0], texts[1])))
    if not rows:
        raise BadInput(f"{path}: holds no rows; give at least one with answer and response")
    return rows


def grade_file(cases: Path, out: Path, config: RewardConfig) -> tuple[int, int]:
    """Grade the rows of cases into out; return how many are correct and how many there are."""
    rows = read_cases(cases)
    with VerifierPool(config) as pool:
        grades = pool.grade_batch([texts for _, texts in rows])

    def graded() -> Iterator[dict[str, Any]]:
        for (row, _), grade in zip(rows, grades, strict=True):
            yield {
                **row,
                "correct": grade.correct,
                "reason": grade.reason,
                "extracted": grade.extracted,
            }

    write_rows(out, graded())
    return sum(grade.correct for grade in grades), len(grades)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    cases: Annotated[
        Path, typer.Option(help="JSONL with answer (or gold) and response (or prediction).")
    ],
    out: Annotated[
        Path, typer.Option(help="JSONL to write: the rows with correct, reason and extracted.")
    ],
    answer_format: Annotated[
        str, typer.Option(help="auto, marked, boxed, answer_line, answer_tag or hash.")
    ] = "auto",
    workers: Annotated[int, typer.Option(help="Verifier processes.")] = 2,
    response_timeout_s: Annotated[float, typer.Option(help="Time for one row.")] = 5.0,
) -> None:
    """Grade every row and write them all, or nothing."""
    settings = {
        "answer_format": answer_format,
        "workers": workers,
        "response_timeout_s": response_timeout_s,
    }
    with told_in_one_line("error"):
        try:
            config = RewardConfig.model_validate(settings)
        except ValidationError as error:
            raise BadInput(explain(error, RewardConfig, settings, "options")) from None
        correct, total = grade_file(cases, out, config)
    typer.echo(f"{out}: {correct} of {total} correct")


if __name__ == "__main__":
    run_app(app, "error")

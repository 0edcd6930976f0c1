"""Turn a GSM8K file into the rows that training reads: {id, problem, answer}, the answer a plain number.

Takes the official form (question, answer ending in "#### 72") and rows {problem, answer}, as .jsonl or .jsonl.gz.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from vapo_megatron.errors import BadInput, VapoError
from vapo_megatron.experience.jsonl import read_rows, write_rows


def convert(row: dict[str, Any], name: str, place: str) -> dict[str, str]:
    """One row. Raises BadInput, naming place and field, if there is no question or no answer in it."""
    problem = row.get("question", row.get("problem"))
    answer = row.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        raise BadInput(f"{place}: no text in the fields question or problem; give a GSM8K row")
    if not isinstance(answer, str) or not answer.strip():
        raise BadInput(f"{place}: no text in the field answer; give a GSM8K row")
    if "question" in row and "####" not in answer:
        raise BadInput(f"{place}: field answer has no '#### <number>' at its end; give a GSM8K row")
    return {
        "id": str(row.get("id", name)),
        "problem": problem.strip(),
        "answer": answer.rpartition("####")[2].strip().replace(",", ""),
    }


def prepare(source: Path, target: Path, split: str) -> int:
    """Write the rows of source to target and return how many they are."""
    rows = [
        convert(row, f"gsm8k-{split}-{index:05d}", f"{source}:{number}")
        for index, (number, row) in enumerate(read_rows(source))
    ]
    if not rows:
        raise BadInput(f"{source}: holds no rows; give a GSM8K file")
    return write_rows(target, rows)


def main(
    train: Annotated[Path, typer.Option(help="GSM8K training rows.")],
    test: Annotated[Path, typer.Option(help="GSM8K test rows.")],
    out: Annotated[Path, typer.Option(help="Directory for train.jsonl and eval.jsonl.")],
) -> None:
    """Write train.jsonl and eval.jsonl."""
    try:
        training = prepare(train, out / "train.jsonl", "train")
        evaluation = prepare(test, out / "eval.jsonl", "test")
    except VapoError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    typer.echo(f"{out}: {training} training and {evaluation} evaluation problems")


if __name__ == "__main__":
    typer.run(main)

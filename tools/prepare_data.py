"""Turn published sets of problems into the rows that training and evaluation read: {id, problem,
answer}.

    tools/prepare_data.py --source hub:BytedTsinghua-SIA/DAPO-Math-17k --out data/dapo17k.jsonl \
        --against data/aime2024.jsonl --against data/aime2025.jsonl

Repeated problems and those of the evaluation sets are left out; <out>.report.json names each
missing row and why.
"""

from pathlib import Path
from typing import Annotated

import typer

from vapo_megatron.command_line import run_app
from vapo_megatron.errors import BadInput, told_in_one_line
from vapo_megatron.operations.preparation import OVERLAP_LIMIT, prepare

PROMPTS = {
    "chat": (
        "chat_template: true",
        r'user_template: "{problem}\n\nPlease reason step by step, and put your final answer '
        r'within \\boxed{}."',
    ),
    "base": (
        "chat_template: false",
        r'user_template: "Solve the following math problem step by step. The last line of your '
        r"response should be of the form Answer: $Answer (without quotes) where $Answer is the "
        r"answer to the problem.\n\n{problem}\n\n"
        r'Remember to put your answer on its own line after \"Answer:\"."',
    ),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__.partition("\n\n")[0])
def main(
    source: Annotated[
        list[str],
        typer.Option(
            help=(
                "A .jsonl, .jsonl.gz, .json or .parquet file, or hub:OWNER/NAME[@REVISION][:PART]. "
                "Repeatable."
            )
        ),
    ],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Evaluation problems that must not be trained on. Repeatable."),
    ] = None,
    overlap: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Share of common 8-grams from which on a row counts as known."
        ),
    ] = OVERLAP_LIMIT,
    integers: Annotated[
        bool, typer.Option("--integers", help="Keep rows whose answer is an integer.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Field of the source's rows to write too, for data.fields.extra. Repeatable."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="chat or base: print a data.prompt section for such a model.")
    ] = None,
) -> None:
    """Prepare, and say what came of it."""
    with told_in_one_line("error"):
        if prompt is not None and prompt not in PROMPTS:
            raise BadInput(f"--prompt {prompt}: no such prompt; give one of {', '.join(PROMPTS)}")
        if out.exists():
            raise BadInput(f"--out {out}: exists already; name another place, or remove it")
        outcome = prepare(
            source,
            out,
            against or (),
            overlap_limit=overlap,
            integers_only=integers,
            keep=keep or (),
        )
    for reason, count in outcome.counts().items():
        typer.echo(f"left out: {count} {reason}")
    if prompt is not None:
        typer.echo("data:\n  prompt:\n    " + "\n    ".join(PROMPTS[prompt]))
    typer.echo(f"{out}: {outcome.kept} of {outcome.rows} rows; {out}.report.json names the others")


if __name__ == "__main__":
    run_app(app, "error")

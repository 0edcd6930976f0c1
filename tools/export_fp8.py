"""Quantise a trained policy for serving: a Hugging Face directory in, an FP8 or NVFP4 directory
that SGLang loads out.

python tools/export_fp8.py --hf runs/NAME/hf/final/actor --out actor-fp8 --calibration prompts.jsonl
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vapo_megatron.command_line import run_app
from vapo_megatron.data.jsonl import read_rows
from vapo_megatron.errors import BadInput, told_in_one_line


class Format(StrEnum):
    """What weights become."""

    fp8 = "fp8"
    nvfp4 = "nvfp4"


def read_sequences(path: Path, field: str, hf_dir: Path, rows: int, tokens: int) -> list[list[int]]:
    """Token ids of the texts of the first rows of a jsonl file, each cut to some tokens.

    Raises BadInput, naming file and line, where a row has no text, and where no text has two
    tokens.
    """
    from vapo_megatron.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(hf_dir)
    sequences: list[list[int]] = []
    for number, row in read_rows(path):
        if len(sequences) == rows:
            break
        text = row.get(field)
        if not isinstance(text, str):
            found = "no field" if field not in row else f"a {type(text).__name__} as field"
            raise BadInput(
                f"{path}:{number}: {found} {field!r}, expected a text; name the field with --field"
            )
        ids = tokenizer.encode(text)[:tokens]
        if len(ids) >= 2:
            sequences.append(ids)
    if not sequences:
        raise BadInput(
            f"{path}: holds no text of two tokens or more; give prompts, or better prompts with "
            "responses"
        )
    return sequences


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    hf: Annotated[
        Path, typer.Option(help="Directory of the trained policy, as training exports it.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist.")],
    calibration: Annotated[Path, typer.Option(help="JSONL of texts such as the model will see.")],
    format: Annotated[
        Format, typer.Option(help="fp8: a scale per tensor; nvfp4: 4 bits (Blackwell).")
    ] = Format.fp8,
    field: Annotated[str, typer.Option(help="Field of a row that holds its text.")] = "prompt",
    rows: Annotated[int, typer.Option(min=1, help="Rows of the calibration that are used.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each that are used.")] = 2048,
) -> None:
    """Quantise and write; or write nothing."""
    with told_in_one_line("error"):
        if out.exists():
            raise BadInput(f"{out}: exists already; name another place")
        if not hf.is_dir():
            raise BadInput(f"--hf {hf}: no such directory; give a Hugging Face model directory")
        import torch

        from vapo_megatron.operations.quantized_export import check_source, export_quantized

        spec = check_source(hf)
        tokens = min(tokens, spec.max_position_embeddings)
        sequences = read_sequences(calibration, field, hf, rows, tokens)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        share = export_quantized(hf, out, format.value, sequences, device)
    typer.echo(f"{out}: {format.value}, {share:.2f} of the bytes; evaluate it before it is served")


if __name__ == "__main__":
    run_app(app, "error")
